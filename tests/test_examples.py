"""The examples run as a user runs them, each in a process of its own, and end with an assertion of
what they claim.

Most of them in one that has loaded transformers already, which takes as long as they do.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import zero3
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
    "fsdp2": (None, "largest difference from one process"),
    "tensor_parallel": (None, "largest difference of a gradient"),
    "context_parallel": (None, "of the largest entry"),
    "lora_head": (60, "of the largest entry"),
    "verl_plugin": (None, "of a loss"),
    "causal_lm": (24, "from the models' own log-probabilities"),
    "liger_module": (None, "largest difference from Liger"),
    "kept_set": (16, "ratio to the sampler:"),
    "sampler_product": (None, "sampler's bits: 192 of 192"),
    "gkd_trl": (12, "largest difference from TRL's:"),
}
# start processes, or change what is imported
APART = {"fsdp2", "tensor_parallel", "context_parallel", "verl_plugin", "demo"}
SCRIPTS = {"gsm8k_trl", "distill"}  # of a real run; --smoke makes a small one
WITHOUT_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="needs an environment without vLLM"
)
# what becomes of the model
LAUNCHED = {"fsdp2": "FSDPQwen3ForCausalLM", "zero3": "DeepSpeedEngine"}


def run_python(*arguments: str, beside: tuple[str, ...] = ()) -> str:
    """What a Python with a single thread printed, which finds the checkout; fails with all of it if
    it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), *beside, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_example(name: str, *options: str, folder: Path) -> str:
    """The output of an example in a fork of a process that has loaded transformers, or apart."""
    path = ROOT / "examples" / f"{name}.py"
    if name in APART:
        return run_python(str(path), *options)
    code, printed = run_script(path, [*options], folder)
    assert code == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_claims(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    steps, says = EXAMPLES[name]
    options = [] if steps is None else ["--steps", str(steps)]
    output = run_example(name, *options, folder=tmp_path)
    printed = output.strip().splitlines()
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert printed[0] == ast.get_docstring(ast.parse(source)).splitlines()[0]
    assert printed[1].startswith("threads: ")
    assert says in printed[-1]
    assert len(printed) >= 5, "expected progress before the result"


def test_every_script_is_covered() -> None:
    shared, folder = {"arithmetic", "begin", "gsm8k"}, ROOT / "examples"
    apart = SCRIPTS | {"demo", "gsm8k_plain"}  # tests/test_gsm8k_examples.py
    assert {path.stem for path in folder.glob("*.py")} == shared | apart | {*EXAMPLES}
    assert {path.stem for path in (folder / "accelerate").glob("*.yaml")} == {*LAUNCHED}


def before_and_after(printed: str, title: str) -> tuple[float, float]:
    """Both values of a metric, from the line that a script ends with."""
    pattern = rf"^{title}, 9 test problems: ([\d.]+) before, ([\d.]+) after$"
    found = re.findall(pattern, printed, re.MULTILINE)
    assert len(found) == 1, printed
    return float(found[0][0]), float(found[0][1])


@pytest.mark.slow
def test_grpo_on_gsm8k_learns_writes_checkpoints_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run = partial(run_example, "gsm8k_trl", "--smoke", "--output_dir", str(tmp_path))
    printed = run(folder=tmp_path)
    assert f"steps: 10; model and checkpoints in {tmp_path}" in printed
    before, after = before_and_after(printed, "accuracy")
    assert 0 < before < after

    def log(step: int) -> list[dict[str, Any]]:
        state = json.loads((tmp_path / f"checkpoint-{step}/trainer_state.json").read_text())
        assert state["global_step"] == step
        steps = {entry["step"] for entry in state["log_history"] if "loss" in entry}
        assert steps == set(range(1, step + 1))
        return state["log_history"]

    first = log(10)
    assert any(0 < entry.get("sequences/gradient", 0) < 1 for entry in first)
    resumed = run("--resume", "--max_steps", "12", folder=tmp_path)
    assert "steps: 12;" in resumed
    assert before_and_after(resumed, "accuracy")[0] == before
    longer = log(12)
    assert longer[: len(first)] == first


@pytest.mark.slow
def test_distillation_brings_the_student_nearer_to_the_teacher(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    options = ["--smoke", "--output_dir", str(tmp_path), "--use_peft", "--lora_r", "4"]
    printed = run_example("distill", *options, folder=tmp_path)
    assert f"steps: 10; model and checkpoints in {tmp_path}" in printed
    before, after = before_and_after(printed, "divergence from the teacher")
    assert 0 < after < 0.9 * before
    before_and_after(printed, "accuracy")
    assert (tmp_path / "checkpoint-10" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("zero3", marks=zero3.needs_deepspeed), "fsdp2"])
def test_gsm8k_on_two_processes(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    configuration = str(ROOT / "examples" / "accelerate" / f"{kind}.yaml")
    launch = ["-m", "accelerate.commands.launch", "--config_file", configuration]
    launch += ["--num_processes", "2", "--main_process_port", "0"]
    launch += [str(ROOT / "tests" / "support" / "launched.py")]
    launch += [str(ROOT / "examples" / "gsm8k_trl.py"), "--smoke", "--output_dir", str(tmp_path)]
    printed = run_python(*launch, beside=(str(zero3.FOLDER),) if kind == "zero3" else ())
    assert f"prepared: {LAUNCHED[kind]}" in printed
    assert printed.count("steps: 10;") == 1
    before, after = before_and_after(printed, "accuracy")
    assert 0 < before < after


@pytest.mark.parametrize("kind", LAUNCHED)
def test_accelerate_knows_every_name_in_a_configuration(kind: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    found = load_config_from_file(str(ROOT / "examples" / "accelerate" / f"{kind}.yaml"))
    assert isinstance(found, ClusterConfig)
    assert found.distributed_type.value == {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}[kind]
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*found.fsdp_config, *found.deepspeed_config} <= options


@pytest.fixture
def gsm8k(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the scripts share."""
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("gsm8k")


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        ("distill", "--epochs 3", "epochs"),
        ("distill", "--config {folder}/config.yaml", "epochs"),
        ("gsm8k_trl", "--eval_problems 0", "--eval_problems: expected .*, got .*0"),
        ("gsm8k_trl", "--output_dir {folder}/config.yaml", "--output_dir: expected .*config.yaml"),
        pytest.param("gsm8k_trl", "--use_vllm", "vLLM is not installed", marks=WITHOUT_VLLM),
    ],
)
def test_options_that_cannot_be_are_errors_before_anything_is_read(
    script: str, given: str, message: str, gsm8k: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    import trl

    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    config = {"distill": trl.DistillationConfig, "gsm8k_trl": trl.GRPOConfig}[script]
    options = ["--smoke", *given.format(folder=tmp_path).split()]
    if "--output_dir" not in options:
        options += ["--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    with pytest.raises(SystemExit, match=message):
        gsm8k.parse("On GSM8K", gsm8k.Options, config, {}, {})


def test_problems_are_read_from_copies_of_any_form(gsm8k: Any, tmp_path: Path) -> None:
    made = gsm8k.smoke_problems()
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    for split, rows in made.items():
        rows.to_json(str(tmp_path / "files" / f"{split}.jsonl"))
        rows.to_parquet(str(tmp_path / f"{split}.parquet"))
    for name in ("saved", "files"):
        found = gsm8k.splits(str(tmp_path / name))
        assert all(found[split]["question"] == made[split]["question"] for split in made)
    for name in ("files/train.jsonl", "train.parquet"):  # a tenth is for the test
        found = gsm8k.splits(str(tmp_path / name))
        assert (len(found["train"]), len(found["test"])) == (18, 3)
    made["train"].rename_column("answer", "solution").to_json(str(tmp_path / "other.jsonl"))
    expected = "expected splits train and test with columns question and answer, got"
    with pytest.raises(SystemExit, match=expected):
        gsm8k.splits(str(tmp_path / "other.jsonl"))


def test_a_run_without_unequal_rewards_says_so_once(
    gsm8k: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for shares, said in (([1.0] * 9, 1), ([1.0, 1.0, 0.5, 1.0, 1.0, 1.0], 0)):
        callback = gsm8k.SaysThatNothingIsLearnt()
        state = SimpleNamespace(is_world_process_zero=True)
        for share in shares:
            callback.on_log(None, state, None, logs={"frac_reward_zero_std": share})
            callback.on_log(None, state, None, logs={"eval_loss": 0.0})
        assert capsys.readouterr().out.count("no group has had unequal rewards") == said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--updates 0", "--updates: expected at least 1, got 0"),
        ("--micro-batch 12", "--micro-batch: expected whole groups of 8, got 12"),
        (f"--output {__file__}", "--output: expected a folder, or a name that is free, got the"),
        ("--epochs 3", "unrecognized arguments: --epochs 3"),
    ],
    ids=("updates", "micro-batch", "output", "epochs"),
)
def test_the_plain_loop_refuses_options_that_cannot_be(
    gsm8k: Any, given: str, message: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gsm8k_plain.py", "--smoke", *given.split()])
    with pytest.raises(SystemExit):
        importlib.import_module("gsm8k_plain").main()
    assert message in capsys.readouterr().err


def test_a_solution_is_the_number_of_the_answer(
    gsm8k: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset, DatasetDict

    row = {"question": "How many are 4 times 300?"}
    row["answer"] = "4 * 300 = <<4*300=1200>>1,200\n#### 1,200"
    data = DatasetDict({name: Dataset.from_list([row] * 3) for name in ("train", "test")})
    monkeypatch.setattr(gsm8k, "splits", lambda name: data)
    found = gsm8k.problems(gsm8k.Options(eval_problems=2))
    assert {name: len(split) for name, split in found.items()} == {"train": 3, "test": 2}
    assert found["test"][0]["solution"] == "1200"
    assert found["test"][0]["prompt"][0]["content"].startswith(row["question"])
    completions = [[{"role": "assistant", "content": x}] for x in ("#### 1,200", "1200", "#### 1")]
    assert gsm8k.exact_match(completions, ["1200"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_demo_writes_its_summary(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = run_example("demo", "--smoke", "--output", str(tmp_path), folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"reward_start", "reward_end", "reward_end_trl", "versions"} <= summary.keys()
    assert summary["max_loss_difference"] <= 1e-5
    assert summary["steps_compared"] == summary["steps"]
    trl, ours = summary["runs"]["trl"], summary["runs"]["ours"]
    for run in (trl, ours):
        assert len(run["losses"]) == summary["steps"]
        assert run["step_cpu_seconds"] > 0
    assert trl["sequences/gradient"] == trl["tokens/computed"] == 1
    assert ours["sequences/gradient"] < 1, "some groups have equal rewards"
    assert 0 < ours["tokens/computed"] < 1, "the last token of a completion predicts nothing"
    assert "largest difference of the losses" in printed
