"""Scores without a loss: cases with divergences, kept sets, lists of a teacher, and `check_scores` on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.case_builder import Case, make_case
from tests.support.cases import DTYPES
from tests.support.head_bounds import (
    Diverging,
    computed_in,
    divergence_bounds,
    head_bounds,
    logit_bounds,
    score_bounds,
)
from tests.support.random_cases import head_options, teacher_options, with_garbage
from tests.support.reference import ScoresResult, reference_scores
from tests.support.reference_head import SCORES, on_grid
from tests.support.reference_terms import settings
from tests.support.run_case import diverges, run_scores, upstream_of
from tests.support.tolerance import compare, compare_grads

BETAS = (0.0, 1.0, 0.5, 0.1)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {}, "bias": {"bias": True}, "temperature": {"temperature": 0.6}, "hot": {"temperature": 2.0},
    "cap": {"final_logit_softcapping": 3.0}, "negative scale": {"logit_scale": -0.8, "bias": True},
    "all": {"temperature": 1.3, "final_logit_softcapping": 4.0, "logit_scale": 1.6, "bias": True},
    "temperatures": {"temperatures": True, "final_logit_softcapping": 6.0}, "lora": {"lora": "plain"},
    "lora, input": {"lora": "input", "frozen": ("weight",), "temperatures": True, "logit_scale": 1.6},
}  # fmt: skip


def scored(name: str, **options: Any) -> Case:
    """A case that is never made a loss of: nothing old, nothing of a reference."""
    return make_case(name, **{"old": False} | options)


def group_s() -> Iterator[Case]:
    """Log-probabilities and entropies of the whole vocabulary."""
    for i, (name, options) in enumerate(HEADS.items()):
        for short in ("f64", ("f32", "bf16", "f16")[i % 3]):
            yield scored(f"S/{name}/{short}", dtype=DTYPES[short], **options)


def group_k() -> Iterator[Case]:
    """Over kept sets: every head in every dtype, in turn with positions without a set and the whole entropy."""
    for i, (name, options) in enumerate(HEADS.items()):
        for j, (short, dtype) in enumerate(DTYPES.items()):
            others = {"without_set": ("error", "full")[(i + j) % 2], "entropy_of": ("the set", "all")[(i + j) // 2 % 2]}
            more = {"workspace": (2**29, 2_000, 1)[(i + j) % 3], "frozen": (("hidden",), (), ("weight",), ("bias",))[j]}
            case = scored(f"K/{name}/{short}", kept=14, t=9, dtype=dtype, others=others, **more | options)
            yield case.but(kept_ids=case.kept_ids.to((torch.int64, torch.int32, torch.int16)[(i + j) % 3]))
    yield scored("K/input-logits", kept=14, dtype=torch.bfloat16, logits_dtype="input", temperature=0.7)
    yield scored("K/whole vocabulary", kept=50, bias=True)
    yield scored("K/one id", kept=1)


def group_t() -> Iterator[Case]:
    """From a teacher's list."""
    measures: dict[str, dict[str, Any]] = {
        "forward": {}, "clamped": {"log_prob_min_clamp": -4.0, "loss_max_clamp": 0.4}, "tail": {"tail": True},
        "reverse": {"divergence": "reverse_kl"},
        "reverse, clamped": {"divergence": "reverse_kl", "loss_max_clamp": 0.5},
    }  # fmt: skip
    arrives = ("any", "same", "some", "any", "none")
    for i, (name, measure) in enumerate(measures.items()):
        for j, (of_head, options) in enumerate([*HEADS.items()][i % 2 :: 2]):
            others = {**measure, "arrives": arrives[(i + j) % 5]}
            frozen = {"frozen": ("weight", "bias"), "bias": True} if of_head == "plain" else {}
            for short in ("f64", "f32"):
                shape = {"t": 13, "listed": 5, "dtype": DTYPES[short]}
                shape |= {"workspace": (2**29, 2_000)[j % 2], "mask": ("holes", "full")[j // 2 % 2]}
                yield scored(f"T/{name}/{of_head}/{short}", **{**shape, **options, **frozen}, others=others)
    yield scored("T/all are listed", listed=50, others={"divergence": "reverse_kl"})


def diverging(name: str, *, beta: float = 1.0, arrives: str = "same", more: bool = False, **options: Any) -> Case:
    """A divergence from another head, and what arrives: the same for all, "any", "some" or "none" of it.

    With `more` something arrives at the entropies and log-probabilities, too.
    """
    others = {"beta_of_divergence": beta, "arrives": arrives, "more": more, **options.pop("others", {})}
    return scored(name, others=others, **{"teacher": 0.3} | options)


def group_d() -> Iterator[Case]:
    """From another head."""
    more: dict[str, dict[str, Any]] = {
        "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}},
        "caps": {"final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 1.0}, "bias": True},
        "scales": {"logit_scale": -0.7, "others": {"teacher_logit_scale": 1.4}}, "other-width": {"teacher_h": 33},
        "narrow": {"teacher_h": 1, "bias": True}, "same": {"teacher": 0.0}, "near": {"teacher": 1e-4},
        "far": {"teacher": 4.0, "teacher_h": 8}, "confident": {"spread": 20.0}, "wide": {"v": 300, "b": 2},
        "one-row": {"b": 1, "t": 1}, "two-ids": {"v": 2}, "none": {"mask": "none"}, "full": {"mask": "full"},
        "workspace": {"workspace": 3 * 50 * 4, "b": 6}, "frozen": {"frozen": ("weight", "bias"), "bias": True},
        "frozen-any": {"frozen": ("weight",), "arrives": "any"}, "only-head": {"frozen": ("hidden",)},
        "any": {"arrives": "any"}, "some": {"arrives": "some"}, "more": {"more": True, "arrives": "any"},
    }  # fmt: skip
    for i, (name, options) in enumerate((HEADS | more).items()):
        for beta in BETAS[i % 2 :: 2]:
            yield diverging(f"D/{name}/{beta}", beta=beta, **options)
    for beta in BETAS:
        for short, dtype in DTYPES.items():
            yield diverging(f"D/{short}/{beta}", beta=beta, dtype=dtype, teacher_h=24, bias=True, arrives="any")


@cache
def score_cases() -> tuple[Case, ...]:
    """All of them, each with a name of its own; every second with garbage where the mask is 0."""
    cases = [case for group in (group_s, group_k, group_t, group_d) for case in group()]
    return tuple(with_garbage(case, random.Random(case.name)) if i % 2 else case for i, case in enumerate(cases))


def random_divergence_case(seed: int) -> Case:
    """Any head, teacher and divergence, often with garbage where masked."""
    draw = random.Random(f"divergence {seed}")
    shape = {"b": draw.choice((1, 2, 3, 6)), "t": draw.choice((1, 2, 5, 11)), "h": draw.choice((1, 3, 16, 31))}
    vocab = draw.choice((2, 7, 33, 64, 129, 200))
    case = diverging(
        f"divergence/{seed}",
        beta=draw.choice((0.0, 1.0, 1.0, 0.5, 0.1, 0.9)),
        arrives=draw.choice(("same", "same", "any", "some", "none")),
        more=draw.random() < 0.3,
        mask=draw.choice(("ragged", "holes", "full", "left", "one", "none")),
        workspace=draw.choice((2**29, 4 * vocab, 50 * vocab)),
        v=vocab,
        **shape,
        **head_options(draw),
        **teacher_options(draw),
    )
    return with_garbage(case, draw) if draw.random() < 0.3 else case


def engines_of(case: Case) -> tuple[str, ...]:
    """Engines that give the case's scores, of which kept sets have no choice."""
    if case.kept_ids is not None:
        return ("auto",)
    return ("auto", "one_pass", "two_pass", "lean") if diverges(case) else ("auto", "two_pass", "lean")


def check_scores(case: Case, engines: tuple[str, ...] = (), **options: Any) -> None:
    """Results and gradients of every engine that serves the case, within their bounds."""
    want = reference_scores(case, upstream_of(case))
    for engine in engines or engines_of(case):
        results, grads = run_scores(case, engine, **options)
        assert_scores(case.but(name=f"{case.name}, engine {engine}"), want, results, grads, engine)


def assert_scores(
    case: Case, want: ScoresResult, results: dict[str, Tensor], grads: dict[str, Tensor | None], engine: str = "auto"
) -> None:
    """What an engine gave against the reference; a masked position has exactly 0."""
    e, e_entropy = score_bounds(case, want)
    diverging = divergence_bounds(case, want.head, e) if diverges(case) else None
    limits = {"logps": e, "entropies": e_entropy, "divergences": diverging and diverging.value}
    for name in SCORES:
        assert name in results or case.listed_ids is not None or name == "divergences"
        if name in results:
            assert results[name].dtype == computed_in(case)
            compare(name, results[name], getattr(want, name), on_grid(limits[name], want.head.counted), case)
    d_raw, bound = raw_bounds(case, want, (e, e_entropy), diverging, engine)
    compare_grads(grads, want, case, head_bounds(case, want, d_raw, bound), 1.0)


def raw_bounds(
    case: Case, want: ScoresResult, errors: tuple[Tensor, Tensor], diverging: Diverging | None, engine: str
) -> tuple[Tensor, Tensor]:
    """What was stored for an expectation that did not come true is taken off again: it counts with its size."""
    zeros, o = torch.zeros_like(want.d_logps), settings(case)
    d_raw, bound = logit_bounds(case, want, *errors, zeros, zeros, want.d_logps.abs(), diverging)
    if diverging is None or engine not in ("auto", "one_pass") or (o.arrives == "same" and not o.more):
        return d_raw, bound
    # What is stored is the divergences' alone, so that it cancels nothing of the others.
    largest = want.d_divergences.abs().max() if want.d_divergences.numel() else 0.0
    slopes = torch.full_like(want.d_divergences, 2.0) * largest
    stored = replace(want, d_logps=zeros, d_entropies=zeros, d_divergences=slopes)
    more, more_bound = logit_bounds(case, stored, *errors, zeros, zeros, zeros, diverging)
    return d_raw.abs() + more.abs(), bound + more_bound
