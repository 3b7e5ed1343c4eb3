"""Cases of scores without a loss: of the whole vocabulary, kept sets, a teacher's list, another
head."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch

from tests.support.case_builder import Case, make_case
from tests.support.cases import DTYPES, Options, head_options, teacher_options, with_garbage

BETAS = (0.0, 1.0, 0.5, 0.1)
HEADS: dict[str, Options] = {
    "plain": {}, "bias": {"bias": True}, "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "cap": {"final_logit_softcapping": 3.0}, "negative scale": {"logit_scale": -0.8, "bias": True},
    "all": {"temperature": 1.3, "final_logit_softcapping": 4.0, "logit_scale": 1.6, "bias": True},
    "temperatures": {"temperatures": True, "final_logit_softcapping": 6.0}, "lora": {"lora": 3},
    "lora, input": {
        "lora": 3, "lora_input": True, "frozen": ("weight",), "temperatures": True,
        "logit_scale": 1.6,
    },
}  # fmt: skip


def scored(name: str, **options: Any) -> Case:
    """A case that is never made a loss of: nothing old, nothing of a reference."""
    return make_case(name, **{"old": False} | options)


def whole() -> Iterator[Case]:
    """Log-probabilities and entropies of the whole vocabulary."""
    for i, (name, options) in enumerate(HEADS.items()):
        for short in ("f64", ("f32", "bf16", "f16")[i % 3]):
            yield scored(f"scores/{name}/{short}", dtype=DTYPES[short], **options)


def kept() -> Iterator[Case]:
    """Over kept sets: every head in every dtype, in turn with positions without a set and the whole
    entropy."""
    for (i, (name, head)), (j, short) in product(enumerate(HEADS.items()), enumerate(DTYPES)):
        others = {"on_missing_set": ("error", "full")[(i + j) % 2]}
        others["entropy_of"] = ("the set", "all")[(i + j) // 2 % 2]
        options: Options = {"workspace": (2**29, 2_000, 1)[(i + j) % 3], "dtype": DTYPES[short]}
        options["frozen"] = (("hidden",), (), ("weight",), ("bias",))[(i + 2 * j) % 4]
        case = scored(f"kept/{name}/{short}", kept=14, t=9, others=others, **options | head)
        kind = (torch.int64, torch.int32, torch.int16)[(i + j) % 3]
        yield case.but(kept_ids=case.kept_ids.to(kind))
    rounded: Options = {"dtype": torch.bfloat16, "logits_dtype": "input", "temperature": 0.7}
    yield scored("kept/input-logits", kept=14, **rounded)
    yield scored("kept/whole vocabulary", kept=50, bias=True)
    yield scored("kept/one id", kept=1)


def listed() -> Iterator[Case]:
    """From a teacher's list."""
    measures: dict[str, Options] = {
        "forward": {}, "clamped": {"log_prob_min_clamp": -4.0, "loss_max_clamp": 0.4},
        "tail": {"tail": True}, "reverse": {"divergence": "reverse_kl"},
        "reverse, clamped": {"divergence": "reverse_kl", "loss_max_clamp": 0.5},
    }  # fmt: skip
    arrives = ("any", "same", "some", "any", "none")
    for i, (name, measure) in enumerate(measures.items()):
        for j, (of_head, head) in enumerate([*HEADS.items()][i % 2 :: 2]):
            options: Options = {"t": 13, "listed": 5, "workspace": (2**29, 2_000)[j % 2]}
            options["mask"] = ("holes", "full")[j // 2 % 2]
            options["others"] = {**measure, "arrives": arrives[(i + j) % 5]}
            options |= head
            if of_head == "plain":
                options |= {"frozen": ("weight", "bias"), "bias": True}
            for short in ("f64", "f32"):
                yield scored(f"listed/{name}/{of_head}/{short}", dtype=DTYPES[short], **options)
    yield scored("listed/all are listed", listed=50, others={"divergence": "reverse_kl"})


def diverging(
    name: str, *, beta: float = 1.0, arrives: str = "same", more: bool = False, **options: Any
) -> Case:
    """A divergence from another head, and what arrives: the same for all, "any", "some" or "none"
    of it.

    With `more` something arrives at the entropies and log-probabilities, too.
    """
    others = {"beta_of_divergence": beta, "arrives": arrives, "more": more}
    others |= options.pop("others", {})
    return scored(name, others=others, **{"teacher": 0.3} | options)


TEACHERS: dict[str, Options] = {
    "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}},
    "caps": {
        "final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 1.0},
        "bias": True,
    },
    "scales": {"logit_scale": -0.7, "others": {"teacher_logit_scale": 1.4}},
    "other-width": {"teacher_h": 33}, "narrow": {"teacher_h": 1, "bias": True},
    "same": {"teacher": 0.0}, "near": {"teacher": 1e-4}, "far": {"teacher": 4.0, "teacher_h": 8},
    "confident": {"spread": 20.0}, "wide": {"v": 300, "b": 2}, "one-row": {"b": 1, "t": 1},
    "two-ids": {"v": 2}, "none": {"mask": "none"}, "full": {"mask": "full"},
    "workspace": {"workspace": 3 * 50 * 4, "b": 6},
    "frozen": {"frozen": ("weight", "bias"), "bias": True},
    "frozen-any": {"frozen": ("weight",), "arrives": "any"}, "only-head": {"frozen": ("hidden",)},
    "any": {"arrives": "any"}, "some": {"arrives": "some"},
    "more": {"more": True, "arrives": "any"},
}  # fmt: skip


def from_teacher() -> Iterator[Case]:
    """From another head."""
    for i, (name, options) in enumerate((HEADS | TEACHERS).items()):
        for beta in BETAS[i % 2 :: 2]:
            yield diverging(f"teacher/{name}/{beta}", beta=beta, **options)
    wide: Options = {"teacher_h": 24, "bias": True, "arrives": "any"}
    for beta, (short, dtype) in product(BETAS, DTYPES.items()):
        yield diverging(f"teacher/{short}/{beta}", beta=beta, dtype=dtype, **wide)


@cache
def score_cases() -> tuple[Case, ...]:
    """All of them, each with a name of its own; every second with garbage where the mask is 0."""
    cases = [case for group in (whole, kept, listed, from_teacher) for case in group()]
    return tuple(
        with_garbage(case, random.Random(case.name)) if i % 2 else case
        for i, case in enumerate(cases)
    )


def random_divergence_case(seed: int) -> Case:
    """Any head, teacher and divergence, often with garbage where masked."""
    draw = random.Random(f"divergence {seed}")
    options: Options = {"b": draw.choice((1, 2, 3, 6)), "t": draw.choice((1, 2, 5, 11))}
    options |= {"h": draw.choice((1, 3, 16, 31)), "v": draw.choice((2, 7, 33, 64, 129, 200))}
    options["beta"] = draw.choice((0.0, 1.0, 1.0, 0.5, 0.1, 0.9))
    options["arrives"] = draw.choice(("same", "same", "any", "some", "none"))
    options["more"] = draw.random() < 0.3
    options["mask"] = draw.choice(("ragged", "holes", "full", "left", "one", "none"))
    options["workspace"] = draw.choice((2**29, 4 * options["v"], 50 * options["v"]))
    options |= head_options(draw) | teacher_options(draw)
    case = diverging(f"divergence/{seed}", **options)
    return with_garbage(case, draw) if draw.random() < 0.3 else case
