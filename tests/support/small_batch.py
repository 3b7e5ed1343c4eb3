"""The arguments of a small call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.support.case_builder import PER_TOKEN

OPTIONAL = ("bias", *PER_TOKEN, "importance_sampling_ratio")


def small_batch(
    b: int = 2, t: int = 5, h: int = 4, v: int = 9, optional: Iterable[str] = (), *,
    trains: Iterable[str] = (), **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of ``flat(grpo_loss)``, with those `optional` ones.

    The tensors named in `trains` want a gradient. Every token counts, and advantages are 1 and -1
    in turn. The numbers are the same in every call.
    """
    g = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    given: dict[str, Any] = {
        "hidden": normal(b, t, h),
        "weight": normal(v, h),
        "completion_ids": torch.randint(v, (b, t), generator=g),
        "completion_mask": torch.ones(b, t),
        "advantages": torch.tensor([1.0, -1.0]).repeat(b)[:b],
    }
    more = {"bias": normal(v), **{name: -2 - normal(b, t).abs() for name in PER_TOKEN}}
    more["importance_sampling_ratio"] = normal(b, t).exp()
    given |= {name: more[name] for name in optional} | changes
    for name in trains:
        if name in given:
            given[name].requires_grad_()
    return given
