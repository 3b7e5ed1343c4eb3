"""What the tests of the row kernels feed them: rows of logits, transforms, losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    DivergenceStats,
    FusedLoss,
    LogitTransform,
    RowBackend,
    RowStats,
)
from grpo_kernels.backends.formulas import ESTIMATORS
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.loss_types import LOSSES
from grpo_kernels.typing import Extra

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the Triton kernels run
FIELDS = ("logps", "max_logit", "log_sum", "entropies")
EXTRAS: tuple[Extra, ...] = get_args(Extra)
PLAIN = LogitTransform()
ISAS = ("portable", "avx2", "avx512")  # of the C++ kernels
FUSED = {x.surrogate: x for x in LOSSES.values() if not (x.log_ratio or x.surrogate_input)}
ON_POLICY = ("constant", "linear")  # losses whose derivative is known


def rows(n: int, vocab: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    return torch.randn(n, vocab, device=device) * 3.0, torch.randint(vocab, (n,), device=device)


def make_transform(
    n: int, vocab: int, kind: int, rounded_to: torch.dtype | None, device: str = DEVICE
) -> LogitTransform:
    """Four kinds: plain; bias, scale and a temperature; one a row; all with a soft-cap."""
    bias = torch.randn(vocab, device=device)
    inv_t = torch.randn(n, 1, device=device).sigmoid() + 0.5
    kinds = (
        PLAIN,
        LogitTransform(scale=0.3, inv_temperature=1.7, bias=bias),
        LogitTransform(scale=1.5, inv_temperature=inv_t),
        LogitTransform(scale=1.5, softcap=4.0, inv_temperature=inv_t, bias=bias),
    )
    return replace(kinds[kind % 4], rounded_to=rounded_to)


def make_loss(logps: Tensor, kind: int) -> FusedLoss:
    """Each surrogate and estimator in turn, with log-ratios on both sides of the bounds, and a
    reference that is near and far."""
    some = lambda: torch.randn_like(logps)  # noqa: E731
    kl, names = (None, *ESTIMATORS)[kind % 4], (*FUSED, *ON_POLICY)
    surrogate = names[kind % len(names)]
    slopes, on_policy, constants = some(), surrogate in ON_POLICY, ()
    distance = 10.0 ** (torch.arange(len(logps), device=logps.device) % 3 * 1.5 - 3).to(logps)
    if not on_policy:
        high = 1.28 if surrogate == "cispo" else 0.28
        config = LossConfig(epsilon_high=high, delta=None if kind % 7 else 1.5)
        constants = FUSED[surrogate].constants(config)
    return FusedLoss(
        surrogate=None if on_policy else surrogate,
        is_linear=surrogate == "linear",
        constants=constants,
        kl_estimator=kl,
        corrects_kl=kind % 3 == 0,
        advantages=None if on_policy else slopes,
        d_policy=slopes if on_policy else None,
        weights=torch.rand_like(logps),
        old=None if on_policy else logps + 0.3 * some(),
        ref=None if kl is None else logps + distance * some(),
        gate=None if kind % 2 else torch.rand_like(logps).round(decimals=1),
        beta=0.0 if kl is None else 0.04,
        d_entropy=0.0 if kind % 3 else -0.01,
    )


def assert_same(got: RowStats, want: RowStats, name: str = "", *, nan: bool = False) -> None:
    """The same bits, in all that both have; NaN only where allowed, and then in the same places."""
    equal = same if nan else torch.equal
    assert (got.divergence is None) == (want.divergence is None)
    gots, wants = tensors_of(got), tensors_of(want)
    for field in gots.keys() & wants.keys():
        assert equal(gots[field], wants[field]), f"{name}: {field}"


def tensors_of(stats: RowStats) -> dict[str, Tensor]:
    found = {x: getattr(stats, x) for x in FIELDS if getattr(stats, x) is not None}
    of_pair = {} if stats.divergence is None else stats.divergence._asdict()
    diverged = {f"divergence {field}": x for field, x in of_pair.items()}
    return found | stats.extras | stats.loss_stats | diverged


def same(x: Tensor, y: Tensor) -> bool:
    """The same bits, save that any NaN is as good as another."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    x, y = (torch.where(z.isnan(), torch.nan, z) if z.is_floating_point() else z for z in (x, y))
    return x.dtype == y.dtype and torch.equal(x.view(integer), y.view(integer))


def in_double(values: Any) -> Any:
    """A dataclass with its floating tensors in float64."""
    tensors = {f.name: getattr(values, f.name) for f in fields(values)}
    wide = {name: x.double() for name, x in tensors.items() if isinstance(x, Tensor)}
    return replace(values, **wide)


def prepared(kernels: RowBackend, chunk: Chunk) -> Chunk:
    """A copy of the raw logits of `chunk`, and of its reference's, as `kernels` read them."""
    logits, reference = chunk.logits.clone(), chunk.reference
    kernels.prepare_(logits, chunk.transform)
    if reference is not None:
        reference = replace(reference, logits=reference.logits.clone())
        kernels.prepare_(reference.logits, reference.transform)
    return replace(chunk, logits=logits, reference=reference)


def statistics(kernels: RowBackend, chunk: Chunk, extras: tuple[str, ...] = EXTRAS) -> RowStats:
    """All statistics of the rows, and their divergence from the reference's if they have one."""
    stats = kernels.stats(replace(chunk, reference=None), entropy=True, extras=extras)
    if chunk.reference is None:
        return stats
    reference = kernels.stats(chunk.reference, entropy=False)
    found = kernels.diverge(chunk, stats, reference)
    found = DivergenceStats(*found, reference.max_logit, reference.log_sum)
    return replace(stats, divergence=found)


def full_loss(logps: Tensor, kind: int) -> FusedLoss:
    """Loss number `kind` with the divergence as its KL."""
    return replace(
        make_loss(logps, kind), kl_estimator="full", ref=None, corrects_kl=False, beta=0.7
    )


def instruction_sets() -> Iterator[str]:
    """Each that the C++ kernels have for this processor, in use."""
    isa = torch.ops.grpo_kernels_cpp.isa
    before, best = isa(""), isa("auto")
    try:
        yield from map(isa, ISAS[: ISAS.index(best) + 1])
    finally:
        isa(before)
