"""Fixed cases of losses beside `fixed_cases`: I heads with an adapter, J kept sets. On a CPU
alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import torch

from tests.support.case_builder import Case, make_case
from tests.support.cases import DTYPES, LOSSES, SHORT, Options, loss, poison


def group_i() -> Iterator[Case]:
    """An adapter: every loss, all of a head, an input of its own, dtypes."""
    for i, (x, level) in enumerate(LOSSES):
        kind = loss(x, level) | {"dtype": DTYPES["f32" if i % 3 else "f64"], "b": 4, "lora": 3}
        frozen = tuple({"weight", "bias"} if i % 2 else ())
        yield make_case(f"I/{x}-{SHORT[level]}", bias=True, frozen=frozen, **kind)
    options: dict[str, Options] = {
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
    for (name, option), short in product(options.items(), ("f64", "f32")):
        case = make_case(
            f"I/{name}/{short}", **{"b": 4, "lora": 3, "dtype": DTYPES[short]} | option
        )
        if name == "garbage":
            case = poison(poison(case, "lora_input", math.nan), "hidden", math.nan)
        yield case
    for short, kind in DTYPES.items():
        for adapter in ("f32", "bf16") if short != "f64" else ("f64",):
            dtypes: Options = {"b": 4, "lora": 3, "dtype": kind, "lora_dtype": DTYPES[adapter]}
            yield make_case(f"I/{adapter}-on-{short}/plain", **dtypes)
            own = {"lora_input": True, "frozen": ("weight",)}
            yield make_case(f"I/{adapter}-on-{short}/input", **own, **dtypes)


def group_j() -> Iterator[Case]:
    """Losses over kept sets, with and without positions that have none."""
    head: Options = {"bias": True, "final_logit_softcapping": 4.0, "logit_scale": 1.6}
    head |= {"temperature": 1.3, "b": 4, "kept": 14}
    for (i, (x, level)), without in product(enumerate(LOSSES), ("error", "full")):
        kind: Options = {"dtype": DTYPES["f32" if i % 2 else "f64"]} | loss(x, level)
        kind |= {"others": {"on_missing_set": without}}
        kind |= {} if x == "gmpo" else {"entropy_coef": 0.02}
        yield make_case(f"J/{x}-{SHORT[level]}/{without}", **head, **kind)
    full: Options = {"others": {"on_missing_set": "full"}, "b": 4, "kept": 9}
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
