"""The one loop of the engines: over chunks of rows, project, reduce, and, where wanted, turn logits into gradients.

``score`` is a sweep without coefficients, ``one_pass`` a sweep with them, ``frozen`` a sweep with a = 1, and the second
half of ``two_pass`` a sweep whose row statistics are already known. (That of ``lean`` goes by slices of the vocabulary,
`slices.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.rows import FusedRowBackend, LogitTransform, RowBackend, RowStats
from grpo_kernels.engine.plan import Group, plan_groups
from grpo_kernels.engine.products import Products
from grpo_kernels.token_loss import TokenLoss

SLICE_BYTES = 32 * 2**20  # of the weight converted at a time; the same for all budgets but small ones

Coefficients = tuple[Tensor, Tensor | None]  # a = d loss / d logp and b = d loss / d entropy, (m,) each
CoefficientsOf = Callable[[Tensor, RowStats], Coefficients]  # of the rows at an index (m,), given their statistics


@dataclass(frozen=True)
class Head:
    """The three tensors that may want a gradient."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)

    def row_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias as row backends read it."""
        return None if self.bias is None else self.bias.detach().to(dtype).contiguous()


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


def accumulator_of(compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics, and gradients before their one rounding, for operands of `compute_dtype`."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


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
        return accumulator_of(self.compute_dtype)

    def products(self, weight: Tensor) -> Products:
        """Those of `weight`, which may be a part of the head."""
        slice_bytes = min(SLICE_BYTES, self.workspace_bytes // 8)
        return Products(weight, self.compute_dtype, self.accumulator, slice_bytes)

    def transform(self, bias: Tensor | None, inv_temperature: float | Tensor) -> LogitTransform:
        """How the raw projection of rows becomes their logits; `bias` as `Head.row_bias` gives it."""
        rounded_to = self.compute_dtype if self.round_logits else None
        return LogitTransform(self.scale, self.softcap, inv_temperature, bias, rounded_to)


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
    token_loss: TokenLoss | None = None,
    wants: Wants | None = None,
) -> tuple[RowStats, Gradients | None]:
    """Statistics of `rows`, and their gradients if `wants` is given.

    Args:
        head: hidden states and head.
        rows: which of them, n rows.
        config: how.
        entropy, extras: statistics to compute besides the log-probability.
        stats: the statistics, (n,) each, where they are known already.
        coefficients: called with places in `rows` (m,) and their statistics, a chunk at a time.
        token_loss: the loss of the rows, for a backend that fuses: its terms are then the extras, and `coefficients`
            are asked only where d logits have to be scaled before they are rounded.
        wants: which gradients; needs `coefficients` or `token_loss`.

    Returns:
        Statistics (n,), and the gradients, or None without `wants`.
    """
    n, vocab = len(rows), head.weight.shape[0]
    products, backend = config.products(head.weight), config.backend
    in_place = products.gradient_dtype == config.accumulator
    groups = _groups(n, products, config, gradient=wants is not None, on_gpu=rows.positions.is_cuda)
    bias = head.row_bias(config.accumulator)
    sums = None if wants is None else _Sums(head, n, config, wants)
    collected: list[RowStats] = []
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        most = max((chunk.stop - chunk.start for group in groups for chunk in group.chunks), default=0)
        buffer = d_logits = head.hidden.new_empty(most, vocab, dtype=config.accumulator)
        if sums is not None and not in_place:
            most = max((group.rows for group in groups), default=0)
            d_logits = head.hidden.new_empty(most, vocab, dtype=products.gradient_dtype)
        for group in groups:
            pick = torch.arange(group.start, group.start + group.rows, device=rows.positions.device)
            pick[len(group) :] = group.start  # padding repeats the first row
            hidden = products.operand(head.hidden[rows.positions[pick]])
            scale = None  # in fp16; a group is then one chunk
            for chunk in group.chunks:
                index, logits = pick[chunk], buffer[: chunk.stop - chunk.start]
                some = rows.at(index)
                transform = config.transform(bias, some.inv_temperature)
                products.logits(hidden[chunk], logits)
                backend.prepare_(logits, transform)
                target = None if sums is None else logits if in_place else d_logits[chunk]
                fuses_gradient = token_loss is not None and not products.scales_gradient
                if token_loss is not None:
                    assert isinstance(backend, FusedRowBackend)
                    ids = some.ids if some.invalid is None else torch.where(some.invalid, -1, some.ids)
                    out = target if fuses_gradient else None
                    found = backend.fused(logits, ids, transform, token_loss.at(index), out)
                elif stats is None:
                    found = backend.stats(logits, some.ids, transform, entropy=entropy, extras=extras)
                    if some.invalid is not None:
                        found.logps.masked_fill_(some.invalid, torch.nan)
                else:
                    found = stats.rows(index)
                if target is not None and not fuses_gradient:
                    assert coefficients is not None
                    a, b, scale = products.scaled(*coefficients(index, found), transform)
                    backend.grad(logits, some.ids, found, a, b, transform, target)
                if stats is None:
                    collected.append(found.rows(slice(max(0, len(group) - chunk.start))))
            if sums is not None:
                d_logits[len(group) : group.rows] = 0.0
                sums.add(group, products, hidden, d_logits[: group.rows], scale)
    if stats is None:
        entropy, extras = (entropy, extras) if token_loss is None else (True, token_loss.terms)
        stats = RowStats.concatenate(collected, head.hidden, config.accumulator, entropy=entropy, extras=extras)
    return stats, None if sums is None else sums.gradients()


def _groups(n: int, products: Products, config: HeadConfig, *, gradient: bool, on_gpu: bool) -> list[Group]:
    """How the rows are divided. A chunk has its logits, a group its hidden states and d logits of another dtype."""
    vocab = products.weight.shape[0]
    row_bytes = vocab * config.accumulator.itemsize
    separate = gradient and products.gradient_dtype != config.accumulator

    def scratch_bytes(m: int) -> int:
        return max(products.slice_bytes, config.backend.scratch_rows(m, vocab) * row_bytes)  # never at the same time

    return plan_groups(
        n,
        config.workspace_bytes,
        chunk_row_bytes=row_bytes,
        group_row_bytes=products.hidden_bytes() + (vocab * products.gradient_dtype.itemsize if separate else 0),
        grouped=separate and not products.scales_gradient,
        scratch_bytes=scratch_bytes,
        on_gpu=on_gpu,
    )


class _Sums:
    """d hidden, d weight and d bias, as the groups add to them."""

    def __init__(self, head: Head, n: int, config: HeadConfig, wants: Wants) -> None:
        vocab, width = head.weight.shape
        # d weight is written by the first group's product; without a group it is 0
        new_weight = head.hidden.new_empty if n > 0 else head.hidden.new_zeros
        self._hidden = head.hidden.new_empty(n, width, dtype=config.accumulator) if wants.hidden else None
        self._weight = new_weight(vocab, width, dtype=config.accumulator) if wants.weight else None
        self._bias = head.hidden.new_zeros(vocab, dtype=config.accumulator) if wants.bias else None
        self._scale: Tensor | None = None  # what d weight and d bias are multiplied by

    def add(self, group: Group, products: Products, hidden: Tensor, d_logits: Tensor, scale: Tensor | None) -> None:
        """What a group gives: its operand (m, H) and d logits (m, V), which `scale` () multiplies."""
        if scale is not None and self._scale is not None:
            self._rescale(scale / self._scale)
        self._scale = scale
        if self._hidden is not None:
            place = self._hidden[group.start : group.stop]
            if group.rows == len(group):
                products.d_hidden(d_logits, place)
            else:
                padded = place.new_empty(group.rows, hidden.shape[1])
                products.d_hidden(d_logits, padded)
                place.copy_(padded[: len(group)])
            if scale is not None:
                place.div_(scale)
        if self._weight is not None:
            products.d_weight(d_logits, hidden, self._weight, first=group.start == 0)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(dim=0, dtype=self._bias.dtype))

    def gradients(self) -> Gradients:
        if self._scale is not None:
            self._rescale(1.0 / self._scale)
        return Gradients(self._hidden, self._weight, self._bias)

    def _rescale(self, factor: Tensor) -> None:
        for x in (self._weight, self._bias):
            if x is not None:
                x.mul_(factor)
