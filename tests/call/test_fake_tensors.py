"""Fake tensors (FakeTensorMode: shapes, no data), with which memory is estimated. (Looks of calls: test_modes.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_kernels import LMHeadLogProb, LoRA, grpo_loss, linear_logprob, token_level
from tests.support.flat import flat
from tests.support.modes import looks, score_results

B, T, H, V = 2, 5, 8, 19


def inputs() -> dict[str, Any]:
    """Arguments of `grpo_loss`; under a FakeTensorMode they are fake."""
    return {
        "hidden": torch.randn(B, T, H, requires_grad=True),
        "weight": torch.randn(V, H, requires_grad=True),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": torch.ones(B, T),
        "advantages": torch.ones(B),
    }


def test_options_on_which_no_shape_depends() -> None:
    with FakeTensorMode():
        given = inputs()
        given = {
            "hidden": given["hidden"],
            "weight": given["weight"],
            "ids": given["completion_ids"],
        }
        options = {"expected": torch.zeros(B, T), "gather": torch.no_grad, "vocab_size": V - 1}
        want = looks(score_results(flat(linear_logprob), given))
        assert looks(score_results(flat(linear_logprob), given | options)) == want


def test_a_head_and_scores_without_gradient() -> None:
    with FakeTensorMode(), torch.no_grad():
        scores = LMHeadLogProb(H, V).logprobs(
            torch.randn(B, T, H), torch.zeros(B, T, dtype=torch.long)
        )
        assert {*looks(scores.given).values()} == {((B, T), torch.float32, torch.device("cpu"))}
        assert not scores.logps.requires_grad


def test_the_fused_head_of_trl() -> None:
    pytest.importorskip("trl")
    import trl.trainer.utils as trl_utils

    from grpo_kernels.host import KnownRows, during
    from grpo_kernels.trl import fused_head
    from grpo_kernels.trl.scoring import CALL, ModelCall

    def run(op: Any, call: ModelCall) -> Any:
        given = inputs()
        with during(CALL, call):
            logps, entropies = op.apply(
                given["hidden"].view(-1, H),
                given["weight"],
                None,
                torch.zeros(B * T).long(),
                1.0,
                32,
            )[:2]
        (logps + entropies).sum().backward()
        return looks(
            {
                "logps": logps,
                "entropies": entropies,
                **{x: given[x].grad for x in ("hidden", "weight")},
            }
        )

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
            with pytest.raises(
                ValueError, match=f"{name}: expected None with fake tensors, which have no data"
            ):
                flat(grpo_loss)(**given, **{name: x})
        for name, shape in (
            ("completion_ids", (B, T + 1)),
            ("completion_mask", (B + 1, T)),
            ("weight", (V, H + 1)),
        ):
            wrong = torch.zeros(shape, dtype=given[name].dtype)
            with pytest.raises(ValueError, match=f"{name}: expected shape"):
                flat(grpo_loss)(**{**given, name: wrong})
