"""Log-probabilities and entropies over kept sets: hidden states times the head's rows of the ids.

The sets of a block of r positions are ids (r, w), padded. Forward: gather (r, w, H), multiply with
hidden states (r, H) to raw logits (r, w), and reduce these as a chunk of w logits per row.
Backward: differentiate the saved logits; gather again and multiply for d hidden; add the outer
product with the hidden states to the ids' rows of d weight.

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
from grpo_kernels.base.checks import HIGHEST_LOGP
from grpo_kernels.base.choices import OnMissingSet
from grpo_kernels.base.tensors import scatter, take
from grpo_kernels.engine.autograd import first_order, run_scores, save, saved
from grpo_kernels.engine.plan import Job, RowLoss, Run, with_engine
from grpo_kernels.head import HeadTensors
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.results import Scores

WORKSPACE_BYTES = 64 * 2**20  # the default: a larger workspace is no faster
# bytes per kept id, besides its row of the head, while sets are counted, sorted and reduced
ENTRY_BYTES = 64
# Rows of `KeptSets.order` that are projected together; size of their largest set; length of their
# longest list, padding included.
Span = tuple[slice, int, int]
# A block of r rows: (r, w) int32 ids counted from this rank's first id, each once, where padding
# repeats the row's first id; (r, w) logits, -inf in the padding; (r,) column of the sampled id, -1
# if another rank has it.
_Block = tuple[Tensor, Tensor, Tensor]


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
        job: the call, with rows whose ids are counted from this rank's first id.
        kept_ids: all entries, and the bounds of each position's entries; -1 is padding.
        projected: (n,) bool, rows whose set is projected, on any rank.
        order: (m,) index of the rows with ids on this rank, the largest sets first.
        spans: slices of `order` to project together.
    """

    job: Job
    kept_ids: KeptIds
    projected: Tensor
    order: Tensor
    spans: list[Span]

    def transform(self, at: Tensor) -> LogitTransform:
        """The transform of the rows `at` (r,), without bias."""
        inv_t = self.job.rows.inv_temperature
        inv_t = inv_t[at] if isinstance(inv_t, Tensor) else inv_t
        return replace(self.job.head.transform, inv_temperature=inv_t)


def score_kept(
    job: Job,
    run: Run,
    kept_ids: KeptIds,
    ids: Tensor,
    on_missing_set: OnMissingSet,
    row_loss_at: Callable[[Tensor], RowLoss],
    *,
    entropy: bool | str = True,
    others: Mapping[str, Tensor | None] | None = None,
) -> tuple[Scores, dict[str, tuple[Tensor, Tensor]]]:
    """Score rows over their sets, and rows without a set over the whole vocabulary.

    Args:
        job: planned without an engine, and without a check that its ids are in range.
        row_loss_at: function from positions (m,) that are scored over the whole vocabulary to
            their loss.
        entropy: True for the sets, "full" for the whole vocabulary, False for none.
        others: other policies' log-probabilities, (...) each, which must be over the same sets.

    Returns:
        The scores, and the metrics of the sets, as (sum, count).
    """
    budget = WORKSPACE_BYTES if run.workspace_bytes is None else run.workspace_bytes
    over_sets = replace(job, workspace_bytes=budget, entropy=entropy is True)
    survey = survey_sets(over_sets, kept_ids, ids, on_missing_set, others or {})
    planned, any_without = plan_sets(over_sets, kept_ids, survey)
    whole_vocab, in_full, shape = None, entropy == "full", ids.shape
    if any_without or in_full:
        rows = job.rows if in_full else take(job.rows, survey.without.nonzero()[:, 0])
        row_loss = row_loss_at(rows.positions)
        whole_vocab = replace(job, rows=rows, entropy=bool(entropy))
        whole_vocab = with_engine(whole_vocab, run, row_loss)
    logps, entropies = KeptSetLogprob.apply(planned, *job.head.tensors)
    logps, entropies = logps.view(shape), None if entropies is None else entropies.view(shape)
    if whole_vocab is not None:
        without = scatter(survey.without, job.rows.positions, shape.numel()).view(shape)
        full = run_scores(whole_vocab, row_loss, shape)
        logps = torch.where(without, full.logps, logps)
        if entropies is not None:
            entropies = torch.where(without, full.entropies, entropies)
        elif in_full:
            entropies = full.entropies
    scores = Scores(logps=logps) if entropies is None else Scores(logps=logps, entropies=entropies)
    return scores, survey.metrics(job.accumulator_dtype)


def survey_sets(
    job: Job,
    kept_ids: KeptIds,
    ids: Tensor,
    on_missing_set: str,
    others: Mapping[str, Tensor | None],
) -> Survey:
    """Count the kept ids of all positions, a workspace at a time, without waiting for a GPU.

    Args:
        ids: (...) the ids to score.
        others: other policies' log-probabilities, (...) each, which must be over the same sets.
    """
    rows, sampled = job.rows, ids.detach().reshape(-1)
    vocab, first, rows_here = job.vocab, job.shard_start, job.head.tensors.weight.shape[0]
    # per position: ids, ids among this rank's rows, ids that do not exist, the sampled id
    counts = kept_ids.offsets.new_zeros(4, sampled.shape[0])
    step = max(1, job.workspace_bytes // ENTRY_BYTES)
    for start in range(0, kept_ids.ids.shape[0], step):
        some = kept_ids.ids[start : start + step]
        entry = torch.arange(start, start + some.shape[0], device=some.device)
        owner = torch.searchsorted(kept_ids.offsets, entry, right=True) - 1
        exists = (some >= 0) & (some < vocab)
        flags = (
            exists,
            exists & (some >= first) & (some < first + rows_here),
            (some < -1) | (some >= vocab),
        )
        for count, flag in zip(counts, (*flags, exists & (some == sampled[owner])), strict=True):
            count.index_add_(0, owner, flag.long())
    sizes, local, outside, hits = counts[:, rows.positions]
    missing = hits == 0
    invalid = (outside > 0) if on_missing_set == "full" else (outside > 0) | missing
    if invalid.device.type != "cpu":
        without = missing & ~invalid
        return Survey(sizes, local, without, invalid)
    if bool(invalid.any()):
        i = int(invalid.nonzero()[0])
        at = rows.positions[i]
        raise ValueError(_wrong(kept_ids, ids, at, int(sizes[i]), int(outside[i]), vocab))
    alone = rows.positions[(sizes == 1) & ~missing]
    for name, x in others.items():  # 0 where a set is one id, unless they are over other sets
        logps = None if x is None else x.detach().reshape(-1)[alone]
        if logps is not None and bool((logps.abs() > HIGHEST_LOGP).any()):
            raise ValueError(
                f"{name}: expected log-probabilities over the same kept sets, so 0 where a set is "
                f"one id, got {logps[logps.abs() > HIGHEST_LOGP][0].item():.4g}: compute them "
                "with kept_ids too"
            )
    return Survey(sizes, local, missing, None)


def _wrong(
    kept_ids: KeptIds,
    ids: Tensor,
    position: Tensor,
    size: int,
    outside: int,
    vocab: int,
) -> str:
    at = tuple(int(x) for x in torch.unravel_index(position, ids.shape))
    if outside:
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
    row_bytes = (
        2 * job.accumulator_dtype.itemsize * sum(x.shape[1] for _, x in job.head.tensors.factors())
    )
    budget, head_bytes = job.workspace_bytes, entry_bytes(job)
    spans = plan_spans(sizes[:count], lists[:count], budget, head_bytes, row_bytes)
    own = replace(rows, ids=rows.ids - job.shard_start, invalid=survey.invalid)
    planned = KeptSets(replace(job, rows=own), kept_ids, projected, order[:count], spans)
    return planned, any(without)


def plan_spans(
    sizes: list[int], longest: list[int], budget: int, head_bytes: int, row_bytes: int
) -> list[Span]:
    """Divide rows into spans that fit the budget, with sets at least half as long as the longest.

    Padding then costs at most as much as the sets themselves.

    Args:
        sizes: number of ids in each row's set, decreasing.
        longest: number of entries in each row's list, padding included.
        head_bytes: bytes of one entry's gathered rows of the head.
        row_bytes: further bytes of a row.
    """
    spans, start = [], 0
    most_left = [*itertools.accumulate(reversed(longest), max)][::-1]  # from each row on
    while start < len(sizes):
        width = sizes[start]
        most = max(1, budget // (width * head_bytes + most_left[start] * ENTRY_BYTES + row_bytes))
        stop = bisect.bisect_right(
            sizes, -width / 2, lo=start, hi=min(len(sizes), start + most), key=operator.neg
        )
        spans.append((slice(start, stop), width, max(longest[start:stop])))
        start = stop
    return spans


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
        shard = planned.job.shard
        positions, dtype = planned.job.rows.positions, planned.job.accumulator_dtype
        zeros = positions.new_zeros(len(positions), dtype=dtype)
        nothing = torch.full_like(zeros, -torch.inf)  # for rows without an id on this rank
        numbers: dict[str, Any] = {"logps": zeros, "max_logit": nothing, "log_sum": zeros.clone()}
        if planned.job.entropy:
            numbers["entropies"] = zeros.clone()
        blocks: list[_Block] = []
        with torch.autocast(positions.device.type, enabled=False):
            factors = _factors(planned)
            for span in planned.spans:
                at = planned.order[span[0]]
                kept, target = _in_order(planned, at, span)
                logits = _logits(factors, planned, at, kept)
                chunk = Chunk(logits, target.clamp(min=0), planned.transform(at))
                of_block = planned.job.backend.stats(chunk, entropy=planned.job.entropy)
                for name, x in numbers.items():
                    x[at] = getattr(of_block, name)
                if any(planned.job.needs_grad):
                    blocks.append((kept, logits, target))
            stats = RowStats(**numbers)
            if shard is not None:
                stats = shard.joined(stats, planned.job.rows.ids, LogitTransform())
        save(ctx, planned.job, (stats, tuple(blocks)), projects=True)
        ctx.planned = replace(planned, job=ctx.job)
        entropies = None if stats.entropies is None else _result(stats.entropies, planned)
        return _result(stats.logps, planned), entropies

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        device = ctx.planned.order.device.type
        with ctx.job.gather(), torch.autocast(device, enabled=False):
            job, (stats, blocks) = saved(ctx)
            planned: KeptSets = replace(ctx.planned, job=job)
            upstream = [x for x in (d_logps, d_entropies) if x is not None]
            if not upstream:
                return None, *(None for _ in job.head.tensors)
            sums, factors = _KeptGradientSums(planned), _factors(planned)
            for (rows, *_), block in zip(planned.spans, blocks, strict=True):
                at = planned.order[rows]
                positions = planned.job.rows.positions[at]
                has_gradient = torch.stack([x[positions] != 0 for x in upstream]).any(dim=0)
                index = has_gradient.nonzero()[:, 0]
                if len(index):
                    at, block = at[index], take(block, index)
                    d_logits = _d_logits(block, planned, at, stats, d_logps, d_entropies)
                    sums.add(factors, block[0], d_logits, at)
        return None, *sums.gradients()


def _factors(planned: KeptSets) -> list[_Gathered]:
    """Memory for each factor's gathered rows, for as many entries as the workspace holds."""
    job = planned.job
    largest = max(((rows.stop - rows.start) * width for rows, width, _ in planned.spans), default=0)
    entries = min(max(1, job.workspace_bytes // entry_bytes(job)), largest)
    wide = job.accumulator_dtype
    return [_Gathered(matrix, dtype, wide, entries) for _, matrix, dtype in job.head.factors()]


def _result(x: Tensor, planned: KeptSets) -> Tensor:
    """(n,) -> (N,): 0 for a row whose set is not projected, NaN for an invalid row."""
    x = torch.where(planned.projected, x, 0.0)
    if planned.job.rows.invalid is not None:
        x.masked_fill_(planned.job.rows.invalid, torch.nan)
    return scatter(x, planned.job.rows.positions, planned.job.head.tensors.hidden.shape[0])


def _in_order(planned: KeptSets, at: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The ids (r, w) and the target (r,) of a `_Block`.

    Padding and repetitions become the row's first id, so NaN in a position's hidden state cannot
    reach the gradient of an id outside its set.
    """
    positions, (_, width, longest) = planned.job.rows.positions[at], span
    entry = planned.kept_ids.offsets[positions][:, None] + torch.arange(
        longest, device=positions.device
    )
    inside = entry < planned.kept_ids.offsets[positions + 1][:, None]
    kept = planned.kept_ids.ids[torch.where(inside, entry, 0)].long() - planned.job.shard_start
    rows_here = planned.job.head.tensors.weight.shape[0]
    kept = torch.where(inside & (kept >= 0) & (kept < rows_here), kept, -1).to(torch.int32)
    kept = kept.sort(dim=1, descending=True).values[:, :width]
    padding = kept < 0
    padding[:, 1:] |= kept[:, 1:] == kept[:, :-1]
    kept = torch.where(padding, kept[:, :1], kept)
    is_target = kept == planned.job.rows.ids[at, None]
    return kept, torch.where(is_target.any(dim=1), is_target.to(torch.uint8).argmax(dim=1), -1)


def _padding(kept: Tensor) -> Tensor:
    padding = kept == kept[:, :1]
    padding[:, 0] = False
    return padding


def _logits(factors: list[_Gathered], planned: KeptSets, at: Tensor, kept: Tensor) -> Tensor:
    """Logits (r, w) of the ids `kept`, -inf in the padding."""
    tensors = planned.job.head.tensors
    positions = planned.job.rows.positions[at]
    z = tensors.hidden.new_zeros(kept.shape, dtype=planned.job.accumulator_dtype)
    for factor, (x, _) in zip(factors, tensors.factors(), strict=True):
        states = factor.operand(x[positions])
        for columns in factor.pieces(*kept.shape):
            z[:, columns] += torch.bmm(factor.of(kept[:, columns]), states[:, :, None])[..., 0]
    bias = None if tensors.bias is None else tensors.bias.detach()[kept].to(z.dtype)
    planned.job.backend.prepare_(z, replace(planned.transform(at), bias=bias))
    return z.masked_fill_(_padding(kept), -torch.inf)


def _d_logits(
    block: _Block,
    planned: KeptSets,
    at: Tensor,
    stats: RowStats,
    d_logps: Tensor | None,
    d_entropies: Tensor | None,
) -> Tensor:
    """d loss / d (raw logits), (r, w), from statistics (n,) and upstream (N,)."""
    kept, logits, target = block
    positions, stats = planned.job.rows.positions[at], take(stats, at)
    dtype = planned.job.accumulator_dtype
    d_logp, d_entropy = (
        None if x is None else x[positions].to(dtype) for x in (d_logps, d_entropies)
    )
    d_logp = torch.zeros_like(stats.logps) if d_logp is None else d_logp
    chunk = Chunk(logits, target, planned.transform(at))
    planned.job.backend.grad(chunk, stats, Coefficients(d_logp, d_entropy), logits)
    return logits.masked_fill_(_padding(kept), 0.0)


class _KeptGradientSums:
    """The gradients of the head's tensors, summed over blocks."""

    def __init__(self, planned: KeptSets) -> None:
        self._planned, tensors = planned, planned.job.head.tensors
        dtype = planned.job.accumulator_dtype
        # with a sharded head, the ranks sum d hidden before it is rounded
        divided = planned.job.shard is not None
        self._rows: list[Tensor | None] = []
        self._matrices: list[Tensor | None] = []
        pairs = zip(tensors.factors(), planned.job.needs_grad.factors(), strict=False)
        for (x, matrix), (rows, whole) in pairs:
            of_rows = dtype if divided else x.dtype
            self._rows.append(torch.zeros_like(x, dtype=of_rows) if rows else None)
            self._matrices.append(torch.zeros_like(matrix, dtype=dtype) if whole else None)
        self._bias = None
        if tensors.bias is not None and planned.job.needs_grad.bias:
            self._bias = torch.zeros_like(tensors.bias, dtype=dtype)

    def add(self, factors: list[_Gathered], kept: Tensor, d_logits: Tensor, at: Tensor) -> None:
        """Add the gradient of the rows `at` (r,), from ids (r, w) and d raw logits (r, w)."""
        positions, features = (
            self._planned.job.rows.positions[at],
            (x for x, _ in self._planned.job.head.tensors.factors()),
        )
        targets = zip(factors, features, self._rows, self._matrices, strict=True)
        for factor, x, rows, matrix in targets:
            states = factor.operand(x[positions])
            d_states = torch.zeros_like(states)
            for columns in factor.pieces(*kept.shape):
                index, part = kept[:, columns], d_logits[:, columns]
                if rows is not None:
                    d_states += torch.bmm(part[:, None, :], factor.of(index))[:, 0]
                if matrix is not None:
                    matrix.index_add_(0, index.reshape(-1), factor.outer(part, states))
            if rows is not None:
                rows[positions] = d_states.to(rows.dtype)
        if self._bias is not None:
            self._bias.index_add_(0, kept.reshape(-1), d_logits.reshape(-1))

    def gradients(self) -> HeadTensors:
        """The gradients in the dtypes of the head's tensors, summed over the ranks."""
        shard = self._planned.job.shard
        for x in self._rows:
            if shard is not None and x is not None:
                shard.sum_(x)
        sums = HeadTensors.of_factors(self._rows, self._matrices, self._bias)
        pairs = zip(sums, self._planned.job.head.tensors, strict=True)
        return HeadTensors(
            *(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)
        )


def entry_bytes(job: Job) -> int:
    """Bytes of one entry's gathered rows."""
    wide = job.accumulator_dtype
    return sum(
        matrix.shape[1] * sum(x.itemsize for x in _stages(matrix.dtype, dtype, wide))
        for _, matrix, dtype in job.head.factors()
    )


def _stages(*dtypes: torch.dtype) -> list[torch.dtype]:
    # dtypes of a gathered row: as stored, as an operand, as an operand of fp32 products
    return [x for i, x in enumerate(dtypes) if i == 0 or x != dtypes[i - 1]]


class _Gathered:
    """The rows of a factor's matrix (V, K) for kept ids, in memory that all blocks reuse."""

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, accumulator: torch.dtype, entries: int
    ) -> None:
        self._entries, self._matrix, self._dtypes = entries, matrix.detach(), (dtype, accumulator)
        stages = _stages(matrix.dtype, *self._dtypes)
        self._stages = [matrix.new_empty(entries, matrix.shape[1], dtype=x) for x in stages]

    def operand(self, x: Tensor) -> Tensor:
        dtype, accumulator = self._dtypes
        return x.to(dtype).to(accumulator)

    def of(self, kept: Tensor) -> Tensor:
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
