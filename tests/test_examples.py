"""The examples run as a user runs them, each in a process of its own, and end with an assertion of what they claim.

Most of them in one that has loaded transformers already, which takes as long as they do.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import run_script

ROOT = Path(__file__).parent.parent

# name: (steps, or None where it takes none; what its last line must say)
EXAMPLES: dict[str, tuple[int | None, str]] = {
    "plain_loop": (20, "right answers:"),
    "outcome_supervision": (16, "weighted reward:"),
    "process_supervision": (16, "right answers:"),
    "ppo_gae": (20, "right answers:"),
    "iterative_grpo": (4, "score of right less wrong ones"),
    "custom_loss": (16, "of the largest entry"),
    "sampling_correction": (8, "FLOPs of a step saved:"),
    "fsdp2": (None, "largest difference from one process"),
    "tensor_parallel": (None, "largest difference of a gradient"),
    "context_parallel": (None, "of the largest entry"),
    "lora_head": (60, "of the largest entry"),
    "verl_plugin": (None, "of a loss"),
    "verl_losses": (16, "of the largest entry"),
    "causal_lm": (24, "from the models' own log-probabilities"),
    "liger_module": (None, "largest difference from Liger"),
    "kept_set": (16, "ratio to the sampler:"),
    "distillation": (28, "nats from the teacher:"),
}
APART = {"fsdp2", "tensor_parallel", "context_parallel", "verl_plugin"}  # start processes, or change what is imported
FIGURES = {"seconds", "peak_bytes", "flops", "flops_nvh", "loss"}


def run_example(name: str, *options: str) -> str:
    """Run one example with a single thread; returns what it printed, and fails with all of it if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_claims(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    steps, says = EXAMPLES[name]
    options = [] if steps is None else ["--steps", str(steps)]
    if name in APART:
        output = run_example(name, *options)
    else:
        code, output = run_script(ROOT / "examples" / f"{name}.py", options, tmp_path)
        assert code == 0, output
    printed = output.strip().splitlines()
    assert printed[0] == docstring(name).splitlines()[0]
    assert printed[1].startswith("threads: ")
    assert says in printed[-1]
    assert len(printed) >= 5, "expected progress before the result"


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))


def test_every_script_is_covered() -> None:
    shared = {"arithmetic", "begin", "demo", "demo_report", "head_cost", "unified_view"}
    apart = {"gsm8k_plain"}  # tests/test_gsm8k_examples.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == shared | apart | set(EXAMPLES)


@pytest.mark.slow
def test_demo_writes_its_summary_and_picture(tmp_path: Path) -> None:
    for needed in ("trl", "matplotlib"):
        pytest.importorskip(needed)
    printed = run_example("demo", "--smoke", "--output", str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"reward_start", "reward_end", "reward_end_trl", "max_loss_difference", "versions"} <= summary.keys()
    assert summary["max_loss_difference"] <= 1e-5
    assert summary["steps_compared"] == summary["steps"]
    for run in summary["runs"].values():
        assert len(run["losses"]) == summary["steps"]
        assert run["head_peak_bytes"] > 0
        assert run["head_flops"] > 0
        assert run["head_seconds_per_step"] > 0
        assert 0 < run["step_cpu_seconds"] < run["train_seconds"]
    assert summary["runs"]["ours"]["head_flops"] < summary["runs"]["trl"]["head_flops"]
    trl, ours = summary["runs"]["trl"], summary["runs"]["ours"]
    assert trl["sequences/gradient"] == trl["tokens/computed"] == 1
    assert ours["sequences/gradient"] < 1, "some groups have equal rewards"
    assert 0 < ours["tokens/computed"] < 1, "the last token of a completion predicts nothing"
    for case, products in (("all", 6), ("half", 4)):
        pair = summary["head"][case]
        assert pair["trl"].keys() & pair["ours"].keys() >= FIGURES
        assert pair["trl"]["flops_nvh"] == 8
        assert pair["ours"]["flops_nvh"] == products
        assert pair["ours"]["peak_bytes"] < pair["trl"]["peak_bytes"]
    assert "reward at the end" in printed
    assert "Whole training step of this training, generation left out" in printed
    assert "CPU, threads: 1, fp32" in printed
    assert "largest difference of the losses" in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_unified_view_trains_every_method_and_draws_it(tmp_path: Path) -> None:
    for needed in ("transformers", "matplotlib"):
        pytest.importorskip(needed)
    code, printed = run_script(
        ROOT / "examples" / "unified_view.py",
        ["--quick", "--seeds", "1", "--processes", "1", "--output", str(tmp_path)],
        tmp_path,
    )
    assert code == 0, printed
    runs = {run["method"]: run for run in json.loads((tmp_path / "curves.json").read_text())["runs"]}
    assert len(runs) == 7
    learnt = runs.pop("iterative GRPO, learnt reward")
    assert learnt["completions"] == [x + 4 * 27 for x in (0, 128, 256)], "its labelled samples count too"
    for name, run in runs.items():
        assert run["completions"] == [0, 128, 256]
        assert run["reward"][0] == runs["SFT"]["reward"][0], "all begin with one model"
        assert f"{name:<32}" in printed and f"{run['reward'][-1]:.3f} (" in printed
    assert runs["SFT"]["carried"] == [0, 128, 256]
    for name in ("RFT", "online RFT"):
        assert 0 < runs[name]["carried"][-1] < 128, "most answers are wrong, and rejected"
    assert runs["GRPO, outcome"]["carried"][-1] > runs["online RFT"]["carried"][-1]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
