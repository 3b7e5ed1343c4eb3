"""The examples run as a user runs them, each in a process of its own, and end with an assertion of
what they claim.

Most of them in one that has loaded transformers already, which takes as long as they do.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import zero3
from tests.support.acted_build import script
from tests.support.ranks import run_script

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
# what becomes of the model
LAUNCHED = {"fsdp2": "FSDPQwen3ForCausalLM", "zero3": "DeepSpeedEngine"}


def run_python(*arguments: str, beside: str = "") -> str:
    """What a Python with a single thread printed, which finds the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), beside, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_example(name: str, *options: str, folder: Path) -> str:
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
    apart = SCRIPTS | {"demo", "gsm8k_plain"}
    assert {path.stem for path in folder.glob("*.py")} == shared | apart | {*EXAMPLES}
    assert {path.stem for path in (folder / "accelerate").glob("*.yaml")} == {*LAUNCHED}


def before_and_after(printed: str, title: str) -> tuple[float, float]:
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
        assert [x["step"] for x in state["log_history"] if "loss" in x] == [*range(1, step + 1)]
        return state["log_history"]

    first = log(10)
    assert any(0 < entry.get("sequences/gradient", 0) < 1 for entry in first)
    resumed = run("--resume", "--max_steps", "12", folder=tmp_path)
    assert "steps: 12;" in resumed
    assert before_and_after(resumed, "accuracy")[0] == before
    assert log(12)[: len(first)] == first


@pytest.mark.slow
def test_the_plain_loop_learns_the_problems_it_makes(tmp_path: Path) -> None:
    for needed in ("transformers", "datasets"):
        pytest.importorskip(needed)
    saved = tmp_path / "model"
    printed = run_example("gsm8k_plain", "--smoke", "--output", str(saved), folder=tmp_path)
    rewards = [float(x) for x in re.findall(r"^step \d+: reward (\S+),", printed, re.MULTILINE)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, printed
    assert re.search(r"test problems right: \d\.\d+ before, \d\.\d+ after$", printed, re.MULTILINE)
    assert (saved / "config.json").exists()


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
    printed = run_python(*launch, beside=str(zero3.FOLDER) if kind == "zero3" else "")
    assert f"prepared: {LAUNCHED[kind]}" in printed
    assert printed.count("steps: 10;") == 1
    before, after = before_and_after(printed, "accuracy")
    assert 0 < before < after


@pytest.mark.slow
def test_demo_writes_its_summary(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = run_example("demo", "--smoke", "--output", str(tmp_path), folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["max_loss_difference"] <= 1e-5
    assert summary["steps_compared"] == summary["steps"]
    assert summary["runs"]["ours"]["tokens/computed"] < summary["runs"]["trl"]["tokens/computed"]
    assert summary["steps_with_same_norm"] == summary["steps"]
    assert "gradient norms agree to 1e-04 in 3." in printed


# The plain loop's reward; and verl's configuration, which needs hydra, of requirements/peers.txt,
# and neither Ray's processes nor a GPU

RIGHT = [
    "so it is \\boxed{1024}.",
    "12 * 85 + 4 = 1,024\n#### 1,024",
    "\\boxed{7}, no, \\boxed{1024}",
    "#### 1024\nThat took 3 days.",
]
WRONG = ["\\boxed{1024}, no, \\boxed{7}", "\\boxed{-1024}", "\\boxed{}", "It is 1024."]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["math_verify", None])
def test_the_plain_loop_rewards_right_answers(package: str | None) -> None:
    """With math-verify, and without it."""
    for needed in ("transformers", "datasets", *filter(None, [package])):
        pytest.importorskip(needed)
    with mock.patch.dict(sys.modules, {} if package else {"math_verify": None}):
        loop = runpy.run_path(str(ROOT / "examples" / "gsm8k_plain.py"))
    assert (loop["verify"] is not None) is bool(package)
    solution = "12 * 85 = <<12*85=1020>>1020\n1020 + 4 = 1024\n#### 1,024"
    assert [text for text in RIGHT + WRONG if loop["is_right"](text, solution)] == RIGHT


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """verl's configuration of a run of the script, with a model on disk and a GPU more."""
    for needed in ("verl", "ray", "hydra"):
        pytest.importorskip(needed)
    from omegaconf import OmegaConf

    from benchmarks import tiny_models

    folder = tmp_path_factory.mktemp("gsm8k_verl")
    tiny_models.model("tied").save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    script(folder / "python3", f'exec "{sys.executable}" "$@"')  # which the script calls
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "GSM8K": "/data/gsm8k",
    }
    command = ["bash", str(ROOT / "examples" / "gsm8k_verl.sh")]
    command += [f"actor_rollout_ref.model.path={folder / 'model'}"]
    command += ["trainer.n_gpus_per_node=2", "--cfg", "job"]
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": folder}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return OmegaConf.create(done.stdout)


@pytest.mark.slow
def test_verl_accepts_the_configuration(composed: Any) -> None:
    """Its own checks before it starts anything; its dataclasses refuse names that they do not have.
    What its engine does with these options is tested in integrations/test_verl_engine.py."""
    from hydra.errors import InstantiationException
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    needs = {"use_reference_policy": need_reference_policy(composed)}
    needs["use_critic"] = need_critic(composed)
    assert needs == {"use_reference_policy": False, "use_critic": False}
    validate_config(composed, **needs)
    assert composed.trainer.n_gpus_per_node == 2, "what follows the script's name comes last"
    assert composed.data.train_files == "/data/gsm8k/train.parquet"
    assert omega_conf_to_dataclass(composed.algorithm).adv_estimator == "grpo"
    rollout = omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
    assert (rollout.name, rollout.n, rollout.tensor_model_parallel_size) == ("vllm", 8, 1)
    of_actor = composed.actor_rollout_ref
    model, actor = (omega_conf_to_dataclass(of_actor[name]) for name in ("model", "actor"))
    assert model.use_fused_kernels and model.use_remove_padding
    assert model.fused_kernel_options == {"impl_backend": "grpo_kernels", "zero_advantage": "score"}
    assert actor.engine.strategy == "fsdp2"
    wrong = OmegaConf.merge(composed.actor_rollout_ref.actor, {"ppo_mini_batchsize": 64})
    with pytest.raises(InstantiationException, match="ppo_mini_batchsize"):
        omega_conf_to_dataclass(wrong)
