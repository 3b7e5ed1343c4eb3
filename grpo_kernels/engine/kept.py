"""Log-probabilities and entropies over kept sets: hidden states times the head's rows of the ids.

A truncating sampler (top-k, top-p, min-p) draws y from the softmax over its kept set S, the ids
that remain after the truncation. The policy trained on y has the same support only if its
log-probabilities are taken over S, too (https://arxiv.org/abs/2512.02556, keep sampling mask)::

    logp = z_y - log sum_{j in S} exp z_j

The sets of a block of r positions are ids (r, w), padded. Forward: gather (r, w, H), multiply with
hidden states (r, H) to raw logits (r, w), and reduce these as a chunk of w logits per row.
Backward: differentiate the saved logits; gather again and multiply for d hidden; add the outer
product with the hidden states to the ids' rows of d weight. For N positions with K ids each, each
of these three products takes 2NKH floating point operations, or 2NK(H + r) with an adapter of rank
r. Positions are sorted by decreasing set size, so short sets get little padding.

With a sharded head, each rank's blocks hold the ids of each set that are among the rank's rows. The
ranks join the statistics of all positions (`ranks`), and sum d hidden.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import Chunk, Coefficients, LogitTransform, RowStats
from grpo_kernels.base import OnMissingSet
from grpo_kernels.base.checks import HIGHEST_LOGP
from grpo_kernels.base.tensors import scatter, take
from grpo_kernels.engine.autograd import first_order, run_scores, save, saved
from grpo_kernels.engine.plan import CoefficientSource, Job, Rows, Run, with_engine
from grpo_kernels.engine.sweep import GradientSums
from grpo_kernels.head import HeadTensors
from grpo_kernels.kept_ids import KeptIds

WORKSPACE_BYTES = 64 * 2**20  # the default: a larger workspace is no faster
# bytes per kept id, besides its row of the head, while sets are counted, sorted and reduced
ENTRY_BYTES = 64


class Block(NamedTuple):
    """Rows that are projected together."""

    row_index: Tensor  # (r,), of the call's rows
    width: int  # size of their largest set
    longest: int  # length of their longest list, padding included


class BlockLogits(NamedTuple):
    """The sets of a block's rows on this rank, and their logits."""

    # (r, w) int32, from this rank's first id on, each once; padding repeats a row's first id
    kept: Tensor
    logits: Tensor  # (r, w), -inf in the padding
    target: Tensor  # (r,) column of the sampled id, -1 if another rank has it


class Survey(NamedTuple):
    """Counts of ids in the sets of n rows, and the rows to treat separately, (n,) each."""

    sizes: Tensor  # ids in the set, repetitions included
    local: Tensor  # ids among this rank's rows of the head
    without: Tensor  # bool: scored over the whole vocabulary
    invalid: Tensor | None  # bool: results are NaN; None if there are none

    def metrics(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """The sets' mean size and the share of positions without a set, as (sum, count)."""
        without, has_set = self.without.to(dtype), (~self.without).to(dtype)
        return {
            "kept/size": ((has_set * self.sizes).sum(), has_set.sum()),
            "kept/without_set": (without.sum(), torch.ones_like(without).sum()),
        }


@dataclass(frozen=True)
class KeptSets:
    """A call's rows and their sets, planned.

    A set with a single id is in no block: its log-probability and entropy are 0 with gradient 0.

    Attributes:
        job: the call, with rows whose ids start at this rank's first id.
        kept_ids: all entries, and the bounds of each position's entries; -1 is padding.
        projected: (n,) bool, rows whose set is projected, on any rank.
        blocks: the rows with ids on this rank, the largest sets first.
    """

    job: Job
    kept_ids: KeptIds
    projected: Tensor
    blocks: list[Block]


def score_kept(
    job: Job,
    run: Run,
    kept_ids: KeptIds,
    ids: Tensor,
    on_missing_set: OnMissingSet,
    source_at: Callable[[Tensor], CoefficientSource],
    *,
    entropy: bool | str = True,
    other_logps: Mapping[str, Tensor | None] | None = None,
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Score rows over their sets, and rows without a set over the whole vocabulary.

    Args:
        job: planned without an engine, and without a check that its ids are in range.
        source_at: function from positions (m,) that are scored over the whole vocabulary to
            their gradient.
        entropy: True for the sets, "full" for the whole vocabulary, False for none.
        other_logps: of other policies, (...) each, which must be over the same sets.

    Returns:
        The scores by name, and the metrics of the sets, as (sum, count).
    """
    budget = run.workspace_bytes or WORKSPACE_BYTES
    over_sets = replace(job, workspace_bytes=budget, entropy=entropy is True)
    survey = survey_sets(over_sets, kept_ids, ids, on_missing_set, other_logps or {})
    planned, any_without = plan_sets(over_sets, kept_ids, survey)
    whole_vocab, in_full, shape = None, entropy == "full", ids.shape
    if any_without or in_full:
        rows = job.rows if in_full else take(job.rows, survey.without.nonzero()[:, 0])
        source = source_at(rows.positions)
        whole_vocab = replace(job, rows=rows, entropy=bool(entropy))
        whole_vocab = with_engine(whole_vocab, run, source)
    logps, entropies = KeptSetLogprob.apply(planned, *job.head.tensors)
    logps, entropies = logps.view(shape), None if entropies is None else entropies.view(shape)
    if whole_vocab is not None:
        without = scatter(survey.without, job.rows.positions, shape.numel()).view(shape)
        full = run_scores(whole_vocab, source, shape)
        logps = torch.where(without, full["logps"], logps)
        if entropies is not None:
            entropies = torch.where(without, full["entropies"], entropies)
        elif in_full:
            entropies = full["entropies"]
    scores = {"logps": logps} if entropies is None else {"logps": logps, "entropies": entropies}
    return scores, survey.metrics(job.accumulator_dtype)


def survey_sets(
    job: Job,
    kept_ids: KeptIds,
    ids: Tensor,
    on_missing_set: str,
    other_logps: Mapping[str, Tensor | None],
) -> Survey:
    """Count the kept ids of all positions, a workspace at a time, without waiting for a GPU.

    Args:
        ids: (...) the ids to score.
        other_logps: of other policies, (...) each, which must be over the same sets.
    """
    rows, sampled = job.rows, ids.detach().reshape(-1)
    vocab, start_id = job.vocab, job.shard_start
    stop_id = start_id + job.head.tensors.weight.shape[0]
    # per position: ids, ids among this rank's rows, ids that do not exist, the sampled id
    counts = kept_ids.offsets.new_zeros(4, sampled.shape[0])
    step = max(1, job.workspace_bytes // ENTRY_BYTES)
    for start in range(0, kept_ids.ids.shape[0], step):
        entries = kept_ids.ids[start : start + step]
        place = torch.arange(start, start + entries.shape[0], device=entries.device)
        owner = torch.searchsorted(kept_ids.offsets, place, right=True) - 1
        exists = (entries >= 0) & (entries < vocab)
        flags = (
            exists,
            exists & (entries >= start_id) & (entries < stop_id),
            (entries < -1) | (entries >= vocab),
        )
        for count, flag in zip(counts, (*flags, exists & (entries == sampled[owner])), strict=True):
            count.index_add_(0, owner, flag.long())
    sizes, local, outside, hits = counts[:, rows.positions]
    missing = hits == 0
    invalid = (outside > 0) if on_missing_set == "full" else (outside > 0) | missing
    if invalid.device.type != "cpu":
        without = missing & ~invalid
        return Survey(sizes, local, without, invalid)
    if bool(invalid.any()):
        i = int(invalid.nonzero()[0])
        position, size, has_outside = rows.positions[i], int(sizes[i]), bool(outside[i])
        raise ValueError(_refusal(kept_ids, ids, position, size, has_outside, vocab))
    single = rows.positions[(sizes == 1) & ~missing]  # their log-probability is 0
    for name, x in other_logps.items():
        logps = None if x is None else x.detach().reshape(-1)[single]
        if logps is not None and bool((logps.abs() > HIGHEST_LOGP).any()):
            raise ValueError(
                f"{name}: expected log-probabilities over the same kept sets, so 0 where a set is "
                f"one id, got {logps[logps.abs() > HIGHEST_LOGP][0].item():.4g}: compute them "
                "with kept_ids too"
            )
    return Survey(sizes, local, missing, None)


def _refusal(
    kept_ids: KeptIds,
    ids: Tensor,
    position: Tensor,
    size: int,
    has_outside: bool,
    vocab: int,
) -> str:
    at = tuple(int(x) for x in torch.unravel_index(position, ids.shape))
    if has_outside:
        entries = kept_ids.ids[
            int(kept_ids.offsets[position]) : int(kept_ids.offsets[position + 1])
        ]
        bad = entries[(entries < -1) | (entries >= vocab)][0].item()
        return f"kept_ids: expected ids in [0, V) = [0, {vocab}) or -1, got {bad} at position {at}"
    way_out = "; on_missing_set='full' scores such positions over the whole vocabulary"
    if size == 0:
        return f"kept_ids: expected a set at unmasked positions, got none at position {at}{way_out}"
    got = ids.reshape(-1)[position].item()
    return (
        f"completion_ids: expected an id of the position's kept set, got {got} at position {at}"
        f"{way_out}"
    )


def plan_sets(job: Job, kept_ids: KeptIds, survey: Survey) -> tuple[KeptSets, bool]:
    """Plan the work; also return True if any position has no set. Waits for the device."""
    rows = job.rows
    projected = (survey.sizes > 1) & ~survey.without
    local, order = torch.where(projected, survey.local, 0).sort(descending=True, stable=True)
    longest = kept_ids.offsets.diff()[rows.positions][order]
    sizes, lists, without = torch.stack([local, longest, survey.without.long()]).tolist()
    count = bisect.bisect_left(sizes, 0, key=operator.neg)
    blocks = plan_blocks(job, order, sizes[:count], lists[:count])
    rows = replace(rows, ids=rows.ids - job.shard_start, invalid=survey.invalid)
    return KeptSets(replace(job, rows=rows), kept_ids, projected, blocks), any(without)


def plan_blocks(job: Job, order: Tensor, sizes: list[int], longest: list[int]) -> list[Block]:
    """Divide rows into blocks that fit the budget, with sets at least half as long as the longest.

    Padding then costs at most as much as the sets themselves.

    Args:
        order: index of the rows.
        sizes: number of ids in each row's set, decreasing.
        longest: number of entries in each row's list, padding included.
    """
    budget, head_bytes = job.workspace_bytes, entry_bytes(job)
    features = sum(matrix.shape[1] for matrix, _ in job.head.matrices())
    row_bytes = 2 * job.accumulator_dtype.itemsize * features
    blocks, start = [], 0
    most_left = [*itertools.accumulate(reversed(longest), max)][::-1]  # from each row on
    while start < len(sizes):
        width = sizes[start]
        most = max(1, budget // (width * head_bytes + most_left[start] * ENTRY_BYTES + row_bytes))
        stop = bisect.bisect_right(
            sizes, -width / 2, lo=start, hi=min(len(sizes), start + most), key=operator.neg
        )
        blocks.append(Block(order[start:stop], width, max(longest[start:stop])))
        start = stop
    return blocks


@first_order
class KeptSetLogprob(torch.autograd.Function):
    """Log-probabilities (N,) and entropies (N,) or None over kept sets.

    ``forward(ctx, planned, *tensors)``, with the tensors of `planned`.
    """

    @staticmethod
    def forward(
        ctx: Any, planned: KeptSets, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        job = planned.job
        zeros = job.rows.positions.new_zeros(len(job.rows), dtype=job.accumulator_dtype)
        nothing = torch.full_like(zeros, -torch.inf)  # for rows without an id on this rank
        numbers: dict[str, Any] = {"logps": zeros, "max_logit": nothing, "log_sum": zeros.clone()}
        if job.entropy:
            numbers["entropies"] = zeros.clone()
        saved_logits: list[BlockLogits] = []
        with torch.autocast(zeros.device.type, enabled=False):
            gathered = _gathered(job, planned.blocks)
            for block in planned.blocks:
                rows = take(job.rows, block.row_index)
                block_logits = _projected(gathered, planned, rows, block)
                target = block_logits.target.clamp(min=0)
                chunk = Chunk(block_logits.logits, target, _transform(job, rows))
                block_stats = job.backend.stats(chunk, entropy=job.entropy)
                for name, x in numbers.items():
                    x[block.row_index] = getattr(block_stats, name)
                if any(job.needs_grad):
                    saved_logits.append(block_logits)
            stats = RowStats(**numbers)
            if job.shard is not None:
                stats = job.shard.joined(stats, job.rows.ids, LogitTransform())
        save(ctx, job, (stats, tuple(saved_logits)), projects=True)
        ctx.blocks = planned.blocks
        entropies = None if stats.entropies is None else _result(stats.entropies, planned)
        return _result(stats.logps, planned), entropies

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        device = ctx.job.rows.positions.device
        with ctx.job.gather(), torch.autocast(device.type, enabled=False):
            job, (stats, saved_logits) = saved(ctx)
            positions = job.rows.positions
            d_logp, d_entropy = (
                None if x is None else x[positions] for x in (d_logps, d_entropies)
            )
            if d_logp is None:
                if d_entropy is None:
                    return None, *(None for _ in job.head.tensors)
                d_logp = torch.zeros_like(d_entropy)
            upstream = Coefficients(d_logp, d_entropy)
            sums, gathered = _KeptGradientSums(job), _gathered(job, ctx.blocks)
            for block, block_logits in zip(ctx.blocks, saved_logits, strict=True):
                nonzero = [x[block.row_index] != 0 for x in upstream if x is not None]
                index = torch.stack(nonzero).any(dim=0).nonzero()[:, 0]
                if len(index):
                    records = (job.rows, stats, upstream)
                    rows, row_stats, coefficients = take(records, block.row_index[index])
                    kept, logits, target = take(block_logits, index)
                    chunk = Chunk(logits, target, _transform(job, rows))
                    job.backend.grad(chunk, row_stats, coefficients, logits)
                    d_logits = logits.masked_fill_(_padding(kept), 0.0)
                    sums.add(gathered, kept, d_logits, rows.positions)
        return None, *sums.gradients()


def _gathered(job: Job, blocks: list[Block]) -> list[_GatheredRows]:
    """Memory for the gathered rows of each matrix: as many entries as the workspace holds."""
    largest = max((len(block.row_index) * block.width for block in blocks), default=0)
    entries = min(max(1, job.workspace_bytes // entry_bytes(job)), largest)
    wide = job.accumulator_dtype
    return [_GatheredRows(matrix, dtype, wide, entries) for matrix, dtype in job.head.matrices()]


def _result(x: Tensor, planned: KeptSets) -> Tensor:
    """(n,) -> (N,): 0 for a row whose set is not projected, NaN for an invalid row."""
    x = torch.where(planned.projected, x, 0.0)
    if planned.job.rows.invalid is not None:
        x.masked_fill_(planned.job.rows.invalid, torch.nan)
    return scatter(x, planned.job.rows.positions, planned.job.head.tensors.hidden.shape[0])


def _projected(
    gathered: list[_GatheredRows], planned: KeptSets, rows: Rows, block: Block
) -> BlockLogits:
    """Project the sets of the block's `rows`.

    Padding and repetitions become the row's first id, so NaN in a position's hidden state cannot
    reach the gradient of an id outside its set.
    """
    job, offsets = planned.job, planned.kept_ids.offsets
    tensors, device = job.head.tensors, rows.positions.device
    entry = offsets[rows.positions][:, None] + torch.arange(block.longest, device=device)
    inside = entry < offsets[rows.positions + 1][:, None]
    kept = planned.kept_ids.ids[torch.where(inside, entry, 0)].long() - job.shard_start
    here = inside & (kept >= 0) & (kept < tensors.weight.shape[0])
    kept = torch.where(here, kept, -1).to(torch.int32)
    kept = kept.sort(dim=1, descending=True).values[:, : block.width]
    padding = kept < 0
    padding[:, 1:] |= kept[:, 1:] == kept[:, :-1]
    kept = torch.where(padding, kept[:, :1], kept)
    is_target = kept == rows.ids[:, None]
    target = torch.where(is_target.any(dim=1), is_target.to(torch.uint8).argmax(dim=1), -1)

    z = tensors.hidden.new_zeros(kept.shape, dtype=job.accumulator_dtype)
    for matrix, (x, _) in zip(gathered, tensors.factor_pairs(), strict=True):
        states = matrix.operand(x[rows.positions])
        for columns in matrix.pieces(*kept.shape):
            z[:, columns] += torch.bmm(matrix.rows(kept[:, columns]), states[:, :, None])[..., 0]
    bias = None if tensors.bias is None else tensors.bias.detach()[kept].to(z.dtype)
    job.backend.prepare_(z, replace(_transform(job, rows), bias=bias))
    return BlockLogits(kept, z.masked_fill_(_padding(kept), -torch.inf), target)


def _padding(kept: Tensor) -> Tensor:
    padding = kept == kept[:, :1]
    padding[:, 0] = False
    return padding


def _transform(job: Job, rows: Rows) -> LogitTransform:
    """From raw to scaled logits of `rows`, without bias."""
    return replace(job.head.transform, inv_temperature=rows.inv_temperature)


class _KeptGradientSums:
    """The gradients of the head's tensors, summed over blocks."""

    def __init__(self, job: Job) -> None:
        self._job, tensors, dtype = job, job.head.tensors, job.accumulator_dtype
        d_bias = torch.zeros_like(tensors.bias, dtype=dtype) if job.needs_grad.bias else None
        self._sums = sums = GradientSums([], [], d_bias)
        pairs = zip(tensors.factor_pairs(), job.needs_grad.factor_pairs(), strict=True)
        for (x, matrix), (needs_states, needs_matrix) in pairs:
            # with a sharded head, the ranks sum d hidden before it is rounded
            states_dtype = x.dtype if job.shard is None else dtype
            d_states = torch.zeros_like(x, dtype=states_dtype) if needs_states else None
            sums.d_states.append(d_states)
            d_matrix = torch.zeros_like(matrix, dtype=dtype) if needs_matrix else None
            sums.d_matrices.append(d_matrix)

    def add(
        self, gathered: list[_GatheredRows], kept: Tensor, d_logits: Tensor, positions: Tensor
    ) -> None:
        """Add the gradient of some rows, from their ids (r, w) and d raw logits (r, w)."""
        pairs, sums = self._job.head.tensors.factor_pairs(), self._sums
        targets = zip(gathered, pairs, sums.d_states, sums.d_matrices, strict=True)
        for matrix, (x, _), d_states, d_matrix in targets:
            states = matrix.operand(x[positions])
            total = torch.zeros_like(states)
            for columns in matrix.pieces(*kept.shape):
                index, part = kept[:, columns], d_logits[:, columns]
                if d_states is not None:
                    total += torch.bmm(part[:, None, :], matrix.rows(index))[:, 0]
                if d_matrix is not None:
                    d_matrix.index_add_(0, index.reshape(-1), matrix.outer(part, states))
            if d_states is not None:
                d_states[positions] = total.to(d_states.dtype)
        if sums.d_bias is not None:
            sums.d_bias.index_add_(0, kept.reshape(-1), d_logits.reshape(-1))

    def gradients(self) -> HeadTensors:
        """The gradients in the dtypes of the head's tensors, summed over the ranks."""
        if self._job.shard is not None:
            for x in self._sums.d_states:
                if x is not None:
                    self._job.shard.sum_(x)
        pairs = zip(self._sums.tensors(), self._job.head.tensors, strict=True)
        return HeadTensors(
            *(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)
        )


def entry_bytes(job: Job) -> int:
    """Bytes of one entry's gathered rows."""
    wide = job.accumulator_dtype
    return sum(
        matrix.shape[1] * sum(x.itemsize for x in _stages(matrix.dtype, dtype, wide))
        for matrix, dtype in job.head.matrices()
    )


def _stages(*dtypes: torch.dtype) -> list[torch.dtype]:
    # dtypes of a gathered row: as stored, as an operand, as an operand of fp32 products
    return [x for i, x in enumerate(dtypes) if i == 0 or x != dtypes[i - 1]]


class _GatheredRows:
    """The rows of a matrix (V, K) for kept ids, in memory that all blocks reuse."""

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, accumulator: torch.dtype, entries: int
    ) -> None:
        self._entries, self._matrix, self._dtypes = entries, matrix.detach(), (dtype, accumulator)
        stages = _stages(matrix.dtype, *self._dtypes)
        self._stages = [matrix.new_empty(entries, matrix.shape[1], dtype=x) for x in stages]

    def operand(self, x: Tensor) -> Tensor:
        dtype, accumulator = self._dtypes
        return x.to(dtype).to(accumulator)

    def rows(self, kept: Tensor) -> Tensor:
        """Gather (r, w) ids -> (r, w, K); valid until the next call."""
        n = kept.numel()
        torch.index_select(self._matrix, 0, kept.reshape(-1), out=self._stages[0][:n])
        for x, y in itertools.pairwise(self._stages):
            y[:n].copy_(x[:n])
        return self._stages[-1][:n].view(*kept.shape, self._matrix.shape[1])

    def outer(self, d_logits: Tensor, x: Tensor) -> Tensor:
        """(r, w) and (r, K) -> (r w, K): d matrix of each entry; valid until the next call."""
        out = self._stages[-1][: d_logits.numel()]
        torch.bmm(d_logits[:, :, None], x[:, None, :], out=out.view(*d_logits.shape, out.shape[1]))
        return out

    def pieces(self, rows: int, width: int) -> list[slice]:
        """Slices of a block's columns that fit; more than one only if a single row is too long."""
        step = max(1, self._entries // max(1, rows))
        return [slice(start, min(start + step, width)) for start in range(0, width, step)]
