"""Fake tensors (FakeTensorMode: shapes without data), with which memory is estimated: what real ones would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels import GRPOLoss, LMHeadLogProb, LoRA, LossConfig, grpo_loss, linear_logprob, token_level
from tests.support.flat import flat

B, T, H, V = 2, 5, 8, 19
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")


def inputs(dtype: torch.dtype = torch.float32, frozen: bool = False) -> dict[str, Any]:
    """Arguments of `grpo_loss`; under a FakeTensorMode they are fake."""
    return {
        "hidden": torch.randn(B, T, H, dtype=dtype, requires_grad=True),
        "weight": nn.Parameter(torch.randn(V, H, dtype=dtype), requires_grad=not frozen),
        "bias": None if frozen else nn.Parameter(torch.randn(V, dtype=dtype)),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T),
        "advantages": torch.ones(B),
    }


def looks(x: Any) -> Any:
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else x


def loss_looks(config: LossConfig, dtype: torch.dtype, frozen: bool, **options: Any) -> Any:
    given = inputs(dtype, frozen)
    out = flat(GRPOLoss(config))(**given, **options)
    out.loss.backward()
    tensors = [out.loss, out.per_token_logps, out.entropies, *(x for pair in out.metrics.pairs.values() for x in pair)]
    gradients = [getattr(given[name], "grad", None) for name in ("hidden", "weight", "bias")]
    return out.engine, [*out.metrics], [looks(x) for x in (*tensors, *out.metrics.values(), *gradients)]


def logprob_looks(dtype: torch.dtype, frozen: bool, **options: Any) -> Any:
    given = inputs(dtype, frozen)
    head = {name: given[name] for name in ("hidden", "weight", "bias")}
    found = flat(linear_logprob)(**head, ids=given["completion_ids"], extras=EXTRAS, **options)
    (found.logps.sum() - found.entropies.sum()).backward()
    return [looks(x) for x in (*found.given.values(), *(getattr(x, "grad", None) for x in head.values()))]


LOSSES = {
    "one pass": LossConfig(loss_type="grpo", entropy_coef=0.01),
    "two passes": LossConfig(importance_sampling_level="sequence"),
    "vespo": LossConfig(loss_type="vespo"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_look_as_real_ones(name: str, dtype: torch.dtype, frozen: bool) -> None:
    def run() -> Any:
        return loss_looks(LOSSES[name], dtype, frozen, old_per_token_logps=torch.zeros(B, T), num_items_in_batch=7)

    real = run()
    with FakeTensorMode():
        assert run() == real


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_probabilities_look_as_real_ones(dtype: torch.dtype, frozen: bool) -> None:
    real = logprob_looks(dtype, frozen)
    with FakeTensorMode():
        assert logprob_looks(dtype, frozen) == real
        speed = {"expected": torch.zeros(B, T), "gather": torch.no_grad, "vocab_size": V - 1}  # of no shape
        assert logprob_looks(dtype, frozen, **speed) == real


def test_a_head_and_scores_without_gradient() -> None:
    with FakeTensorMode(), torch.no_grad():
        scores = LMHeadLogProb(H, V).logprobs(torch.randn(B, T, H), torch.zeros(B, T, dtype=torch.long))
        assert looks(scores.logps) == looks(scores.entropies) == ((B, T), torch.float32, torch.device("cpu"))
        assert not scores.logps.requires_grad


def test_the_fused_head_of_trl() -> None:
    pytest.importorskip("trl")
    import trl.trainer.utils as trl_utils

    from grpo_kernels.integrations.host import during
    from grpo_kernels.integrations.rows import KnownRows
    from grpo_kernels.integrations.trl import fused_head
    from grpo_kernels.integrations.trl.scoring import CALL, ModelCall

    def run(op: Any, call: ModelCall) -> Any:
        given = inputs()
        with during(CALL, call):
            found = op.apply(given["hidden"].view(-1, H), given["weight"], None, torch.zeros(B * T).long(), 1.0, 32)
        (found[0] + found[1]).sum().backward()
        return [looks(x) for x in (*found, given["hidden"].grad, given["weight"].grad)]

    with FakeTensorMode():
        theirs = run(trl_utils._ChunkedLogProbFunction, ModelCall())
        assert run(fused_head.FusedHead, ModelCall()) == theirs
        labelled = torch.ones(B, T)
        assert run(fused_head.FusedHead, ModelCall(labelled, B, KnownRows(labelled))) == theirs


def test_wrong_and_unknown_arguments_are_named() -> None:
    with FakeTensorMode():
        given = inputs()
        for name, x in (
            ("lora", LoRA(torch.zeros(2, H), torch.zeros(V, 2))),
            ("objective", token_level(lambda tokens: -tokens.logps)),
        ):
            with pytest.raises(ValueError, match=f"{name}: expected None with fake tensors, which have no data"):
                flat(grpo_loss)(**given, **{name: x})
        for name, shape in (("completion_ids", (B, T + 1)), ("completion_mask", (B + 1, T)), ("weight", (V, H + 1))):
            wrong = torch.zeros(shape, dtype=given[name].dtype)
            with pytest.raises(ValueError, match=f"{name}: expected shape"):
                flat(grpo_loss)(**{**given, name: wrong})
