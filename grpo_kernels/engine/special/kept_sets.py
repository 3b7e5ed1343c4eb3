"""The products of kept sets: hidden states times the head's rows for each position's kept ids, which are gathered.

The sets of a block of r positions are ids (r, w), padded. Forward: gather (r, w, H), multiply with hidden states (r, H)
to raw projections (r, w), and reduce these as a chunk of w logits a row. Backward: differentiate the saved logits;
gather again and multiply for d hidden; the outer product with hidden states is added to the ids' rows of d weight.

With a divided head, every rank has those ids of each set that are among its rows, in blocks of its own. The ranks join
the statistics of all positions (`vocab_parallel`), and sum d hidden.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base.records import take
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.passes import scatter
from grpo_kernels.engine.records import HeadTensors, NeedsGrad, Operands, Rows
from grpo_kernels.engine.request import Gather
from grpo_kernels.engine.special.gathered import Gathered, entry_bytes

_ROWS = TorchRows()  # sets are short: their row work is little beside the gathering


class Span(NamedTuple):
    """Rows whose sets are projected together."""

    rows: slice  # of `KeptSets.order`
    width: int  # ids of the largest set
    longest: int  # entries of the longest list, with its padding


@dataclass(frozen=True)
class KeptSets:
    """The rows of a call, their sets, and how to project them.

    A set of one id is in no block: its log-probability and entropy are 0, and so is their gradient.
    """

    rows: Rows  # n rows
    ids: Tensor  # (M,) entries, one position after the other; -1 is padding
    offsets: Tensor  # (N + 1,) int64, bounds of each position's entries
    projected: Tensor  # (n,) bool: rows whose set is projected, on whatever rank
    order: Tensor  # (m,) index among the rows: those of which this rank has ids, the largest sets first
    spans: list[Span]
    plan: HeadPlan
    needs_grad: NeedsGrad
    entropy: bool
    gathered_weight: Gather = (
        nullcontext  # context in which the backward has the whole weight (ZeRO-3)
    )

    @property
    def first_id(self) -> int:
        """Id of this rank's first row of the head."""
        return 0 if self.plan.shard is None else self.plan.shard.start

    def transform(self, at: Tensor) -> LogitTransform:
        """Return the transform of the rows `at` (r,), without bias."""
        inv_t = self.rows.inv_temperature
        return self.plan.transform(None, inv_t[at] if isinstance(inv_t, Tensor) else inv_t)


class _SavedBlock(NamedTuple):
    """Tensors of a block of r rows that the forward saves."""

    kept: Tensor  # (r, w) int32 ids, counted from this rank's first, each once; padding repeats the row's first id
    logits: Tensor  # (r, w), -inf in the padding
    target: Tensor  # (r,) column of the sampled id; -1 if another rank has it


@first_order
class KeptSetLogprob(torch.autograd.Function):
    """``forward(ctx, sets, *tensors)`` -> logps (N,), entropies (N,) or None; `tensors` are those of `Operands`."""

    @staticmethod
    def forward(ctx: Any, sets: KeptSets, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        head, shard = Operands(*tensors), sets.plan.shard
        stats, blocks = _no_stats(sets), list[_SavedBlock]()
        with torch.autocast(head.hidden.device.type, enabled=False):
            factors = _factors(head, sets)
            for span in sets.spans:
                at = sets.order[span.rows]
                kept, target = _in_order(sets, at, span, head.weight.shape[0])
                block = _SavedBlock(kept, _logits(factors, head, sets, at, kept), target)
                _write(
                    stats,
                    at,
                    _ROWS.stats(_chunk(block, sets, at, target.clamp(min=0)), entropy=sets.entropy),
                )
                if any(sets.needs_grad):
                    blocks.append(block)
            if shard is not None:
                stats = shard.joined(stats, sets.rows.ids, LogitTransform())
        ctx.sets, ctx.count = sets, len(tensors)
        ctx.save_for_backward(*tensors, *_numbers(stats), *itertools.chain(*blocks))
        logps, entropies = stats.logps, stats.entropies
        return _result(logps, sets, head), None if entropies is None else _result(
            entropies, sets, head
        )

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sets: KeptSets = ctx.sets
        with sets.gathered_weight(), torch.autocast(sets.ids.device.type, enabled=False):
            saved = iter(ctx.saved_tensors)
            head, stats = (
                Operands(*itertools.islice(saved, ctx.count)),
                RowStats(*itertools.islice(saved, 4)),
            )
            upstream = [x for x in (d_logps, d_entropies) if x is not None]
            if not upstream:
                return None, *(None for _ in head)
            sums, factors = _GradientSums(head, sets), _factors(head, sets)
            for span in sets.spans:
                at, block = (
                    sets.order[span.rows],
                    _SavedBlock(*itertools.islice(saved, len(_SavedBlock._fields))),
                )
                moved = torch.stack([x[sets.rows.positions[at]] != 0 for x in upstream]).any(dim=0)
                index = moved.nonzero()[:, 0]
                if not len(index):
                    continue
                at, block = at[index], take(block, index)
                sums.add(
                    factors, block.kept, _d_raw(block, sets, at, stats, d_logps, d_entropies), at
                )
        return None, *sums.gradients()


def _factors(head: Operands, sets: KeptSets) -> list[Gathered]:
    """Return the gathered rows of each factor, for as many entries at a time as the workspace holds."""
    plan = sets.plan
    largest = max(
        ((span.rows.stop - span.rows.start) * span.width for span in sets.spans), default=0
    )
    entries = min(max(1, plan.workspace_bytes // entry_bytes(head, plan)), largest)
    pairs = zip(head.factors(), plan.operand_dtypes(head), strict=True)
    return [Gathered(matrix, dtype, plan.accumulator, entries) for (_, matrix), dtype in pairs]


def _no_stats(sets: KeptSets) -> RowStats:
    """Return the statistics (n,) of rows of which this rank has no id."""
    zeros = sets.rows.positions.new_zeros(len(sets.rows), dtype=sets.plan.accumulator)
    nothing = torch.full_like(zeros, -torch.inf)
    return RowStats(zeros, nothing, zeros.clone(), zeros.clone() if sets.entropy else None)


def _numbers(stats: RowStats) -> tuple[Tensor | None, ...]:
    """Return the statistics that rows of sets have, in the order of the fields."""
    return stats.logps, stats.max_logit, stats.log_sum, stats.entropies


def _write(stats: RowStats, at: Tensor, of_block: RowStats) -> None:
    """Write the statistics `of_block` (r,) to the rows `at` of `stats` (n,)."""
    for x, part in zip(_numbers(stats), _numbers(of_block), strict=True):
        if x is not None and part is not None:
            x[at] = part


def _result(x: Tensor, sets: KeptSets, head: Operands) -> Tensor:
    """Return a statistic (n,) as a result (N,): 0 where no set is projected, NaN where a row is invalid."""
    x = torch.where(sets.projected, x, 0.0)
    if sets.rows.invalid is not None:
        x.masked_fill_(sets.rows.invalid, torch.nan)
    return scatter(x, sets.rows, head.hidden.shape[0])


def _in_order(sets: KeptSets, at: Tensor, span: Span, vocab: int) -> tuple[Tensor, Tensor]:
    """Return `_SavedBlock.kept` (r, w) and `_SavedBlock.target` (r,) of the rows `at` (r,), on a rank with `vocab` ids.

    Padding and repetitions are the row's first id: so NaN in a position's hidden state reaches the gradient of no id
    outside of its set.
    """
    positions = sets.rows.positions[at]
    place = sets.offsets[positions][:, None] + torch.arange(span.longest, device=positions.device)
    inside = place < sets.offsets[positions + 1][:, None]
    kept = sets.ids[torch.where(inside, place, 0)].long() - sets.first_id
    kept = torch.where(inside & (kept >= 0) & (kept < vocab), kept, -1).to(torch.int32)
    kept = kept.sort(dim=1, descending=True).values[:, : span.width]
    padding = kept < 0
    padding[:, 1:] |= kept[:, 1:] == kept[:, :-1]
    kept = torch.where(padding, kept[:, :1], kept)
    is_target = kept == sets.rows.ids[at, None]
    return kept, torch.where(is_target.any(dim=1), is_target.to(torch.uint8).argmax(dim=1), -1)


def _padding(kept: Tensor) -> Tensor:
    """Return the mask (r, w) of the padding in `_SavedBlock.kept`."""
    padding = kept == kept[:, :1]
    padding[:, 0] = False
    return padding


def _logits(
    factors: list[Gathered], head: Operands, sets: KeptSets, at: Tensor, kept: Tensor
) -> Tensor:
    """Return the logits (r, w) of the ids `kept`, -inf in the padding."""
    positions = sets.rows.positions[at]
    z = head.hidden.new_zeros(kept.shape, dtype=sets.plan.accumulator)
    for factor, (x, _) in zip(factors, head.factors(), strict=True):
        states = factor.operand(x[positions])
        for columns in factor.pieces(*kept.shape):
            z[:, columns] += torch.bmm(factor.of(kept[:, columns]), states[:, :, None])[..., 0]
    bias = None if head.bias is None else head.bias.detach()[kept].to(z.dtype)
    _ROWS.prepare_(z, replace(sets.transform(at), bias=bias))
    return z.masked_fill_(_padding(kept), -torch.inf)


def _d_raw(
    block: _SavedBlock,
    sets: KeptSets,
    at: Tensor,
    stats: RowStats,
    d_logps: Tensor | None,
    d_entropies: Tensor | None,
) -> Tensor:
    """Return d loss / d (raw projection), (r, w), of the rows `at` (r,), from the statistics (n,) and upstream (N,)."""
    chunk, positions = _chunk(block, sets, at, block.target), sets.rows.positions[at]
    d_logp, d_entropy = (
        None if x is None else x[positions].to(sets.plan.accumulator)
        for x in (d_logps, d_entropies)
    )
    stats = take(stats, at)
    _ROWS.grad(
        chunk,
        stats,
        torch.zeros_like(stats.logps) if d_logp is None else d_logp,
        d_entropy,
        chunk.logits,
    )
    return chunk.logits.masked_fill_(_padding(block.kept), 0.0)


def _chunk(block: _SavedBlock, sets: KeptSets, at: Tensor, columns: Tensor) -> Chunk:
    """Return a block as a chunk of logits, each row's target in `columns` (r,)."""
    return Chunk(block.logits, columns, sets.transform(at))


class _GradientSums:
    """The gradients of the head's tensors, summed over blocks."""

    def __init__(self, head: Operands, sets: KeptSets) -> None:
        self._head, self._sets, dtype = head, sets, sets.plan.accumulator
        divided = (
            sets.plan.shard is not None
        )  # then d hidden is a sum over the ranks, rounded after it
        self._rows: list[Tensor | None] = []
        self._matrices: list[Tensor | None] = []
        for (x, matrix), (rows, whole) in zip(
            head.factors(), sets.needs_grad.factors(), strict=False
        ):
            self._rows.append(
                torch.zeros_like(x, dtype=dtype if divided else x.dtype) if rows else None
            )
            self._matrices.append(torch.zeros_like(matrix, dtype=dtype) if whole else None)
        self._bias = None
        if head.bias is not None and sets.needs_grad.bias:
            self._bias = torch.zeros_like(head.bias, dtype=dtype)

    def add(self, factors: list[Gathered], kept: Tensor, d_raw: Tensor, at: Tensor) -> None:
        """Add the gradient of the rows `at` (r,), from the ids (r, w) and d raw (r, w) of their sets."""
        positions, features = self._sets.rows.positions[at], (x for x, _ in self._head.factors())
        for factor, x, rows, matrix in zip(
            factors, features, self._rows, self._matrices, strict=True
        ):
            states = factor.operand(x[positions])
            d_states = torch.zeros_like(states)
            for columns in factor.pieces(*kept.shape):
                index, part = kept[:, columns], d_raw[:, columns]
                if rows is not None:
                    d_states += torch.bmm(part[:, None, :], factor.of(index))[:, 0]
                if matrix is not None:
                    matrix.index_add_(0, index.reshape(-1), factor.outer(part, states))
            if rows is not None:
                rows[positions] = d_states.to(rows.dtype)
        if self._bias is not None:
            self._bias.index_add_(0, kept.reshape(-1), d_raw.reshape(-1))

    def gradients(self) -> HeadTensors[Tensor | None]:
        """Return the gradients in the dtypes of the head's tensors; those of a row are summed over the ranks."""
        shard = self._sets.plan.shard
        if shard is not None:
            for x in self._rows:
                if x is not None:
                    shard.sum_(x)
        (hidden, *lora_u), (weight, *lora_b) = self._rows, self._matrices
        sums = HeadTensors(hidden, weight, self._bias, *lora_u, *lora_b)
        pairs = zip(sums, self._head, strict=True)
        return HeadTensors(
            *(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)
        )
