"""The one loop of every engine: over chunks of rows, project, reduce, and, where wanted, turn logits into gradients.

``score`` is a sweep without coefficients, ``one_pass`` a sweep with them, ``frozen`` a sweep with a = 1, and the second
half of ``two_pass`` a sweep whose row statistics are already known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowBackend, RowStats
from grpo_kernels.engine.plan import chunk_rows, padded_rows
from grpo_kernels.engine.products import Products

SLICE_BYTES = 32 * 2**20  # of the weight converted at a time; the same for all budgets but small ones

Coefficients = tuple[Tensor, Tensor | None]  # a = d loss / d logp and b = d loss / d entropy, (m,) each
CoefficientsOf = Callable[[Tensor, RowStats], Coefficients]  # of the rows at an index (m,), given their statistics


@dataclass(frozen=True)
class Head:
    """The three tensors that may want a gradient."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


@dataclass(frozen=True)
class Rows:
    """The positions to be projected: copies, so that nothing the caller does to its tensors later matters."""

    positions: Tensor  # (n,) int64, places in `hidden`
    ids: Tensor  # (n,) int64, in [0, V)
    inv_temperature: float | Tensor = 1.0  # a number, or (n, 1)
    invalid: Tensor | None = None  # (n,) bool: rows whose log-probability is NaN; None: none

    def __len__(self) -> int:
        return self.positions.shape[0]

    def at(self, index: Tensor) -> Rows:
        """The rows at `index` (m,)."""
        inv_t = self.inv_temperature
        return Rows(
            self.positions[index],
            self.ids[index],
            inv_t[index] if isinstance(inv_t, Tensor) else inv_t,
            None if self.invalid is None else self.invalid[index],
        )


@dataclass(frozen=True)
class HeadConfig:
    """How rows are projected: what stays the same through all sweeps of one call."""

    backend: RowBackend
    compute_dtype: torch.dtype  # of the products' operands
    workspace_bytes: int
    scale: float = 1.0
    softcap: float | None = None
    round_logits: bool = False  # to the compute dtype

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of logits, statistics, and gradients before their one rounding."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Wants:
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def head(self) -> bool:
        return self.weight or self.bias


@dataclass(frozen=True)
class Gradients:
    """Gradients of one sweep in the accumulator's dtype, neither scaled nor rounded yet; None where not wanted."""

    hidden: Tensor | None  # (n, H), a row for each row of the sweep
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,)


def sweep(
    head: Head,
    rows: Rows,
    config: HeadConfig,
    *,
    entropy: bool = False,
    extras: tuple[str, ...] = (),
    stats: RowStats | None = None,
    coefficients: CoefficientsOf | None = None,
    wants: Wants | None = None,
) -> tuple[RowStats, Gradients | None]:
    """Statistics of `rows`, and their gradients if `coefficients` are given.

    Args:
        head: hidden states and head.
        rows: which of them, n rows.
        config: how.
        entropy, extras: statistics to compute besides the log-probability.
        stats: the statistics, (n,) each, where they are known already.
        coefficients: called with places in `rows` (m,) and their statistics, a chunk at a time.
        wants: which gradients.

    Returns:
        Statistics (n,), and the gradients, or None without `coefficients`.
    """
    slice_bytes = min(SLICE_BYTES, config.workspace_bytes // 8)
    products = Products(head.weight, config.compute_dtype, config.accumulator, slice_bytes)
    grads = None
    if coefficients is not None:
        assert wants is not None
        grads = _empty_gradients(head, len(rows), config, wants)
    collected: list[RowStats] = []
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        for place, pick, hidden, logits in _chunks(head, rows, config, products):
            n, chunk = place.stop - place.start, rows.at(pick)
            transform = LogitTransform(config.scale, config.softcap, chunk.inv_temperature)
            config.backend.prepare_(logits, transform)
            if stats is None:
                chunk_stats = config.backend.stats(logits, chunk.ids, entropy=entropy, extras=extras)
                if chunk.invalid is not None:
                    chunk_stats.logps.masked_fill_(chunk.invalid, torch.nan)
                collected.append(chunk_stats.rows(slice(n)))
            else:
                chunk_stats = stats.rows(pick)
            if coefficients is not None and grads is not None:
                a, b = coefficients(pick, chunk_stats)
                config.backend.grad_(logits, chunk.ids, chunk_stats, a, b, transform)
                logits[n:] = 0.0
                _add_gradients(grads, place, products, hidden, products.gradient_operand(logits))
    if stats is None:
        stats = RowStats.concatenate(collected, head.hidden, config.accumulator, entropy=entropy, extras=extras)
    return stats, grads


def _chunks(
    head: Head, rows: Rows, config: HeadConfig, products: Products
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(place in `rows`, the same as an index (m,), operand of hidden states (m, H), raw projection (m, V)).

    m is `padded_rows`: the places past the chunk's own repeat its first. The chunks differ by at most one row, so that
    none is much smaller than the others.
    """
    n, vocab = len(rows), head.weight.shape[0]
    if n == 0:
        return
    logits_row = vocab * products.accumulator.itemsize

    def scratch_bytes(m: int) -> int:
        return max(products.slice_bytes, config.backend.scratch_rows(m, vocab) * logits_row)  # never at the same time

    count = -(-n // chunk_rows(products.row_bytes(), config.workspace_bytes, scratch_bytes))
    buffer = head.hidden.new_empty(padded_rows(-(-n // count)), vocab, dtype=products.accumulator)
    for i in range(count):
        start, stop = n * i // count, n * (i + 1) // count
        pick = torch.arange(start, start + padded_rows(stop - start), device=rows.positions.device)
        pick[stop - start :] = start
        hidden = products.operand(head.hidden[rows.positions[pick]])
        logits = buffer[: pick.shape[0]]
        products.logits(hidden, head.bias, logits)
        if config.round_logits:
            for block in logits.split(16):
                block.copy_(block.to(config.compute_dtype))
        yield slice(start, stop), pick, hidden, logits


def _empty_gradients(head: Head, n: int, config: HeadConfig, wants: Wants) -> Gradients:
    vocab, width = head.weight.shape
    # d weight is written by the first chunk's product; without a chunk it is 0
    new_weight = head.hidden.new_empty if n > 0 else head.hidden.new_zeros
    return Gradients(
        hidden=head.hidden.new_empty(n, width, dtype=config.accumulator) if wants.hidden else None,
        weight=new_weight(vocab, width, dtype=config.accumulator) if wants.weight else None,
        bias=head.hidden.new_zeros(vocab, dtype=config.accumulator) if wants.bias else None,
    )


def _add_gradients(grads: Gradients, place: slice, products: Products, hidden: Tensor, d_logits: Tensor) -> None:
    n = place.stop - place.start
    if grads.hidden is not None:
        if d_logits.shape[0] == n:
            products.d_hidden(d_logits, grads.hidden[place])
        else:
            padded = grads.hidden.new_empty(d_logits.shape[0], hidden.shape[1])
            products.d_hidden(d_logits, padded)
            grads.hidden[place] = padded[:n]
    if grads.weight is not None:
        products.d_weight(d_logits, hidden, grads.weight, first=place.start == 0)
    if grads.bias is not None:
        grads.bias.add_(d_logits.sum(dim=0))
