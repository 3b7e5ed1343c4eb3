"""The tolerance against right and deliberately wrong candidates; the reference's options."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import make_case
from tests.support.cases import random_case
from tests.support.reference import DEFAULTS, TERMS, Exact, reference_loss
from tests.support.tolerance import assert_matches, computed_in


def accepted(case, told=None, raw=None, edits=None):
    """True if the tolerance takes the reference's results, each rounded once, for the case's: of
    the case as it was `told`, with another result of the products, and edited results."""
    reference, does = reference_loss(case), Exact()
    does.raw = raw or does.raw
    want = vars(reference_loss(case.but(**(told or {})), does))
    want |= {field: edit(want[field]) for field, edit in (edits or {}).items()}
    rounded = {x: want[x].to(computed_in(case)) for x in ("loss", "logps", "entropies")}
    grads: dict[str, Tensor | None] = {
        x: None if x in case.frozen else want[f"d_{x}"].to(getattr(case, x).dtype)
        for x in want["head"].leaves
    }
    output = SimpleNamespace(**rounded, metrics=want["metrics"])
    try:
        assert_matches(output, grads, reference, case)
    except AssertionError:
        return False
    return True


CASE = make_case(
    "faults", b=5, noise=0.4, epsilon_high=0.28, bias=True, beta=0.3, ratio="token", delta=1.1,
    off_policy_mask_threshold=0.03, top_entropy_quantile=0.6, temperature=0.8,
)  # fmt: skip
# what is wrong: of what is told, of the products, or of a result
FAULTS: dict[str, dict[str, Any]] = {
    "weight gradient x 1.001": {"edits": {"d_weight": lambda x: 1.001 * x}},
    "hidden gradient x 0.9995": {"edits": {"d_hidden": lambda x: 0.9995 * x}},
    "bias gradient lost": {"edits": {"d_bias": torch.zeros_like}},
    "masked logps not 0": {"edits": {"logps": lambda x: torch.where(x == 0, 1e-12, x)}},
    "loss x 1.0001": {"edits": {"loss": lambda x: 1.0001 * x}},
    "a metric": {"edits": {"metrics": lambda x: x | {"ratio": 1.001 * x["ratio"]}}},
    "logits in bfloat16": {"raw": lambda x: x.bfloat16().to(x.dtype)},
    "logits off by 2^-12 (TF32)": {"raw": lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))},
    "last vocabulary lane lost": {
        "raw": lambda x: x.masked_fill(torch.arange(x.shape[1]) == x.shape[1] - 1, -1e4)
    },
    "importance ratio ignored": {"told": {"importance_sampling_ratio": None}},
    **{f"{option} ignored": {"told": {"config": {option: value}}} for option, value in (
        ("epsilon", 0.1), ("delta", None), ("use_bias_correction_kl", False),
        ("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0),
    )},
}  # fmt: skip


def test_the_tolerance_accepts_what_is_right_and_no_more() -> None:
    assert all(accepted(case) for case in (CASE, *map(random_case, range(30))))
    assert [name for name, wrong in FAULTS.items() if accepted(CASE, **wrong)] == []


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert get_args(LossTypeName) == tuple(TERMS)
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            default = option.default
            if option.name == "max_completion_length":  # ours has none
                default = 512
            assert DEFAULTS[option.name] == default, option.name
