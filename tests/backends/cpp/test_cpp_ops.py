"""The C++ ops: torch's own checks of schema, aliasing and fakes, and the arguments they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import (
    Chunk,
    Coefficients,
    DivergenceStats,
    LogitTransform,
    ReferenceLogits,
    RowStats,
)
from tests.support.row_cases import (
    EXTRAS,
    PLAIN,
    full_loss,
    in_double,
    make_loss,
    make_transform,
    rows,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

N, V = 4, 33
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What `CppRows` hands to the ops: name, arguments, keyword arguments."""
    found: list[Call] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> None:
                found.append((name, args, kwargs))
                getattr(ops, name)(*args, **kwargs)

            return call

    ops = torch.ops.grpo_kernels_cpp
    monkeypatch.setattr(torch.ops, "grpo_kernels_cpp", Recorder())
    return found


def use_every_op(dtype: torch.dtype, kind: int) -> None:
    """Each op, with and without what is optional."""
    (raw, ids), kernels = rows(N, V, "cpu"), CppRows()
    transform = make_transform(
        N, V, kind, None if dtype == torch.float64 else torch.bfloat16, "cpu"
    )
    raw, transform = raw.to(dtype), in_double(transform) if dtype == torch.float64 else transform
    stats = kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
    kernels.stats(Chunk(raw, ids, PLAIN), entropy=False)
    both = Coefficients(stats.logps, stats.entropies)
    kernels.grad(Chunk(raw, ids, transform, 3), stats, both, torch.empty_like(raw))
    kernels.grad(Chunk(raw, ids, PLAIN), stats, Coefficients(stats.logps), torch.empty_like(raw))
    kernels.fused(Chunk(raw, ids, transform), make_loss(stats.logps, kind), torch.empty_like(raw))
    kernels.fused(Chunk(raw, ids, PLAIN), make_loss(stats.logps, kind + 4), None)
    chunk = Chunk(raw, ids, PLAIN, reference=ReferenceLogits(raw.flip(0), transform, 0.5))
    stats, out = with_divergence(kernels, chunk, stats), torch.empty_like(raw)
    kernels.grad(chunk, stats, Coefficients(stats.logps, stats.entropies, stats.logps), out)
    kernels.fused(chunk, full_loss(stats.logps, kind), out)


def with_divergence(kernels: CppRows, chunk: Chunk, stats: RowStats) -> RowStats:
    """`stats` with the divergence of a chunk whose reference has the same statistics."""
    found = kernels.diverge(chunk, stats, stats)
    return replace(stats, divergence=DivergenceStats(*found, stats.max_logit, stats.log_sum))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), list(enumerate(DTYPES)), ids=str)
def test_opcheck(
    kind: int, dtype: torch.dtype, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_every_op(dtype, kind)
    monkeypatch.undo()
    assert len(calls) == 9
    # of the other dtypes a third each
    for name, args, kwargs in calls if kind == 0 else calls[kind % 3 :: 3]:
        results = opcheck(getattr(torch.ops.grpo_kernels_cpp, name).default, args, kwargs)
        assert len(results) == 4
        assert set(results.values()) == {"SUCCESS"}, (name, results)


def test_refusals() -> None:
    raw, ids = rows(N, V, "cpu")
    kernels, stats = CppRows(), CppRows().stats(Chunk(raw, ids, PLAIN), entropy=False)
    a = stats.logps

    def refused(message: str, logits: Tensor = raw, ids: Tensor = ids, **transform: Any) -> None:
        with pytest.raises(RuntimeError, match=message):
            kernels.stats(Chunk(logits, ids, LogitTransform(**transform)), entropy=False)

    refused(r"ids: expected contiguous \(4,\)", ids=ids[:-1])
    refused(r"ids: expected contiguous", ids=ids.repeat_interleave(2)[::2])
    refused(r"expected scalar type \S*Long", ids=ids.int())
    refused("expected float32, float64, bfloat16 or float16", logits=ids[:, None].repeat(1, V))
    refused("logits: expected contiguous rows", logits=raw.T.contiguous().T)
    refused(r"bias: expected contiguous \(33,\)", bias=torch.zeros(V - 1))
    refused(r"expected scalar type \S*Float", bias=torch.zeros(V, dtype=torch.float64))
    refused("inv_temperatures: expected", inv_temperature=torch.ones(N + 1, 1))
    refused("rounded_to: expected a dtype of 16 bits", rounded_to=torch.float32)
    for out in (torch.empty(N, V + 1), torch.empty(N, V, dtype=torch.float64), torch.empty(V, N).T):
        with pytest.raises(RuntimeError, match="out: "):
            kernels.grad(Chunk(raw, ids, PLAIN), stats, Coefficients(a), out)
    with pytest.raises(RuntimeError, match="entropies: expected with d_entropy"):
        kernels.grad(Chunk(raw, ids, PLAIN), stats, Coefficients(a, a), torch.empty_like(raw))
    with pytest.raises(RuntimeError, match="d_logp: expected"):
        kernels.grad(Chunk(raw, ids, PLAIN), stats, Coefficients(a[:2]), torch.empty_like(raw))


def test_refusals_of_references() -> None:
    (raw, ids), kernels = rows(N, V, "cpu"), CppRows()
    chunk = Chunk(raw, ids, PLAIN, reference=ReferenceLogits(raw.flip(0), PLAIN, 0.5))
    stats = with_divergence(
        kernels, chunk, kernels.stats(replace(chunk, reference=None), entropy=False)
    )
    a, out, plain = stats.logps, torch.empty_like(raw), replace(chunk, reference=None)

    def refused(message: str, logits: Tensor = raw, beta: float = 0.5, **transform: Any) -> None:
        reference = ReferenceLogits(logits, LogitTransform(**transform), beta)
        with pytest.raises(RuntimeError, match=message):
            kernels.diverge(replace(chunk, reference=reference), stats, stats)

    refused(r"reference_logits: expected \(4, 33\)", raw[:, :-1])
    refused("reference_logits: expected contiguous rows", raw.T.contiguous().T)
    refused("reference_logits: float64 goes with float64 alone", raw.double())
    refused("reference_bias: expected", bias=torch.zeros(V - 1))
    refused("reference_inv_temperatures: expected", inv_temperature=torch.ones(N + 1, 1))
    refused(r"jsd_beta: expected a number in \[0, 1\], got nan", beta=float("nan"))
    with pytest.raises(RuntimeError, match="reference_logits: expected"):
        kernels.diverge(plain, stats, stats)
    with pytest.raises(RuntimeError, match=r"d_divergence, sum_k, .*: expected"):
        kernels.grad(chunk, replace(stats, divergence=None), Coefficients(a, None, a), out)
    for some, loss, message in (
        (plain, full_loss(a, 0), "kl: expected"),
        (chunk, make_loss(a, 1), "estimator: expected none with a reference"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels.fused(some, loss, out)
