"""The GSM8K scripts: the plain loop's reward; verl's configuration, which verl itself makes.

The configuration needs hydra, of requirements/peers.txt, and neither Ray's processes nor a GPU.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import tiny_models
from tests.support.acted_build import script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PLAIN = ROOT / "examples" / "gsm8k_plain.py"


RIGHT = [
    "so it is \\boxed{1024}.",
    "12 * 85 + 4 = 1,024\n#### 1,024",
    "\\boxed{7}, no, \\boxed{1024}",
    "#### 1024\nThat took 3 days.",
]
WRONG = ["\\boxed{1024}, no, \\boxed{7}", "\\boxed{-1024}", "\\boxed{}", "It is 1024."]


@pytest.mark.parametrize("package", ["math_verify", None])
def test_the_plain_loop_rewards_right_answers(package: str | None) -> None:
    """With math-verify, and without it."""
    for needed in ("transformers", "datasets", *filter(None, [package])):
        pytest.importorskip(needed)
    with mock.patch.dict(sys.modules, {} if package else {"math_verify": None}):
        loop = runpy.run_path(str(PLAIN))
    assert (loop["verify"] is not None) is bool(package)
    solution = "12 * 85 = <<12*85=1020>>1020\n1020 + 4 = 1024\n#### 1,024"
    assert [text for text in RIGHT + WRONG if loop["is_right"](text, solution)] == RIGHT


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """verl's configuration of a run of the script, with a model on disk and a GPU more."""
    for needed in ("verl", "ray", "hydra"):
        pytest.importorskip(needed)
    from omegaconf import OmegaConf

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
