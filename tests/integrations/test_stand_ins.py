"""Stand-ins of other projects have the arguments of the code that they stand for, where its source
can be found.

The source is read and never imported, so that a checkout is enough: ``PYTHONPATH=prime-rl/src``.
Without one, as in continuous integration, each case is skipped and says so.
"""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

TRAINERS = {
    "openrlhf.models.actor": ["Actor.forward"],
    "openrlhf.models.ring_attn_utils": ["unpad_and_slice_tensor", "gather_and_pad_tensor"],
    "skyrl.backends.skyrl_train.workers.model_wrapper": ["HFModelWrapper.forward"],
    "prime_rl.trainer.models.layers.lm_head": [
        "sampling_replay_mask", "FusedOutputLinear.__init__", "FusedOutputLinear.forward",
    ],
    "open_instruct.grpo_utils": ["forward_for_logprobs"],
    "swift.rlhf_trainers.grpo_trainer": ["GRPOTrainer._get_logps_via_local_forward"],
    "torchtune.dev.rl.linear_grpo_loss": ["LinearGRPOLoss.__init__", "LinearGRPOLoss.forward"],
    "nemo_rl.distributed.model_utils": ["from_parallel_hidden_states_to_logprobs"],
    "nemo_rl.models.automodel.train": [
        "LossPostProcessor.__call__", "LogprobsPostProcessor.__call__",
        "forward_with_post_processing_fn",
    ],
    "nemo_rl.algorithms.logits_sampling_utils": ["need_top_k_or_top_p_filtering"],
    "slime.backends.megatron_utils.loss": [
        "_build_shifted_tokens", "_extract_per_sample", "get_log_probs_and_entropy",
    ],
}  # fmt: skip
PEERS = (
    ("cut_cross_entropy.linear_cross_entropy", "linear_cross_entropy"),
    ("unsloth_zoo.fused_losses.fused_linear", "fused_linear_logprobs"),
)
STAND_INS = Path(__file__).parents[1] / "stand_ins"
SUPPORT = Path(__file__).parents[1] / "support"


def source_of(module: str) -> str:
    package, *rest = module.split(".")
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"no source of {package} on the path")
    return Path(spec.submodule_search_locations[0], *rest).with_suffix(".py").read_text()


def arguments_of(source: str, name: str) -> ast.arguments:
    """The arguments of a function or method, without annotations."""
    node: Any = ast.parse(source)
    for part in name.split("."):
        # the last: after its overloads
        node = [x for x in node.body if getattr(x, "name", None) == part][-1]
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments: ast.arguments = node.args
    return arguments


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in TRAINERS.items() for name in names]
)
def test_a_trainers_stand_in_has_its_signature(module: str, name: str) -> None:
    stand_in = arguments_of((SUPPORT / "trainer_stand_ins.py").read_text(), name)
    assert ast.unparse(stand_in) == ast.unparse(arguments_of(source_of(module), name))


@pytest.mark.parametrize(("module", "name"), PEERS)
def test_a_peers_stand_in_has_arguments_that_it_has(module: str, name: str) -> None:
    """Those that the adapter passes by keyword; the first three it passes by position."""
    stand_in = arguments_of(
        STAND_INS.joinpath(*module.split(".")).with_suffix(".py").read_text(), name
    )
    found = arguments_of(source_of(module), name)
    assert len(found.args) >= len(stand_in.args)
    assert {x.arg for x in stand_in.kwonlyargs} <= {x.arg for x in (*found.args, *found.kwonlyargs)}
