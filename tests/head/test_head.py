"""`Head`: its constants, checked where it is made, and the forms in which the calls take one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from grpo_kernels import GRPOLoss, Head, LossConfig, grpo_loss, linear_logprob

WEIGHT = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(10).view(2, 5) % 9


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "final_logit_softcapping", 0.0),
        (ValueError, "final_logit_softcapping", -30.0),
        (ValueError, "final_logit_softcapping", math.nan),
        (TypeError, "final_logit_softcapping", "30"),
        (TypeError, "final_logit_softcapping", True),
        (ValueError, "logit_scale", math.inf),
        (TypeError, "logit_scale", None),
        (TypeError, "logit_scale", np.array([0.5])),
        (TypeError, "logit_scale", torch.tensor(0.5)),
        (ValueError, "logits_dtype", "bfloat16"),
        (ValueError, "logits_dtype", torch.float32),
    ],
)
def test_wrong_constants_are_refused_where_it_is_made(
    error: type[Exception], name: str, value: Any
) -> None:
    with pytest.raises(error, match=rf"^{name}: expected .+, got "):
        Head(WEIGHT, **{name: value})


def test_numpy_numbers_are_numbers() -> None:
    numbers = Head(WEIGHT, final_logit_softcapping=np.float32(2.5), logit_scale=np.float64(1.5))
    whole = Head(WEIGHT, final_logit_softcapping=np.int64(3), logit_scale=np.int64(-2))
    for head, plain in (
        (numbers, Head(WEIGHT, final_logit_softcapping=2.5, logit_scale=1.5)),
        (whole, Head(WEIGHT, final_logit_softcapping=3, logit_scale=-2)),
    ):
        found, want = (linear_logprob(HIDDEN, x, IDS) for x in (head, plain))
        assert torch.equal(found.logps, want.logps) and torch.equal(found.entropies, want.entropies)
        losses = [
            grpo_loss(HIDDEN, x, IDS, None, torch.tensor([1.0, -1.0]), loss_type="grpo").loss
            for x in (head, plain)
        ]
        assert torch.equal(*losses)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Head(WEIGHT).logit_scale = 2.0  # type: ignore[misc]


def test_a_weight_or_a_module_stands_for_a_head_of_it() -> None:
    module = nn.Linear(4, 9, bias=False)
    module.weight.data.copy_(WEIGHT)
    want = linear_logprob(HIDDEN, Head(WEIGHT), IDS).logps
    for head in (WEIGHT, module, Head(module)):
        assert torch.equal(linear_logprob(HIDDEN, head, IDS).logps, want)


def test_the_constants_are_no_fields_of_a_loss() -> None:
    constants = {"final_logit_softcapping", "logit_scale", "logits_dtype"}
    assert not constants & {x.name for x in dataclasses.fields(LossConfig)}
    with pytest.raises(TypeError, match=r"^logit_scale: expected a field of LossConfig"):
        GRPOLoss(logit_scale=2.0)  # type: ignore[call-arg]
