"""Fixed cases of losses beside `fixed_cases`: I heads with an adapter, J kept sets. On a CPU
alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from tests.support.case_builder import Case, make_case
from tests.support.cases import DTYPES, LOSSES, SHORT, loss, poison


def group_i() -> Iterator[Case]:
    """An adapter: every loss, all of a head, an input of its own, dtypes."""
    both = {"weight", "bias"}
    for i, (x, level) in enumerate(LOSSES):
        frozen, short = both if i % 2 else set(), "f32" if i % 3 else "f64"
        kind = loss(x, level) | {"frozen": tuple(frozen), "dtype": DTYPES[short]}
        yield make_case(f"I/{x}-{SHORT[level]}", b=4, bias=True, lora=3, **kind)
    options = {
        "on-policy": {"old": False, "zero_adv": True}, "sequence": loss("grpo", "sequence"),
        "input": {"lora_input": True},
        "input-frozen": {"lora_input": True, "frozen": ("lora_input", "weight")},
        "hidden-frozen": {"frozen": ("hidden", "weight")},
        "only-b": {"frozen": ("hidden", "weight", "lora_a")},
        "factors-frozen": {"frozen": ("weight", "lora_a", "lora_b")},
        "head": {
            "bias": True, "final_logit_softcapping": 4.0, "logit_scale": -1.7, "temperature": 0.8,
        },
        "entropy": {"entropy_coef": 0.05},
        "full-kl": {"kl_estimator": "full", "teacher": 0.3, "beta": 0.3},
        "workspace": {"workspace": 3 * 50 * 4, "b": 6},
        "garbage": {"lora_input": True, "mask": "left"},
    }  # fmt: skip
    for name, option in options.items():
        for short in ("f64", "f32"):
            case = make_case(
                f"I/{name}/{short}", **{"b": 4, "lora": 3, "dtype": DTYPES[short]} | option
            )
            yield (
                poison(poison(case, "lora_input", math.nan), "hidden", math.nan)
                if name == "garbage"
                else case
            )
    for short, kind in DTYPES.items():
        for adapter in ("f32", "bf16") if short != "f64" else ("f64",):
            dtypes = {"dtype": kind, "lora_dtype": DTYPES[adapter]}
            yield make_case(f"I/{adapter}-on-{short}/plain", b=4, lora=3, **dtypes)
            yield make_case(
                f"I/{adapter}-on-{short}/input",
                b=4,
                lora=3,
                lora_input=True,
                frozen=("weight",),
                **dtypes,
            )


def group_j() -> Iterator[Case]:
    """Losses over kept sets, with and without positions that have none."""
    head = {
        "bias": True,
        "final_logit_softcapping": 4.0,
        "logit_scale": 1.6,
        "temperature": 1.3,
        "b": 4,
    }
    for i, (x, level) in enumerate(LOSSES):
        for without in ("error", "full"):
            options = {
                "dtype": DTYPES["f32" if i % 2 else "f64"],
                "others": {"without_set": without},
            }
            extra = {} if x == "gmpo" else {"entropy_coef": 0.02}
            yield make_case(
                f"J/{x}-{SHORT[level]}/{without}",
                kept=14,
                **head,
                **options,
                **extra,
                **loss(x, level),
            )
    full = {"others": {"without_set": "full"}, "b": 4, "kept": 9}
    yield make_case("J/kl", beta=0.1, **full)
    yield make_case("J/on-policy", old=False, zero_adv=True, **full)
    yield make_case("J/top-entropy", top_entropy_quantile=0.6, entropy_coef=0.02, **full)
    yield make_case("J/lora", lora=3, lora_input=True, dtype=torch.float64, **full)
    yield make_case("J/bf16", dtype=torch.bfloat16, **full)
    yield poison(make_case("J/garbage", **full), "kept_ids", 10**6)


@cache
def head_cases() -> tuple[Case, ...]:
    """All of them, each with a name of its own."""
    return (*group_i(), *group_j())
