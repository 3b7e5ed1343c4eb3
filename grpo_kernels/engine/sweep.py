"""The one loop of the engines: over chunks of rows, project, reduce, and, where wanted, turn logits into gradients.

``score`` is a sweep without coefficients, ``one_pass`` a sweep with them, ``frozen`` a sweep with a = 1, and the second
half of ``two_pass`` a sweep whose row statistics are already known. (That of ``lean`` goes by slices of the vocabulary,
`slices.py`.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.rows import FusedRowBackend, RowStats
from grpo_kernels.engine.operands import CoefficientsOf, Gradients, Head, HeadConfig, Rows, Wants
from grpo_kernels.engine.plan import Group, plan_groups
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.shard import widest_part
from grpo_kernels.token_loss import TokenLoss


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
    factors, backend = config.all_products(head), config.backend
    products = factors[0]
    in_place = products.gradient_dtype == config.accumulator
    groups = _groups(n, head, config, gradient=wants is not None)
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
            features = [p.operand(x[rows.positions[pick]]) for p, (x, _) in zip(factors, head.factors(), strict=True)]
            scale = None  # in fp16; a group is then one chunk
            for chunk in group.chunks:
                index, logits = pick[chunk], buffer[: chunk.stop - chunk.start]
                some = rows.at(index)
                transform = config.transform(bias, some.inv_temperature)
                for i, (factor, x) in enumerate(zip(factors, features, strict=True)):
                    factor.logits(x[chunk], logits, first=i == 0)
                backend.prepare_(logits, transform)
                target = None if sums is None else logits if in_place else d_logits[chunk]
                fuses_gradient = token_loss is not None and not products.scales_gradient
                if token_loss is not None:
                    assert isinstance(backend, FusedRowBackend)
                    ids = some.ids if some.invalid is None else torch.where(some.invalid, -1, some.ids)
                    out = target if fuses_gradient else None
                    found = backend.fused(logits, ids, transform, token_loss.at(index), out)
                elif stats is None:
                    found = config.stats(logits, some, transform, entropy=entropy, extras=extras)
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
                sums.add(group, factors, features, d_logits[: group.rows], scale)
    if stats is None:
        entropy, extras = (entropy, extras) if token_loss is None else (True, token_loss.terms)
        stats = RowStats.concatenate(collected, head.hidden, config.accumulator, entropy=entropy, extras=extras)
    return stats, None if sums is None else sums.gradients()


def _groups(n: int, head: Head, config: HeadConfig, *, gradient: bool) -> list[Group]:
    """How the rows are divided. A chunk has its logits, a group its hidden states and d logits of another dtype."""
    products = config.products(widest_part(head.weight, config.shard))
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
        on_gpu=head.weight.is_cuda,
    )


class _Sums:
    """The gradients of the head's tensors, as the groups add to them."""

    def __init__(self, head: Head, n: int, config: HeadConfig, wants: Wants) -> None:
        new, dtype = head.hidden, config.accumulator
        # what is of the vocabulary's size is written by the first group's product; without a group it is 0
        new_matrix = new.new_empty if n > 0 else new.new_zeros
        self._rows: list[Tensor | None] = []  # of each factor: (n, K)
        self._matrices: list[Tensor | None] = []  # (V, K)
        for (x, matrix), (wants_rows, wants_matrix) in zip(head.factors(), wants.factors(), strict=False):
            self._rows.append(new.new_empty(n, x.shape[1], dtype=dtype) if wants_rows else None)
            self._matrices.append(new_matrix(matrix.shape, dtype=dtype) if wants_matrix else None)
        self._bias = new.new_zeros(head.weight.shape[0], dtype=dtype) if wants.bias else None
        self._scale: Tensor | None = None  # what all but the rows are multiplied by

    def add(
        self, group: Group, products: list[Products], features: list[Tensor], d_logits: Tensor, scale: Tensor | None
    ) -> None:
        """What a group gives: its operands (m, K) and d logits (m, V), which `scale` () multiplies."""
        if scale is not None and self._scale is not None:
            self._rescale(scale / self._scale)
        self._scale = scale
        for factor, x, rows, matrix in zip(products, features, self._rows, self._matrices, strict=True):
            if rows is not None:
                place = rows[group.start : group.stop]
                if group.rows == len(group):
                    factor.d_hidden(d_logits, place)
                else:
                    padded = place.new_empty(group.rows, x.shape[1])
                    factor.d_hidden(d_logits, padded)
                    place.copy_(padded[: len(group)])
                if scale is not None:
                    place.div_(scale)
            if matrix is not None:
                factor.d_weight(d_logits, x, matrix, first=group.start == 0)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(dim=0, dtype=self._bias.dtype))

    def gradients(self) -> Gradients:
        if self._scale is not None:
            self._rescale(1.0 / self._scale)
        (hidden, *u), (weight, *b) = self._rows, self._matrices
        return Gradients(hidden, weight, self._bias, *u, *b)

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._matrices, self._bias):
            if x is not None:
                x.mul_(factor)
