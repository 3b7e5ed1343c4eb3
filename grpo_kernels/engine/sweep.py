"""The loop over the vocabulary product, one chunk of rows after another.

For each chunk of rows: project, and do the row work, that is statistics and d logits, the gradient
in the raw logits. For each group of chunks, whose d logits share one product: add up the gradients.
Besides the weight and its gradient, only the logits of a chunk have a vocabulary dimension. d
logits may overwrite them.

A call makes one or two passes over its rows. The first (`first_pass`) computes each row's
statistics and, in the engines one_pass and frozen, the gradient on the same logits. The second is
part of the backward (`autograd.second_pass`): it projects again the rows with a coefficient other
than 0. Only for ``lean`` is it another loop, by slices of the vocabulary (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
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
from grpo_kernels.engine.gemm import Products
from grpo_kernels.engine.plan import Job, JobHead, RowGradient, Rows
from grpo_kernels.engine.workspace import Group, device_of, divide
from grpo_kernels.head import HeadTensors

# Index of rows: (m,) int64, or a slice. In this file, `at` is the index of a chunk's rows among the
# sweep's rows; `padded`, of a group's rows, with padding; `span`, a chunk's slice of its group's.
Index = Tensor | slice


class FirstPass(NamedTuple):
    """Results of a first pass: the statistics (n,) of all rows and, if due now, a gradient.

    `grads` is the gradient from the rows `live_rows` (m,), in the accumulator's dtype: of the loss
    in one_pass, and of the sum of the rows' results in frozen. It is None if it is computed later.
    `coefficients` (n,) are those of the gradient in one_pass, if the caller only expects it.
    """

    stats: RowStats
    grads: HeadTensors | None = None
    live_rows: Tensor | None = None
    coefficients: Coefficients | None = None


def first_pass(job: Job, row_gradient: RowGradient) -> FirstPass:
    """Compute the statistics of all rows and, if due now, the gradient of the live rows.

    Waits for the device once, to count the live rows, unless all rows are live.
    """
    with torch.no_grad():
        job = job.converted()
        if job.when in ("never", "later"):
            return FirstPass(sweep(job)[0])
        n, live = len(job.rows), row_gradient.live
        every = torch.arange(n, device=job.rows.positions.device)
        live_rows = every if live is None else indices_of(live)
        fused_loss = job.loss_to_fuse(row_gradient)
        all_live = live is None or live_rows.shape[0] == n
        live_job, of_live = job, fused_loss
        if not all_live:
            live_job, of_live = job.at(live_rows), take(fused_loss, live_rows)
        used: dict[str, Tensor] = {}  # expected coefficients, (n,) each, by name

        def coefficients_of(at: Index, stats: RowStats) -> Coefficients:
            if job.when == "now_unscaled":
                return Coefficients(**{job.d_result: torch.ones_like(stats.logps)})
            found = row_gradient.coefficients_at(live_rows[at], stats)
            if row_gradient.is_expected:  # a user's function may answer differently later
                found.put(live_rows[at], used, n)
            return found

        stats, grads = sweep(live_job, coefficients_of, fused_loss=of_live)
        coefficients = None
        if row_gradient.is_expected and job.when == "now":
            if fused_loss is not None:  # a kernel does not ask for the coefficients
                coefficients_of(slice(None), stats)
            coefficients = Coefficients(**{job.d_result: stats.logps.new_zeros(n), **used})
        if live is not None and not all_live:
            others = indices_of(~live, n - len(live_rows))
            of_others, _ = sweep(job.at(others), fused_loss=take(fused_loss, others))
            parts = [stats, of_others] if len(live_rows) else [of_others]
            order = torch.cat([live_rows, others]).argsort()
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

    def of_head(chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        if job.shard is None:
            return job.backend.stats(chunk, entropy=entropy, extras=extras)
        return job.shard.stats(job.backend, chunk, entropy=entropy, extras=extras)

    stats = of_head(chunk, entropy=job.entropy, extras=job.extras)
    if chunk.reference is not None:
        reference_stats = of_head(chunk.reference, entropy=False, extras=())
        value, sum_k = job.backend.diverge(chunk, stats, reference_stats)
        if job.shard is not None:
            parts = gather_stacked(torch.stack([value, sum_k]), job.shard.process_group)
            value, sum_k = parts.sum(dim=0).unbind()
        of_reference = reference_stats.max_logit, reference_stats.log_sum
        stats = replace(stats, divergence=DivergenceStats(value, sum_k, *of_reference))
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
    nowhere = replace(chunk, ids=torch.full_like(chunk.ids, -1))
    job.backend.grad(nowhere, stats, Coefficients(total, coefficients.d_entropy), out)
    rows.topk.write(d_z, chunk, out)


def sweep(
    job: Job,
    coefficients_of: Callable[[Index, RowStats], Coefficients] | None = None,
    *,
    known: RowStats | None = None,
    fused_loss: FusedLoss | None = None,
) -> tuple[RowStats, HeadTensors | None]:
    """Project all rows, a chunk at a time, and do the row work on the logits.

    Returns the rows' statistics and, if wanted, the gradients that `job` needs, in the
    accumulator's dtype; gradients of rows cover only the job's rows.

    Args:
        coefficients_of: function from the index `at` of rows and their statistics to their
            coefficients; None: no gradient is wanted.
        known: the rows' statistics, if an earlier pass computed them.
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
        by_kernel = fused_loss is not None and not projection.products[0].scales_gradient
        for group in groups:
            padded = padded_index(group.start, group.n, group.padded_rows, hidden.device)
            operands = projection.operands(_positions(rows, padded, hidden.shape[0]))
            fp16_scale = None
            for span in group.chunks:
                at = _part(padded, span)
                chunk, of_chunk = projection.project(operands, span, take(rows, at))
                out = None if sums is None else sums.d_logits(span)
                if known is not None:
                    stats = take(known, at)
                elif fused_loss is not None:
                    to = out if by_kernel else None
                    stats = _fused(job, chunk, of_chunk, take(fused_loss, at), to)
                else:
                    stats = statistics(job, chunk, of_chunk)
                if not by_kernel and coefficients_of is not None and out is not None:
                    coefficients, fp16_scale = projection.products[0].with_fp16_scale(
                        coefficients_of(at, stats), stats, chunk.transform
                    )
                    write_gradient(job, chunk, of_chunk, stats, coefficients, out)
                # of rows before the padding; none if all are padding
                parts.append(take(stats, slice(max(0, group.n - span.start))))
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
        other = job.widest_product(reference)
        chunk_row_bytes = 2 * row_bytes + other.hidden_bytes()
        slice_bytes = max(slice_bytes, other.slice_bytes)
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
        grouped=separate and job.needs_grad.weight and not product.scales_gradient,
        scratch_bytes=scratch_bytes,
    )


def padded_index(start: int, n: int, padded: int, device: torch.device) -> Index:
    """Index of `n` rows from `start` on, and of padding, which repeats the first of them."""
    if n == padded:
        return slice(start, start + n)
    index = torch.arange(start, start + padded, device=device)
    index[n:] = start
    return index


def _part(padded: Index, span: slice) -> Index:
    if isinstance(padded, slice):
        return slice(padded.start + span.start, padded.start + span.stop)
    return padded[span]


def _positions(rows: Rows, padded: Index, n: int) -> Index:
    # a slice, which needs no copy, if the rows are all n positions
    return padded if isinstance(padded, slice) and len(rows) == n else rows.positions[padded]


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
        dtype, of_logits = self.products[0].d_logits_dtype, self._head.memory
        return of_logits[:n] if dtype == of_logits.dtype else self._head.new_rows(n, dtype)

    def operands(self, positions: Index) -> tuple[list[Tensor], Any]:
        """Operands of m positions, (m, K) per product; the reference's hidden states, (m, H')."""
        pairs = zip(self.products, self._job.head.tensors.factors(), strict=True)
        of_head = [product.operand(x[positions]) for product, (x, _) in pairs]
        reference = self._job.reference
        return of_head, None if reference is None else reference.tensors.hidden[positions]

    def project(
        self, operands: tuple[list[Tensor], Any], span: slice, rows: Rows
    ) -> tuple[Chunk, Rows]:
        """Project a chunk; return it and its rows, with the logits of their K ids gathered.

        Args:
            operands: the operands of a group of rows.
            span: the chunk's slice of them.
            rows: the chunk's rows.
        """
        (of_head, of_reference), backend = operands, self._job.backend
        rows = rows.counted_from(self._first_column)
        chunk = self._head.chunk((x[span] for x in of_head), rows)
        if rows.topk is not None:
            rows = replace(rows, topk=rows.topk.gathered(chunk.logits, chunk.transform))
        backend.prepare_(chunk.logits, chunk.transform)
        if self._reference is None:
            return chunk, rows
        operand = self._reference.products[0].operand(of_reference[span])
        reference = self._reference.chunk([operand], rows)
        backend.prepare_(reference.logits, reference.transform)
        return replace(chunk, reference=reference, jsd_beta=self._job.jsd_beta), rows


class Sums(NamedTuple):
    """Gradients of a head's tensors, while they are summed."""

    rows: list[Tensor | None]  # per factor (n, K)
    matrices: list[Tensor | None]  # per factor (V, K)
    bias: Tensor | None  # (V,)

    @staticmethod
    def new(job: Job, n: int, *, rounds: bool = False) -> Sums:
        """Memory for the gradients that `job` needs, of `n` rows.

        The first product overwrites that of the factors, unless there are no rows. With `rounds`,
        the matrices have their own dtype instead of the accumulator's.
        """
        tensors, like, dtype = job.head.tensors, job.head.tensors.hidden, job.accumulator_dtype
        new = like.new_empty if n else like.new_zeros
        of_bias = job.needs_grad.bias
        bias = like.new_zeros(tensors.weight.shape[0], dtype=dtype) if of_bias else None
        sums = Sums([], [], bias)
        pairs = zip(tensors.factors(), job.needs_grad.factors(), strict=True)
        for (x, matrix), (needs_rows, needs_matrix) in pairs:
            sums.rows.append(new(n, x.shape[1], dtype=dtype) if needs_rows else None)
            own = matrix.dtype if rounds else dtype
            sums.matrices.append(new(matrix.shape, dtype=own) if needs_matrix else None)
        return sums

    def at(self, span: slice) -> Sums:
        """The same sums, but only of the rows at `span`."""
        return self._replace(rows=[None if x is None else x[span] for x in self.rows])

    def add(
        self,
        products: list[Products],
        operands: list[Tensor],
        d_logits: Tensor,
        *,
        to_rows: bool = False,
        to_matrices: bool,
    ) -> None:
        """Add the gradients from `d_logits` (n, V), or write those that are not added to."""
        pairs = zip(products, operands, self.rows, self.matrices, strict=True)
        for product, x, d_x, d_matrix in pairs:
            if d_x is not None:
                product.d_hidden(d_logits, d_x, add=to_rows)
            if d_matrix is not None:
                product.d_weight(d_logits, x, d_matrix, add=to_matrices)
        if self.bias is not None:
            self.bias.add_(d_logits.sum(dim=0, dtype=self.bias.dtype))

    def tensors(self) -> HeadTensors:
        (hidden, *lora_u), (weight, *lora_b) = self.rows, self.matrices
        return HeadTensors(hidden, weight, self.bias, *lora_u, *lora_b)


class _GroupSums:
    """The sums over the groups of a sweep, and memory for d logits."""

    def __init__(self, job: Job, projection: Projection, groups: list[Group]) -> None:
        self._job, self._projection = job, projection
        self._group_rows = max((group.padded_rows for group in groups), default=0)
        self._padded = max((group.start + group.padded_rows for group in groups), default=0)
        self._d_logits: Tensor | None = None  # of a group
        # n rows plus padding, which the next group overwrites
        self._made: Sums | None = None
        # () factor that matrices and bias carry, but the rows do not
        self._fp16_scale: Tensor | None = None

    def d_logits(self, span: slice) -> Tensor:
        """Memory for the d logits of a chunk.

        A group is one chunk if they overwrite the logits or carry a scale (`plan_groups`).
        """
        if self._d_logits is None:  # the device already computes the first product
            self._d_logits = self._projection.d_logits(self._group_rows)
        return self._d_logits[span]

    @property
    def _sums(self) -> Sums:
        if self._made is None:  # the device already computes the first group's d logits
            self._made = Sums.new(self._job, self._padded)
        return self._made

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
        for x in sums.rows:
            if x is not None and fp16_scale is not None:
                x[: group.n].div_(fp16_scale)

    def gradients(self) -> HeadTensors:
        if self._fp16_scale is not None:
            self._rescale(1.0 / self._fp16_scale)
        return self._sums.at(slice(len(self._job.rows))).tensors()

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._sums.matrices, self._sums.bias):
            if x is not None:
                self._job.backend.scale(x, factor, x)
