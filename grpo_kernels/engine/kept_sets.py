"""The products of kept sets: hidden states times the head's rows of each position's kept ids.

The sets of a block of r positions are ids (r, w), padded. Forward: gather (r, w, H), multiply with
hidden states (r, H) to raw projections (r, w), and reduce these as a chunk of w logits a row.
Backward: differentiate the saved logits; gather again and multiply for d hidden; the outer product
with hidden states is added to the ids' rows of d weight.

With a divided head, every rank has those ids of each set that are among its rows, in blocks of its
own. The ranks join the statistics of all positions (`vocab_parallel`), and sum d hidden.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.autograd import first_order
from grpo_kernels.engine.passes import scatter
from grpo_kernels.engine.plan import Gather, HeadPlan
from grpo_kernels.engine.records import HeadTensors, NeedsGrad, Operands, Rows

# Rows of `KeptSets.order` whose sets are projected together; ids of the largest set; entries of the
# longest list, with its padding.
Span = tuple[slice, int, int]
# Of a block of r rows: (r, w) int32 ids counted from this rank's first, each once, where padding
# repeats the row's first id; (r, w) logits, -inf in the padding; (r,) column of the sampled id, -1
# if another rank has it.
_Block = tuple[Tensor, Tensor, Tensor]
_ROWS = TorchRows()  # sets are short: their row work is little beside the gathering


@dataclass(frozen=True)
class KeptSets:
    """The rows of a call, their sets, and how to project them.

    A set of one id is in no block: its log-probability and entropy are 0, and so is their gradient.

    Attributes:
        rows: n rows.
        ids: (M,) entries, one position after the other; -1 is padding.
        offsets: (N + 1,) int64, bounds of each position's entries.
        projected: (n,) bool, rows whose set is projected, on whatever rank.
        order: (m,) index of the rows of which this rank has ids, the largest sets first.
        gathered_weight: context in which the backward has the whole weight (ZeRO-3).
    """

    rows: Rows
    ids: Tensor
    offsets: Tensor
    projected: Tensor
    order: Tensor
    spans: list[Span]
    plan: HeadPlan
    needs_grad: NeedsGrad
    entropy: bool
    gathered_weight: Gather = nullcontext

    @property
    def first_id(self) -> int:
        """Id of this rank's first row of the head."""
        return 0 if self.plan.shard is None else self.plan.shard.start

    def transform(self, at: Tensor) -> LogitTransform:
        """Return the transform of the rows `at` (r,), without bias."""
        inv_t = self.rows.inv_temperature
        return self.plan.transform(None, inv_t[at] if isinstance(inv_t, Tensor) else inv_t)


@first_order
class KeptSetLogprob(torch.autograd.Function):
    """Log-probabilities (N,) and entropies (N,) or None over kept sets.

    ``forward(ctx, sets, *tensors)``: `tensors` are those of `Operands`.
    """

    @staticmethod
    def forward(ctx: Any, sets: KeptSets, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        head, shard = Operands(*tensors), sets.plan.shard
        zeros = sets.rows.positions.new_zeros(len(sets.rows), dtype=sets.plan.accumulator)
        nothing = torch.full_like(zeros, -torch.inf)  # of rows of which this rank has no id
        stats = RowStats(zeros, nothing, zeros.clone(), zeros.clone() if sets.entropy else None)
        blocks: list[Tensor] = []
        with torch.autocast(head.hidden.device.type, enabled=False):
            factors = _factors(head, sets)
            for span in sets.spans:
                at = sets.order[span[0]]
                kept, target = _in_order(sets, at, span, head.weight.shape[0])
                logits = _logits(factors, head, sets, at, kept)
                chunk = Chunk(logits, target.clamp(min=0), sets.transform(at))
                of_block = _ROWS.stats(chunk, entropy=sets.entropy)
                for x, part in zip(_numbers(stats), _numbers(of_block), strict=True):
                    if x is not None and part is not None:
                        x[at] = part
                if any(sets.needs_grad):
                    blocks += [kept, logits, target]
            if shard is not None:
                stats = shard.joined(stats, sets.rows.ids, LogitTransform())
        ctx.sets, ctx.count = sets, len(tensors)
        ctx.save_for_backward(*tensors, *_numbers(stats), *blocks)
        entropies = None if stats.entropies is None else _result(stats.entropies, sets, head)
        return _result(stats.logps, sets, head), entropies

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sets: KeptSets = ctx.sets
        with sets.gathered_weight(), torch.autocast(sets.ids.device.type, enabled=False):
            saved = iter(ctx.saved_tensors)
            head = Operands(*itertools.islice(saved, ctx.count))
            stats = RowStats(*itertools.islice(saved, 4))
            upstream = [x for x in (d_logps, d_entropies) if x is not None]
            if not upstream:
                return None, *(None for _ in head)
            sums, factors = _GradientSums(head, sets), _factors(head, sets)
            for rows, *_ in sets.spans:
                at, block = sets.order[rows], tuple(itertools.islice(saved, 3))
                moved = torch.stack([x[sets.rows.positions[at]] != 0 for x in upstream]).any(dim=0)
                index = moved.nonzero()[:, 0]
                if len(index):
                    at, block = at[index], take(block, index)
                    d_raw = _d_raw(block, sets, at, stats, d_logps, d_entropies)
                    sums.add(factors, block[0], d_raw, at)
        return None, *sums.gradients()


def _numbers(stats: RowStats) -> tuple[Tensor | None, ...]:
    # the statistics that rows of sets have, in the order of the fields
    return stats.logps, stats.max_logit, stats.log_sum, stats.entropies


def _factors(head: Operands, sets: KeptSets) -> list[_Gathered]:
    """Return the gathered rows of each factor, for as many entries as the workspace holds."""
    plan = sets.plan
    largest = max(((rows.stop - rows.start) * width for rows, width, _ in sets.spans), default=0)
    entries = min(max(1, plan.workspace_bytes // entry_bytes(head, plan)), largest)
    pairs = zip(head.factors(), plan.operand_dtypes(head), strict=True)
    return [_Gathered(matrix, dtype, plan.accumulator, entries) for (_, matrix), dtype in pairs]


def _result(x: Tensor, sets: KeptSets, head: Operands) -> Tensor:
    """(n,) -> (N,): 0 where no set is projected, NaN where a row is invalid."""
    x = torch.where(sets.projected, x, 0.0)
    if sets.rows.invalid is not None:
        x.masked_fill_(sets.rows.invalid, torch.nan)
    return scatter(x, sets.rows, head.hidden.shape[0])


def _in_order(sets: KeptSets, at: Tensor, span: Span, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the ids (r, w) and the target (r,) of a `_Block`, on a rank with `vocab` ids.

    Padding and repetitions are the row's first id: so NaN in a position's hidden state reaches the
    gradient of no id outside of its set.
    """
    positions, (_, width, longest) = sets.rows.positions[at], span
    place = sets.offsets[positions][:, None] + torch.arange(longest, device=positions.device)
    inside = place < sets.offsets[positions + 1][:, None]
    kept = sets.ids[torch.where(inside, place, 0)].long() - sets.first_id
    kept = torch.where(inside & (kept >= 0) & (kept < vocab), kept, -1).to(torch.int32)
    kept = kept.sort(dim=1, descending=True).values[:, :width]
    padding = kept < 0
    padding[:, 1:] |= kept[:, 1:] == kept[:, :-1]
    kept = torch.where(padding, kept[:, :1], kept)
    is_target = kept == sets.rows.ids[at, None]
    return kept, torch.where(is_target.any(dim=1), is_target.to(torch.uint8).argmax(dim=1), -1)


def _padding(kept: Tensor) -> Tensor:
    padding = kept == kept[:, :1]
    padding[:, 0] = False
    return padding


def _logits(
    factors: list[_Gathered], head: Operands, sets: KeptSets, at: Tensor, kept: Tensor
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
    block: _Block,
    sets: KeptSets,
    at: Tensor,
    stats: RowStats,
    d_logps: Tensor | None,
    d_entropies: Tensor | None,
) -> Tensor:
    """Return d loss / d (raw projection), (r, w), from statistics (n,) and upstream (N,)."""
    kept, logits, target = block
    positions, stats = sets.rows.positions[at], take(stats, at)
    d_logp, d_entropy = (
        None if x is None else x[positions].to(sets.plan.accumulator)
        for x in (d_logps, d_entropies)
    )
    d_logp = torch.zeros_like(stats.logps) if d_logp is None else d_logp
    _ROWS.grad(Chunk(logits, target, sets.transform(at)), stats, d_logp, d_entropy, logits)
    return logits.masked_fill_(_padding(kept), 0.0)


class _GradientSums:
    """The gradients of the head's tensors, summed over blocks."""

    def __init__(self, head: Operands, sets: KeptSets) -> None:
        self._head, self._sets, dtype = head, sets, sets.plan.accumulator
        # then d hidden is a sum over the ranks, rounded after it
        divided = sets.plan.shard is not None
        self._rows: list[Tensor | None] = []
        self._matrices: list[Tensor | None] = []
        pairs = zip(head.factors(), sets.needs_grad.factors(), strict=False)
        for (x, matrix), (rows, whole) in pairs:
            of_rows = dtype if divided else x.dtype
            self._rows.append(torch.zeros_like(x, dtype=of_rows) if rows else None)
            self._matrices.append(torch.zeros_like(matrix, dtype=dtype) if whole else None)
        self._bias = None
        if head.bias is not None and sets.needs_grad.bias:
            self._bias = torch.zeros_like(head.bias, dtype=dtype)

    def add(self, factors: list[_Gathered], kept: Tensor, d_raw: Tensor, at: Tensor) -> None:
        """Add the gradient of the rows `at` (r,), from the ids (r, w) and d raw (r, w)."""
        positions, features = self._sets.rows.positions[at], (x for x, _ in self._head.factors())
        targets = zip(factors, features, self._rows, self._matrices, strict=True)
        for factor, x, rows, matrix in targets:
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
        """Return the gradients in the dtypes of the head's tensors."""
        shard = self._sets.plan.shard
        for x in self._rows:
            if shard is not None and x is not None:
                shard.sum_(x)
        sums = HeadTensors.of_factors(self._rows, self._matrices, self._bias)
        pairs = zip(sums, self._head, strict=True)
        return HeadTensors(
            *(None if x is None or like is None else x.to(like.dtype) for x, like in pairs)
        )


def entry_bytes(head: HeadTensors[Tensor], plan: HeadPlan) -> int:
    """Return the bytes of one entry's gathered rows."""
    pairs = zip(head.factors(), plan.operand_dtypes(head), strict=True)
    return sum(
        matrix.shape[1] * sum(x.itemsize for x in _stages(matrix.dtype, dtype, plan.accumulator))
        for (_, matrix), dtype in pairs
    )


def _stages(*dtypes: torch.dtype) -> list[torch.dtype]:
    # of a gathered row: as stored, as an operand, as one of fp32 products
    return [x for i, x in enumerate(dtypes) if i == 0 or x != dtypes[i - 1]]


class _Gathered:
    """The rows of a factor's matrix (V, K) for kept ids, in memory that every block uses again."""

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, accumulator: torch.dtype, entries: int
    ) -> None:
        self._entries, self._matrix, self._dtypes = entries, matrix.detach(), (dtype, accumulator)
        stages = _stages(matrix.dtype, *self._dtypes)
        self._stages = [matrix.new_empty(entries, matrix.shape[1], dtype=x) for x in stages]

    def operand(self, x: Tensor) -> Tensor:
        """Return rows of the other factor as an operand of the products."""
        dtype, accumulator = self._dtypes
        return x.to(dtype).to(accumulator)

    def of(self, kept: Tensor) -> Tensor:
        """Gather (r, w) ids -> (r, w, K); valid until the next call."""
        n = kept.numel()
        torch.index_select(self._matrix, 0, kept.reshape(-1), out=self._stages[0][:n])
        for x, y in itertools.pairwise(self._stages):
            y[:n].copy_(x[:n])
        return self._stages[-1][:n].view(*kept.shape, self._matrix.shape[1])

    def outer(self, d_raw: Tensor, x: Tensor) -> Tensor:
        """(r, w) and (r, K) -> (r w, K): d matrix of each entry; valid until the next call."""
        out = self._stages[-1][: d_raw.numel()]
        torch.bmm(d_raw[:, :, None], x[:, None, :], out=out.view(*d_raw.shape, out.shape[1]))
        return out

    def pieces(self, rows: int, width: int) -> list[slice]:
        """Return slices of a block's columns that fit; several only if one row is too long."""
        step = max(1, self._entries // max(1, rows))
        return [slice(start, min(start + step, width)) for start in range(0, width, step)]
