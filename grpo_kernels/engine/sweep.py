"""The one loop of the engines: over chunks of rows, project, reduce, and, where wanted, turn logits into gradients.

``score`` is a sweep without coefficients, ``one_pass`` a sweep with them, ``frozen`` a sweep with a = 1, and the second
half of ``two_pass`` a sweep whose row statistics are already known. (That of ``lean`` goes by slices of the vocabulary,
`slices.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, FusedRowBackend, RowStats, SinglePassRowBackend, Teacher
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.gradients import Gradients, NeedsGrad
from grpo_kernels.engine.operands import Coefficients, Head, HeadConfig, Index, Rows
from grpo_kernels.engine.plan import Costs, Group, plan_groups
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.vocab_parallel import widest_part
from grpo_kernels.token_loss.record import TokenLoss


@dataclass(frozen=True)
class Asked:
    """Outputs that a sweep computes.

    Attributes:
        entropy, extras: statistics to compute besides the log-probability.
        stats: the statistics, (n,) each, where they are known already.
        coefficients: of the gradient; called with indices of rows (m,) and their statistics, a chunk at a time.
        slopes: whether the gradient is that of the log-probabilities, or of the divergences where there is a teacher,
            in place of `coefficients`.
        token_loss: the loss of the rows, for a backend that fuses: its terms are then there too, and `coefficients`
            are asked only where d logits have to be scaled before they are rounded.
        needs_grad: which gradients; None: none.
    """

    entropy: bool = False
    extras: tuple[str, ...] = ()
    stats: RowStats | None = None
    coefficients: Callable[[Index, RowStats], Coefficients] | None = None
    slopes: bool = False
    token_loss: TokenLoss | None = None
    needs_grad: NeedsGrad | None = None

    def at(self, index: Index) -> Asked:
        """The same of the rows at `index`."""
        return replace(self, token_loss=None if self.token_loss is None else self.token_loss.at(index))


def sweep(head: Head, rows: Rows, config: HeadConfig, asked: Asked) -> tuple[RowStats, Gradients | None]:
    """Statistics of `rows`, n of them, and their gradients if any is wanted.

    Returns:
        Statistics (n,), and the gradients, or None without `asked.needs_grad`.
    """
    n, vocab = len(rows), head.weight.shape[0]
    groups, factors = _groups(rows, head, config, asked.needs_grad), config.all_products(head)
    teacher = config.logits_of_teacher(head)
    work = _Chunks(config, asked, factors[0], head.row_bias(config.accumulator), rows.top_k is not None)
    sums = None if asked.needs_grad is None else _Sums(head, n, groups, config, asked.needs_grad)
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        most = max((chunk.stop - chunk.start for group in groups for chunk in group.chunks), default=0)
        buffer = matrix_of_logits(head.hidden, most, vocab, config.accumulator)
        other = None if teacher is None else matrix_of_logits(head.hidden, most, vocab, config.accumulator)
        d_logits = buffer if work.in_place else None
        every = _Members(rows, asked.token_loss, asked.stats)
        for group in groups:
            members, first = every.of(group)
            all_rows = slice(first, first + group.rows)
            of_group = [members.operands(x, all_rows, n) for x, _ in head.factors()]
            features = [factor.operand(x) for factor, x in zip(factors, of_group, strict=True)]
            of_teacher = None if teacher is None else members.operands(teacher.hidden, all_rows, n)
            for chunk in group.chunks:
                logits = buffer[: chunk.stop - chunk.start]
                for i, (factor, x) in enumerate(zip(factors, features, strict=True)):
                    factor.logits(x[chunk], logits, first=i == 0)
                if d_logits is None and sums is not None:  # once the first product is under way
                    most = max(group.rows for group in groups)
                    d_logits = matrix_of_logits(head.hidden, most, vocab, factors[0].gradient_dtype)
                target = None if sums is None or d_logits is None else logits if work.in_place else d_logits[chunk]
                indices = slice(first + chunk.start, first + chunk.stop)
                known = None
                if teacher is not None and other is not None and of_teacher is not None:
                    inv_t = members.at(indices)[1].inv_temperature
                    known = teacher.project(of_teacher[chunk], other[: len(logits)], inv_t)
                work.add(logits, known, target, members, indices, len(group) - chunk.start)
            if sums is not None and d_logits is not None:
                if len(group) < group.rows:
                    d_logits[len(group) : group.rows] = 0.0
                sums.add(group, factors, features, d_logits[: group.rows], work.scale)
    return work.statistics(head.hidden), None if sums is None else sums.gradients(work.row_factor())


def matrix_of_logits(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns), uninitialised, on the device of `like`."""
    return like.new_empty(rows, device_of(like.device).row_width(columns), dtype=dtype)[:, :columns]


def planned_bytes(rows: Rows, head: Head, config: HeadConfig, needs_grad: NeedsGrad | None) -> int:
    """Return the peak bytes of the chunks that `sweep` will allocate: `config.workspace_bytes` or less, if that allows
    the fewest rows. Works on meta tensors too.
    """
    costs = _costs(rows, head, config, needs_grad)
    return max((costs.taken(group) for group in _groups(rows, head, config, needs_grad)), default=0)


def _groups(rows: Rows, head: Head, config: HeadConfig, needs_grad: NeedsGrad | None) -> list[Group]:
    """Divide the rows. A chunk has its logits, a group its hidden states and d logits of another dtype."""
    costs = _costs(rows, head, config, needs_grad)
    return plan_groups(
        len(rows),
        config.workspace_bytes,
        chunk_row_bytes=costs.chunk_row_bytes,
        group_row_bytes=costs.group_row_bytes,
        grouped=costs.grouped,
        scratch_bytes=costs.scratch_bytes,
        device=device_of(head.weight.device),
    )


def _costs(rows: Rows, head: Head, config: HeadConfig, needs_grad: NeedsGrad | None) -> Costs:
    products, device = config.products(widest_part(head.weight, config.shard)), device_of(head.weight.device)
    vocab = products.weight.shape[0]
    width = device.row_width(vocab)
    row_bytes = width * config.accumulator.itemsize
    separate = needs_grad is not None and products.gradient_dtype != config.accumulator
    chunk_row_bytes, slice_bytes, with_teacher = row_bytes, products.slice_bytes, config.teacher is not None
    if rows.top_k is not None:
        chunk_row_bytes += rows.top_k.row_bytes()
    if config.teacher is not None:
        other = config.teacher.products(widest_part(head.teacher().weight, config.shard))
        chunk_row_bytes, slice_bytes = 2 * row_bytes + other.hidden_bytes(), max(slice_bytes, other.slice_bytes)

    group_row_bytes = products.hidden_bytes() + (width * products.gradient_dtype.itemsize if separate else 0)

    def scratch_bytes(m: int) -> int:  # of products and row work, which are never at the same time
        return max(slice_bytes, config.backend.scratch_rows(m, vocab, teacher=with_teacher) * row_bytes)

    grouped = separate and needs_grad is not None and needs_grad.weight and not products.scales_gradient
    return Costs(chunk_row_bytes, group_row_bytes, grouped, scratch_bytes)


@dataclass(frozen=True)
class _Members:
    """Rows of the sweep and what belongs to them, in the order in which chunks take them."""

    rows: Rows
    token_loss: TokenLoss | None
    stats: RowStats | None
    picked: Tensor | None = None  # which rows these are, where padding is among them; None: all, in their order

    def of(self, group: Group) -> tuple[_Members, int]:
        """Where the rows of a group are found, and from which index on. Padding repeats its first row."""
        if len(group) == group.rows:
            return self, group.start
        index = torch.arange(group.start, group.start + group.rows, device=self.rows.positions.device)
        index[len(group) :] = group.start
        return _Members(*self._taken(index), index), 0

    def at(self, indices: slice) -> tuple[Index, Rows, TokenLoss | None, RowStats | None]:
        """Select the rows at `indices`, and everything that belongs to them."""
        return indices if self.picked is None else self.picked[indices], *self._taken(indices)

    def operands(self, x: Tensor, indices: slice, n: int) -> Tensor:
        """The rows at `indices` of `x` (N, K), given how many rows the sweep has: of all N, without a copy."""
        if self.picked is None and n == x.shape[0]:
            return x[indices]
        return x[self.rows.positions[indices]]

    def _taken(self, index: Index) -> tuple[Rows, TokenLoss | None, RowStats | None]:
        return (
            self.rows.at(index),
            None if self.token_loss is None else self.token_loss.at(index),
            None if self.stats is None else self.stats.rows(index),
        )


class _Chunks:
    """The row work, a chunk after the other, and what came of it.

    Attributes:
        in_place: whether d logits take the place of the logits.
        scale: () what the last chunk's d logits carry, in fp16; a group is then one chunk.
    """

    def __init__(
        self, config: HeadConfig, asked: Asked, products: Products, bias: Tensor | None, has_top_k: bool
    ) -> None:
        self._config, self._asked, self._products, self._bias = config, asked, products, bias
        self._diverges = config.teacher is not None or has_top_k
        self.in_place = products.gradient_dtype == config.accumulator
        self.scale: Tensor | None = None
        self._stats: list[RowStats] = []
        self._row_factors: list[Tensor] = []
        self._fuses_gradient = asked.token_loss is not None and not products.scales_gradient
        self._single_pass = (
            asked.slopes
            and config.shard is None  # which joins the ranks between statistics and gradient
            and not self._diverges
            and not products.scales_gradient
            and isinstance(config.backend, SinglePassRowBackend)
        )

    def add(
        self,
        logits: Tensor,
        teacher: Teacher | None,
        target: Tensor | None,
        members: _Members,
        indices: slice,
        count: int,
    ) -> None:
        """Reduce raw projections (m, V), which may have a teacher, and write d logits to `target`.

        Args:
            members, indices: whose they are.
            count: how many of them are no padding.
        """
        config, asked = self._config, self._asked
        index, rows, token_loss, found = members.at(indices)
        chunk = Chunk(logits, rows.ids, config.transform(self._bias, rows.inv_temperature), teacher=teacher)
        z = None if rows.top_k is None else rows.top_k.gather(logits, chunk.transform)
        config.backend.prepare_(logits, chunk.transform)
        if self._single_pass and target is not None:
            found = self._at_once(chunk, target, rows.invalid, count)
        elif token_loss is not None:
            assert isinstance(config.backend, FusedRowBackend)
            marked = chunk if rows.marked is None else replace(chunk, ids=rows.marked)
            found = config.backend.fused(marked, token_loss, target if self._fuses_gradient else None)
        elif found is None:
            found = self._reduced(chunk, rows, z)
        if target is not None and not (self._fuses_gradient or self._single_pass):
            a, b, c = self._coefficients(index, found)
            a = torch.zeros_like(found.logps) if a is None else a
            a, b, c, self.scale = self._products.scaled(a, b, c, chunk.transform, found.divergence)
            config.grad(chunk, rows, found, Coefficients(a, b, c), target, z)
        if asked.stats is None:
            self._stats.append(found.rows(slice(max(0, count))))

    def _reduced(self, chunk: Chunk, rows: Rows, z: Tensor | None) -> RowStats:
        config, asked, top_k = self._config, self._asked, rows.top_k
        if top_k is None or z is None:
            return config.stats(chunk, rows.invalid, entropy=asked.entropy, extras=asked.extras)
        found = config.stats(chunk, rows.invalid, entropy=asked.entropy, extras=())
        return top_k.diverged(found, z if config.shard is None else config.shard.sum_(z.clone()))

    def _coefficients(self, index: Index, found: RowStats) -> Coefficients:
        asked = self._asked
        if asked.slopes:
            one = torch.ones_like(found.logps)
            return Coefficients(one) if found.divergence is None else Coefficients(c=one)
        assert asked.coefficients is not None
        return asked.coefficients(index, found)

    def _at_once(self, chunk: Chunk, target: Tensor, invalid: Tensor | None, count: int) -> RowStats:
        backend, asked = self._config.backend, self._asked
        assert isinstance(backend, SinglePassRowBackend)
        found, factor = backend.single_pass(chunk, target, entropy=asked.entropy, extras=asked.extras)
        if invalid is not None:
            for x in (found.logps, factor):
                x.masked_fill_(invalid, torch.nan)
        self._row_factors.append(factor[: max(0, count)])
        return found

    def statistics(self, like: Tensor) -> RowStats:
        """Return the statistics of all rows, (n,) each."""
        asked = self._asked
        if asked.stats is not None:
            return asked.stats
        loss = asked.token_loss
        return RowStats.concatenate(
            self._stats,
            like,
            self._config.accumulator,
            entropy=asked.entropy or loss is not None,
            extras=() if loss is not None else asked.extras,
            terms=() if loss is None else loss.terms,
            divergence=self._diverges,
        )

    def row_factor(self) -> Tensor | None:
        """Return the factors (n,) that the rows of d hidden still need; None: none."""
        return torch.cat(self._row_factors) if self._row_factors else None


class _Sums:
    """The gradients of the head's tensors, as the groups add to them."""

    def __init__(self, head: Head, n: int, groups: list[Group], config: HeadConfig, needs_grad: NeedsGrad) -> None:
        self._head, self._n, self._dtype, self._wants = head, n, config.accumulator, needs_grad
        self._backend = config.backend
        self._padded = max((group.start + group.rows for group in groups), default=0)
        self._rows: list[Tensor | None] = []  # of each factor: (n, K), and padding, which the next group overwrites
        self._matrices: list[Tensor | None] = []  # (V, K)
        self._bias: Tensor | None = None  # (V,)
        self._scale: Tensor | None = None  # what all but the rows are multiplied by

    def _allocate(self) -> None:
        """Only when the first group's d logits are under way."""
        new, dtype, needs_grad = self._head.hidden, self._dtype, self._wants
        # what is of the vocabulary's size is written by the first group's product; without a group it is 0
        new_matrix = new.new_empty if self._n > 0 else new.new_zeros
        for (x, matrix), (needs_rows, needs_matrix) in zip(self._head.factors(), needs_grad.factors(), strict=False):
            self._rows.append(new.new_empty(self._padded, x.shape[1], dtype=dtype) if needs_rows else None)
            self._matrices.append(new_matrix(matrix.shape, dtype=dtype) if needs_matrix else None)
        if needs_grad.bias:
            self._bias = new.new_zeros(self._head.weight.shape[0], dtype=dtype)

    def add(
        self, group: Group, products: list[Products], features: list[Tensor], d_logits: Tensor, scale: Tensor | None
    ) -> None:
        """Add a group's gradient: its operands (m, K) and d logits (m, V), which `scale` () multiplies."""
        if not self._rows:
            self._allocate()
        if scale is not None and self._scale is not None:
            self._rescale(scale / self._scale)
        self._scale = scale
        for factor, x, rows, matrix in zip(products, features, self._rows, self._matrices, strict=True):
            if rows is not None:
                factor.d_hidden(d_logits, rows[group.start : group.start + group.rows])
                if scale is not None:
                    rows[group.start : group.stop].div_(scale)
            if matrix is not None:
                factor.d_weight(d_logits, x, matrix, first=group.start == 0)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(dim=0, dtype=self._bias.dtype))

    def gradients(self, row_factor: Tensor | None) -> Gradients:
        """All of them; `row_factor` (n,) is what d hidden, then the only one, is still to be multiplied by."""
        if not self._rows:
            self._allocate()
        if self._scale is not None:
            self._rescale(1.0 / self._scale)
        rows = [None if x is None else x[: self._n] for x in self._rows]
        (hidden, lora_u), (weight, lora_b) = ((*x, None)[:2] for x in (rows, self._matrices))
        if row_factor is not None and hidden is not None:
            hidden.mul_(row_factor[:, None])
        return Gradients(hidden, weight, self._bias, lora_u, lora_b)

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._matrices, self._bias):
            if x is not None:
                self._backend.scale(x, factor, x)
