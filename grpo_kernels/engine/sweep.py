"""The loop over the vocabulary product, one chunk of rows after another.

For each chunk of rows: project, and do the row work, that is statistics and d logits, the gradient
in the raw logits. For each group of chunks, whose d logits share one product: add up the gradients.
Besides the weight and its gradient, only a chunk's logits, the reference's too, and a group's d
logits have a vocabulary dimension. d logits may overwrite the logits.

A call makes one or two passes over its rows. The first (`first_pass`) computes each row's
statistics and, in the engines one_pass and frozen, the gradient on the same logits. The second is
part of the backward (`autograd.second_pass`): it projects again the rows with a coefficient other
than 0. Only for ``lean`` is it another loop, by slices of the vocabulary (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    DivergenceStats,
    FusedLoss,
    FusedRowBackend,
    LogitTransform,
    RowStats,
    statistic_dtype,
)
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.gemm import Product
from grpo_kernels.engine.plan import CoefficientSource, Job, JobHead, Rows
from grpo_kernels.engine.workspace import Group, device_of, divide
from grpo_kernels.head import HeadTensors

# Index of rows: (m,) int64, or a slice.
Index = Tensor | slice


class FirstPass(NamedTuple):
    """Results of a first pass: the statistics (n,) of all rows and, if due now, a gradient.

    `grads` is the gradient from the rows `grad_rows` (m,), in the accumulator's dtype: of the loss
    in one_pass, and of the sum of the rows' results in frozen. It is None if it is computed later.
    `coefficients` (n,) are those of the gradient in one_pass, if the caller only expects it.
    """

    stats: RowStats
    grads: HeadTensors | None = None
    grad_rows: Tensor | None = None
    coefficients: Coefficients | None = None


def first_pass(job: Job, source: CoefficientSource) -> FirstPass:
    """Compute the statistics of all rows and, if due now, the gradient of the live rows.

    Waits for the device once, to count the live rows, unless `source.live` is None.
    """
    with torch.no_grad():
        job = job.converted()
        if job.when in ("never", "later"):
            return FirstPass(sweep(job)[0])
        n, live = len(job.rows), source.live
        every = torch.arange(n, device=job.rows.positions.device)
        live_rows = every if live is None else indices_of(live)
        fused_loss = job.loss_to_fuse(source)
        all_live = live is None or live_rows.shape[0] == n
        live_job, live_loss = job, fused_loss
        if not all_live:
            live_job, live_loss = job.at(live_rows), take(fused_loss, live_rows)
        expected: dict[str, Tensor] = {}  # coefficients (n,) by name

        def coefficients_of(index: Index, stats: RowStats) -> Coefficients:
            if job.when == "now_unscaled":
                return Coefficients(**{job.d_result: torch.ones_like(stats.logps)})
            coefficients = source.coefficients_at(live_rows[index], stats)
            if source.is_expected:  # a user's function may answer differently later
                coefficients.put(live_rows[index], expected, n)
            return coefficients

        stats, grads = sweep(live_job, coefficients_of, fused_loss=live_loss)
        coefficients = None
        if source.is_expected and job.when == "now":
            if fused_loss is not None:  # a kernel does not ask for the coefficients
                coefficients_of(slice(None), stats)
            coefficients = Coefficients(**{job.d_result: stats.logps.new_zeros(n), **expected})
        if live is not None and not all_live:
            dead_rows = indices_of(~live, n - len(live_rows))
            dead_stats, _ = sweep(job.at(dead_rows), fused_loss=take(fused_loss, dead_rows))
            parts = [stats, dead_stats] if len(live_rows) else [dead_stats]
            order = torch.cat([live_rows, dead_rows]).argsort()
            stats = take(RowStats.concatenate(parts), order)
        return FirstPass(stats, grads, live_rows, coefficients)


def indices_of(chosen: Tensor, count: int | None = None) -> Tensor:
    """The indices where `chosen` (n,) is True; in a CUDA graph, all n.

    Waits for the device, unless you pass their `count`.
    """
    if count is not None:
        return (~chosen).to(torch.uint8).argsort(stable=True)[:count]
    if device_of(chosen.device).is_capturing():
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


def statistics(job: Job, chunk: Chunk, rows: Rows) -> RowStats:
    """Compute each row's log-probability (NaN if invalid), entropy, extras and divergence.

    Rows have a divergence only with a second head or with a teacher's K ids.
    """

    def head_stats(chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        if job.shard is None:
            return job.backend.stats(chunk, entropy=entropy, extras=extras)
        return job.shard.stats(job.backend, chunk, entropy=entropy, extras=extras)

    stats = head_stats(chunk, entropy=job.entropy, extras=job.extras)
    if chunk.reference is not None:
        reference_stats = head_stats(chunk.reference, entropy=False, extras=())
        value, sum_k = job.backend.diverge(chunk, stats, reference_stats)
        if job.shard is not None:
            parts = gather_stacked(torch.stack([value, sum_k]), job.shard.process_group)
            value, sum_k = parts.sum(dim=0).unbind()
        divergence = DivergenceStats(
            value, sum_k, reference_stats.max_logit, reference_stats.log_sum
        )
        stats = replace(stats, divergence=divergence)
    if rows.invalid is not None:
        stats.logps.masked_fill_(rows.invalid, torch.nan)
    return stats if rows.topk is None else rows.topk.completed(stats, job.shard)


def write_gradient(
    job: Job, chunk: Chunk, rows: Rows, stats: RowStats, coefficients: Coefficients, out: Tensor
) -> None:
    """Write ``out = d loss / d (raw logits)``, (n, V), of rows with these statistics."""
    if rows.topk is None:
        job.backend.grad(chunk, stats, coefficients, out)
        return
    d_z, total = rows.topk.slopes(stats, coefficients)
    without_target = replace(chunk, ids=torch.full_like(chunk.ids, -1))
    job.backend.grad(without_target, stats, Coefficients(total, coefficients.d_entropy), out)
    rows.topk.write(d_z, chunk, out)


def sweep(
    job: Job,
    coefficients_of: Callable[[Index, RowStats], Coefficients] | None = None,
    *,
    known_stats: RowStats | None = None,
    fused_loss: FusedLoss | None = None,
) -> tuple[RowStats, HeadTensors | None]:
    """Project all rows, a chunk at a time, and do the row work on the logits.

    Returns the rows' statistics and, if wanted, the gradients that `job` needs, in the
    accumulator's dtype; gradients of rows cover only the job's rows.

    Args:
        coefficients_of: function from the index of rows and their statistics to their coefficients;
            None: no gradient is wanted.
        known_stats: the rows' statistics, if an earlier pass computed them.
        fused_loss: a loss that one kernel computes with statistics and d logits
            (`Job.loss_to_fuse`); nothing asks for the coefficients unless these are in fp16.
    """
    rows, hidden, parts = job.rows, job.head.tensors.hidden, []
    groups = plan_groups(job, with_gradient=coefficients_of is not None)
    with torch.autocast(hidden.device.type, enabled=False), torch.no_grad():
        projection = Projection(job, max((group.chunk_rows for group in groups), default=0))
        sums = None if coefficients_of is None else _GroupSums(job, projection, groups)
        # fp16 d logits need a factor that depends on all coefficients of a chunk, so a kernel then
        # computes only statistics and loss
        by_kernel = fused_loss is not None and not projection.products[0].needs_fp16_scale
        for group in groups:
            group_index = padded_index(group.start, group.n, group.padded_rows, hidden.device)
            operands = projection.operands(_positions(rows, group_index, hidden.shape[0]))
            fp16_scale = None
            for in_group in group.chunks:
                index = _part(group_index, in_group)
                chunk, chunk_rows = projection.project(operands, in_group, take(rows, index))
                d_logits = None if sums is None else sums.d_logits(in_group)
                if known_stats is not None:
                    stats = take(known_stats, index)
                elif fused_loss is not None:
                    out = d_logits if by_kernel else None
                    stats = _fused(job, chunk, chunk_rows, take(fused_loss, index), out)
                else:
                    stats = statistics(job, chunk, chunk_rows)
                if not by_kernel and coefficients_of is not None and d_logits is not None:
                    coefficients, fp16_scale = projection.products[0].with_fp16_scale(
                        coefficients_of(index, stats), stats, chunk.transform
                    )
                    write_gradient(job, chunk, chunk_rows, stats, coefficients, d_logits)
                # of rows before the padding; none if all are padding
                parts.append(take(stats, slice(max(0, group.n - in_group.start))))
            if sums is not None:
                sums.add(group, operands[0], fp16_scale)
        stats = RowStats.concatenate(parts) if parts else _no_stats(job)
        return stats, None if sums is None else sums.gradients()


def _fused(
    job: Job, chunk: Chunk, rows: Rows, fused_loss: FusedLoss, out: Tensor | None
) -> RowStats:
    """Compute statistics and loss, and write d logits to `out` if given, by one kernel."""
    if rows.invalid is not None:  # -1 makes the row's results NaN
        chunk = replace(chunk, ids=chunk.ids.masked_fill(rows.invalid, -1))
    return cast(FusedRowBackend, job.backend).fused(chunk, fused_loss, out)


def _no_stats(job: Job) -> RowStats:
    """The statistics of no rows."""
    none = job.head.tensors.hidden.new_empty(0, dtype=job.accumulator_dtype)
    extras = {x: none.to(statistic_dtype(x, none.dtype)) for x in job.extras}
    divergence = None if job.reference is None else DivergenceStats(*[none] * 4)
    stats = RowStats(none, none, none, none if job.entropy else None, extras, {}, divergence)
    if job.rows.topk is None:
        return stats
    no_logits = none.new_empty(0, job.vocab)
    return job.rows.topk.gathered(no_logits, LogitTransform()).completed(stats, None)


def plan_groups(job: Job, *, with_gradient: bool) -> list[Group]:
    """Divide the rows of `job` into the groups of a sweep; works on meta tensors too.

    A chunk needs logits; a group needs operands, and d logits if these have another dtype.
    """
    product, reference = job.widest_product(job.head), job.reference
    vocab, device = product.weight.shape[0], device_of(product.weight.device)
    width = device.row_width(vocab)
    row_bytes = width * job.accumulator_dtype.itemsize
    separate = with_gradient and product.d_logits_dtype != job.accumulator_dtype
    chunk_row_bytes, slice_bytes = row_bytes, product.slice_bytes
    if job.rows.topk is not None:
        chunk_row_bytes += job.rows.topk.row_bytes()
    if reference is not None:
        reference_product = job.widest_product(reference)
        chunk_row_bytes = 2 * row_bytes + reference_product.hidden_bytes()
        slice_bytes = max(slice_bytes, reference_product.slice_bytes)
    d_logits = width * product.d_logits_dtype.itemsize if separate else 0

    def scratch_bytes(m: int) -> int:  # products and row work never run at the same time
        scratch = job.backend.scratch_rows(m, vocab, reference=reference is not None) * row_bytes
        return max(slice_bytes, scratch)

    return divide(
        len(job.rows),
        job.workspace_bytes,
        device,
        chunk_row_bytes=chunk_row_bytes,
        group_row_bytes=product.hidden_bytes() + d_logits,
        grouped=separate and job.needs_grad.weight and not product.needs_fp16_scale,
        scratch_bytes=scratch_bytes,
    )


def padded_index(start: int, n: int, padded_rows: int, device: torch.device) -> Index:
    """Index of `n` rows from `start` on, and of padding, which repeats the first of them."""
    if n == padded_rows:
        return slice(start, start + n)
    index = torch.arange(start, start + padded_rows, device=device)
    index[n:] = start
    return index


def _part(index: Index, part: slice) -> Index:
    if isinstance(index, slice):
        return slice(index.start + part.start, index.start + part.stop)
    return index[part]


def _positions(rows: Rows, index: Index, n: int) -> Index:
    # a slice, which needs no copy, if the rows are all n positions
    return index if isinstance(index, slice) and len(rows) == n else rows.positions[index]


class _HeadLogits:
    """The products of one head's logits, and memory for a chunk's, which the next overwrites."""

    def __init__(self, job: Job, head: JobHead, chunk_rows: int, columns: slice) -> None:
        dtype, bias = job.accumulator_dtype, head.tensors.bias
        self.products, self._transform = job.products(head, columns), head.transform
        self._bias = None if bias is None else bias[columns].detach().to(dtype).contiguous()
        self.memory = self.new_rows(chunk_rows, dtype)

    def new_rows(self, n: int, dtype: torch.dtype) -> Tensor:
        """Memory for rows of logits or of d logits."""
        weight = self.products[0].weight
        columns = weight.shape[0]
        width = device_of(weight.device).row_width(columns)
        return weight.new_empty(n, width, dtype=dtype)[:, :columns]

    def chunk(self, operands: Iterable[Tensor], rows: Rows) -> Chunk:
        """The raw logits of `rows`, from an operand of each product."""
        logits = self.memory[: len(rows)]
        for i, (product, x) in enumerate(zip(self.products, operands, strict=True)):
            product.logits(x, logits, add=i > 0)
        transform = replace(self._transform, inv_temperature=rows.inv_temperature, bias=self._bias)
        return Chunk(logits, rows.ids, transform)


class Projection:
    """The products that compute logits, chunk after chunk; `products` are the head's."""

    def __init__(self, job: Job, chunk_rows: int, columns: slice = slice(None)) -> None:
        self._job, self._first_column = job, columns.start or 0
        self._head = _HeadLogits(job, job.head, chunk_rows, columns)
        self._reference = job.reference and _HeadLogits(job, job.reference, chunk_rows, columns)
        self.products = self._head.products

    def d_logits(self, n: int) -> Tensor:
        """Memory for `n` rows of d logits: that of the logits, if both have one dtype."""
        dtype, logits = self.products[0].d_logits_dtype, self._head.memory
        return logits[:n] if dtype == logits.dtype else self._head.new_rows(n, dtype)

    def operands(self, positions: Index) -> tuple[list[Tensor], Any]:
        """Operands of m positions, (m, K) per product; the reference's hidden states, (m, H')."""
        pairs = zip(self.products, self._job.head.tensors.factor_pairs(), strict=True)
        operands = [product.operand(x[positions]) for product, (x, _) in pairs]
        reference = self._job.reference
        return operands, None if reference is None else reference.tensors.hidden[positions]

    def project(
        self, operands: tuple[list[Tensor], Any], in_group: slice, rows: Rows
    ) -> tuple[Chunk, Rows]:
        """Project a chunk; return it and its rows, with the logits of their K ids gathered.

        Args:
            operands: the operands of a group of rows.
            in_group: the chunk's slice of them.
            rows: the chunk's rows.
        """
        (head_operands, reference_hidden), backend = operands, self._job.backend
        rows = rows.with_ids_from(self._first_column)
        chunk = self._head.chunk((x[in_group] for x in head_operands), rows)
        if rows.topk is not None:
            rows = replace(rows, topk=rows.topk.gathered(chunk.logits, chunk.transform))
        backend.prepare_(chunk.logits, chunk.transform)
        if self._reference is None:
            return chunk, rows
        operand = self._reference.products[0].operand(reference_hidden[in_group])
        reference = self._reference.chunk([operand], rows)
        backend.prepare_(reference.logits, reference.transform)
        return replace(chunk, reference=reference, jsd_beta=self._job.jsd_beta), rows


class GradientSums(NamedTuple):
    """Gradients of a head's tensors, while they are summed."""

    d_states: list[Tensor | None]  # of hidden and lora_u: (n, K) each
    d_matrices: list[Tensor | None]  # of weight and lora_b: (V, K) each
    d_bias: Tensor | None  # (V,)

    @staticmethod
    def new(job: Job, n: int, *, rounds: bool = False) -> GradientSums:
        """Memory for the gradients that `job` needs, of `n` rows.

        The first product overwrites all but the bias's, unless there are no rows. With `rounds`,
        gradients of matrices have the matrices' dtype instead of the accumulator's.
        """
        tensors, like, dtype = job.head.tensors, job.head.tensors.hidden, job.accumulator_dtype
        new = like.new_empty if n else like.new_zeros
        d_bias = None
        if job.needs_grad.bias:
            d_bias = like.new_zeros(tensors.weight.shape[0], dtype=dtype)
        sums = GradientSums([], [], d_bias)
        pairs = zip(tensors.factor_pairs(), job.needs_grad.factor_pairs(), strict=True)
        for (x, matrix), (needs_states, needs_matrix) in pairs:
            sums.d_states.append(new(n, x.shape[1], dtype=dtype) if needs_states else None)
            matrix_dtype = matrix.dtype if rounds else dtype
            d_matrix = new(matrix.shape, dtype=matrix_dtype) if needs_matrix else None
            sums.d_matrices.append(d_matrix)
        return sums

    def at(self, rows: slice) -> GradientSums:
        """The same sums, but only of these `rows`."""
        return self._replace(d_states=[None if x is None else x[rows] for x in self.d_states])

    def add(
        self,
        products: list[Product],
        operands: list[Tensor],
        d_logits: Tensor,
        *,
        to_states: bool = False,
        to_matrices: bool,
    ) -> None:
        """Add the gradients from `d_logits` (n, V), or write those that are not added to."""
        gradients = zip(products, operands, self.d_states, self.d_matrices, strict=True)
        for product, x, d_x, d_matrix in gradients:
            if d_x is not None:
                product.d_hidden(d_logits, d_x, add=to_states)
            if d_matrix is not None:
                product.d_weight(d_logits, x, d_matrix, add=to_matrices)
        if self.d_bias is not None:
            self.d_bias.add_(d_logits.sum(dim=0, dtype=self.d_bias.dtype))

    def tensors(self) -> HeadTensors:
        (d_hidden, *d_lora_u), (d_weight, *d_lora_b) = self.d_states, self.d_matrices
        return HeadTensors(d_hidden, d_weight, self.d_bias, *d_lora_u, *d_lora_b)


class _GroupSums:
    """The sums over the groups of a sweep, and memory for d logits."""

    def __init__(self, job: Job, projection: Projection, groups: list[Group]) -> None:
        self._job, self._projection = job, projection
        self._group_rows = max((group.padded_rows for group in groups), default=0)
        # n rows plus padding, which the next group overwrites
        self._padded_rows = max((group.start + group.padded_rows for group in groups), default=0)
        # () factor that d_matrices and d_bias carry, but d_states do not
        self._fp16_scale: Tensor | None = None

    def d_logits(self, in_group: slice) -> Tensor:
        """Memory for the d logits of a chunk.

        A group is one chunk if they overwrite the logits or carry a scale (`plan_groups`).
        """
        return self._group_d_logits[in_group]

    # Both are made late, while the device already computes the first logits or d logits.

    @cached_property
    def _group_d_logits(self) -> Tensor:
        return self._projection.d_logits(self._group_rows)

    @cached_property
    def _sums(self) -> GradientSums:
        return GradientSums.new(self._job, self._padded_rows)

    def add(self, group: Group, operands: list[Tensor], fp16_scale: Tensor | None) -> None:
        """Add a group's gradient, from its operands (m, K) and its d logits.

        The d logits carry the factor `fp16_scale` ().
        """
        sums = self._sums.at(slice(group.start, group.start + group.padded_rows))
        d_logits = self.d_logits(slice(group.padded_rows))
        if group.n < group.padded_rows:
            d_logits[group.n :] = 0.0
        if fp16_scale is not None and self._fp16_scale is not None:
            self._rescale(fp16_scale / self._fp16_scale)
        self._fp16_scale = fp16_scale
        sums.add(self._projection.products, operands, d_logits, to_matrices=group.start > 0)
        for x in sums.d_states:
            if x is not None and fp16_scale is not None:
                x[: group.n].div_(fp16_scale)

    def gradients(self) -> HeadTensors:
        if self._fp16_scale is not None:
            self._rescale(1.0 / self._fp16_scale)
        return self._sums.at(slice(len(self._job.rows))).tensors()

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._sums.d_matrices, self._sums.d_bias):
            if x is not None:
                self._job.backend.scale(x, factor, x)
