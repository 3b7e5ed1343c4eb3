"""A call over kept sets: its arguments, counts of its sets' ids, and the plan of the work.

Positions without a set, and entropies over the whole vocabulary, are an ordinary request beside it.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.checks import HIGHEST_LOGP
from grpo_kernels.base.choices import WithoutSet, choices
from grpo_kernels.base.records import take
from grpo_kernels.batch.kept_ids import KeptIds, read_kept_ids
from grpo_kernels.call.expected import Expected, read_expected
from grpo_kernels.call.output import Scores
from grpo_kernels.call.plan import check_call
from grpo_kernels.call.planned_head import PlannedHead
from grpo_kernels.call.run import Execution, check_run
from grpo_kernels.call.scores import ScoreCall, scored
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.passes import scatter
from grpo_kernels.engine.records import Operands, Rows
from grpo_kernels.engine.request import Request
from grpo_kernels.engine.special.gathered import entry_bytes
from grpo_kernels.engine.special.kept_sets import KeptSetLogprob, KeptSets, Span
from grpo_kernels.head.lm_head import LMHead

WORKSPACE_BYTES = 64 * 2**20  # by default: a larger workspace is no faster
ENTRY_BYTES = (
    64  # per kept id, besides its row of the head, while sets are counted, sorted and reduced
)


@dataclass(frozen=True, eq=False)
class KeptCall(ScoreCall):
    """The ids to score, (...), and the sets to score them over.

    `expected` is the gradient of the positions that are scored over the whole vocabulary.
    """

    ids: Tensor
    kept_ids: Tensor | KeptIds = field(kw_only=True)
    without_set: WithoutSet = field(kw_only=True)
    entropy_over: bool | str = field(
        kw_only=True
    )  # True: the sets, "full": the whole vocabulary, False: no entropy
    others: Mapping[str, Tensor | None] = field(
        default_factory=dict
    )  # other policies' log-probabilities, (...) each

    function = "linear_logprob with kept_ids"
    backend = "torch"

    @property
    def entropy(self) -> bool:
        """True if the call computes an entropy."""
        return bool(self.entropy_over)

    @cached_property
    def sets(self) -> KeptIds:
        """The sets, as int64 bounds and ids."""
        return read_kept_ids(self.kept_ids, self.ids)

    def check(self, head: LMHead, execution: Execution) -> LMHead:
        """Raise unless ids, sets and options fit the head; return it as it is."""
        super().check(head, execution)
        self.check_sets(execution)
        return head

    def check_sets(self, execution: Execution) -> None:
        """Raise unless the sets fit the ids and the options have valid values."""
        if self.without_set not in choices(WithoutSet):
            raise ValueError(
                f"without_set: expected one of {', '.join(choices(WithoutSet))}, got {self.without_set!r}"
            )
        if not isinstance(self.entropy_over, bool) and self.entropy_over != "full":
            raise ValueError(f"entropy: expected True, False or 'full', got {self.entropy_over!r}")
        check_run(execution)
        assert self.sets is not None  # raises if they do not fit

    def check_range(self, planned: PlannedHead, rows: Rows) -> Rows:
        """Return the rows as they are: `_survey` checks that their ids are in their sets."""
        return rows


KeptMetrics = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), 0-d each


def score_kept(call: KeptCall, head: LMHead, execution: Execution) -> Scores:
    """Plan the call, count the sets' ids, and score.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    planned, rows, _ = check_call(
        call, head, execution
    )  # it has checked `expected`, which few rows may need
    return scored_kept(call, planned, rows, call.expected)[0]


def scored_kept(
    call: KeptCall, planned: PlannedHead, rows: Rows, expected: Expected | None
) -> tuple[Scores, KeptMetrics]:
    """Score the rows of a checked call over their sets, rows without a set over the whole vocabulary; also return the
    metrics of the sets.

    Args:
        expected: the expected gradient where there is no set.

    Raises:
        ValueError: on a CPU, a set does not exist, or lacks the sampled id.
    """
    budget = planned.execution.workspace_bytes
    plan = replace(planned.plan, workspace_bytes=WORKSPACE_BYTES if budget is None else budget)
    survey = _survey(call, planned.head, plan, rows)
    operands = planned.head.operands(rows.positions)
    sets, any_without = _plan_sets(call, planned, plan, rows, survey, operands)
    in_full, whole = call.entropy_over == "full", None
    if any_without or in_full:
        whole_rows = rows if in_full else take(rows, survey.without.nonzero()[:, 0])
        whole = _plan_whole(call, planned.with_backend(), whole_rows, expected)
    shape = planned.head.hidden.shape[:-1]
    logps, entropies = KeptSetLogprob.apply(sets, *operands)
    logps, entropies = logps.view(shape), None if entropies is None else entropies.view(shape)
    if whole is not None:
        without = scatter(survey.without, rows, shape.numel()).view(shape)
        full = scored(call, planned.head, whole)
        logps = torch.where(without, full.logps, logps)
        if call.entropy:
            entropies = (
                full.entropies
                if entropies is None
                else torch.where(without, full.entropies, entropies)
            )
    return Scores.of(logps=logps, entropies=entropies), survey.metrics(plan.accumulator)


def _plan_whole(
    call: KeptCall, planned: PlannedHead, rows: Rows, expected: Expected | None
) -> Request:
    """Return the request that scores `rows` over the whole vocabulary."""
    dtype = planned.plan.accumulator
    gradient = read_expected(expected, call.ids, rows.positions, dtype, entropy=call.entropy)
    engine = planned.choose_engine(gradient)
    return planned.request(
        planned.check_range(call.ids_name, rows), gradient, engine, entropy=call.entropy
    )


class Survey(NamedTuple):
    """Counts of ids in the sets of n rows, and the rows to treat apart, (n,) each."""

    sizes: Tensor  # ids in the set, repetitions included
    local: Tensor  # ids among this rank's rows of the head
    without: Tensor  # bool: scored over the whole vocabulary
    invalid: Tensor | None  # bool: results are NaN; None: none are

    def metrics(self, dtype: torch.dtype) -> KeptMetrics:
        """Return the mean size of the sets, and the share of positions without one, as (sum, count) in `dtype`."""
        without, has_set = self.without.to(dtype), (~self.without).to(dtype)
        return {
            "kept/size": ((has_set * self.sizes).sum(), has_set.sum()),
            "kept/without_set": (without.sum(), torch.ones_like(without).sum()),
        }


def _survey(call: KeptCall, head: LMHead, plan: HeadPlan, rows: Rows) -> Survey:
    """Count the kept ids of all positions, a workspace at a time. Does not wait for a device other than a CPU.

    Raises:
        ValueError: on a CPU, at a counted position: an id that does not exist, no set, or a sampled id outside of it.
    """
    sets, shard = call.sets, plan.shard
    first, rows_here = (0 if shard is None else shard.start), head.weight.shape[0]
    vocab, sampled = rows_here if shard is None else shard.vocab, call.ids.detach().reshape(-1)
    # per position: ids, ids among this rank's rows, ids that do not exist, ids that are the sampled one
    counts = sets.offsets.new_zeros(4, sampled.shape[0])
    step = max(1, plan.workspace_bytes // ENTRY_BYTES)
    for start in range(0, sets.ids.shape[0], step):
        ids = sets.ids[start : start + step]
        place = torch.arange(start, start + ids.shape[0], device=ids.device)
        owner = torch.searchsorted(sets.offsets, place, right=True) - 1
        exists = (ids >= 0) & (ids < vocab)
        flags = (
            exists,
            exists & (ids >= first) & (ids < first + rows_here),
            (ids < -1) | (ids >= vocab),
        )
        for count, flag in zip(counts, (*flags, exists & (ids == sampled[owner])), strict=True):
            count.index_add_(0, owner, flag.long())
    sizes, local, outside, hits = counts[:, rows.positions]
    missing = hits == 0
    invalid = (outside > 0) if call.without_set == "full" else (outside > 0) | missing
    if invalid.device.type != "cpu":
        without = missing & ~invalid
        return Survey(sizes, local, without, invalid)
    if bool(invalid.any()):
        i = int(invalid.nonzero()[0])
        raise ValueError(_wrong(call, rows.positions[i], int(sizes[i]), int(outside[i]), vocab))
    _check_others(call, rows.positions[(sizes == 1) & ~missing])
    return Survey(sizes, local, missing, None)


def _check_others(call: KeptCall, alone: Tensor) -> None:
    """Raise unless log-probabilities of other policies are 0 at the positions `alone`, whose set is one id.

    Raises:
        ValueError: they are not, so they were computed over other sets.
    """
    for name, x in call.others.items():
        logps = None if x is None else x.detach().reshape(-1)[alone]
        if logps is not None and bool((logps.abs() > HIGHEST_LOGP).any()):
            raise ValueError(
                f"{name}: expected log-probabilities over the same kept sets, so 0 where a set is one id, got "
                f"{logps[logps.abs() > HIGHEST_LOGP][0].item():.4g}: make them with kept_ids, too"
            )


def _wrong(call: KeptCall, position: Tensor, size: int, outside: int, vocab: int) -> str:
    """Return the message about a wrong set at a position."""
    sets, at = call.sets, tuple(int(x) for x in torch.unravel_index(position, call.ids.shape))
    if outside:
        entries = sets.ids[int(sets.offsets[position]) : int(sets.offsets[position + 1])]
        bad = entries[(entries < -1) | (entries >= vocab)][0].item()
        return f"kept_ids: expected ids in [0, V) = [0, {vocab}) or -1, got {bad} at position {at}"
    way_out = "; without_set='full' scores such positions over the whole vocabulary"
    if size == 0:
        return f"kept_ids: expected a set where the mask counts, got none at position {at}{way_out}"
    got = call.ids.reshape(-1)[position].item()
    return f"{call.ids_name}: expected an id of the position's kept set, got {got} at position {at}{way_out}"


def _plan_sets(
    call: KeptCall,
    planned: PlannedHead,
    plan: HeadPlan,
    rows: Rows,
    survey: Survey,
    operands: Operands,
) -> tuple[KeptSets, bool]:
    """Plan the work; also return True if a position has no set. Waits for the device, to read the sets' sizes."""
    sets, first_id = call.sets, 0 if plan.shard is None else plan.shard.start
    projected = (survey.sizes > 1) & ~survey.without
    local, order = torch.where(projected, survey.local, 0).sort(descending=True, stable=True)
    longest = sets.offsets.diff()[rows.positions][order]
    sizes, lists, without = torch.stack([local, longest, survey.without.long()]).tolist()
    count = bisect.bisect_left(sizes, 0, key=operator.neg)
    row_bytes = (
        2 * plan.accumulator.itemsize * sum(matrix.shape[1] for _, matrix in operands.factors())
    )
    head_bytes = entry_bytes(operands, plan)
    kept_sets = KeptSets(
        rows=replace(rows, ids=rows.ids - first_id, invalid=survey.invalid),
        ids=sets.ids,
        offsets=sets.offsets,
        projected=projected,
        order=order[:count],
        spans=plan_spans(sizes[:count], lists[:count], plan.workspace_bytes, head_bytes, row_bytes),
        plan=plan,
        needs_grad=planned.needs_grad,
        entropy=call.entropy_over is True,
        gathered_weight=planned.execution.gather or nullcontext,
    )
    return kept_sets, any(without)


def plan_spans(
    sizes: list[int], longest: list[int], budget: int, head_bytes: int, row_bytes: int
) -> list[Span]:
    """Return spans of rows that fit the budget, each set at least half as long as the largest of its span.

    Padding then costs at most as much as the sets themselves.

    Args:
        sizes: ids of each row's set, falling.
        longest: entries of each row's list, padding included.
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
        spans.append(Span(slice(start, stop), width, max(longest[start:stop])))
        start = stop
    return spans
