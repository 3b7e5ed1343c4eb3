"""A call over kept sets: counts of its sets' ids, and the plan of the work.

Positions without a set, and entropies over the whole vocabulary, are an ordinary request beside it.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.checks import HIGHEST_LOGP, check_choice
from grpo_kernels.base.choices import WithoutSet, choices
from grpo_kernels.base.tensors import take
from grpo_kernels.batch.kept_ids import KeptIds, read_kept_ids
from grpo_kernels.call.expected import Expected, read_expected
from grpo_kernels.call.plan import Call
from grpo_kernels.call.results import Scores
from grpo_kernels.call.rows import request_of, scored
from grpo_kernels.engine.kept_sets import KeptSetLogprob, KeptSets, Span, entry_bytes
from grpo_kernels.engine.passes import scatter
from grpo_kernels.engine.plan import HeadPlan
from grpo_kernels.engine.records import Operands

WORKSPACE_BYTES = 64 * 2**20  # by default: a larger workspace is no faster
# per kept id, besides its row of the head, while sets are counted, sorted and reduced
ENTRY_BYTES = 64
KeptMetrics = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), 0-d each


@dataclass(frozen=True, eq=False)
class Kept:
    """The sets that a call scores over.

    Attributes:
        sets: int64 bounds and ids.
        ids, ids_name: the ids to score, (...), and the name of that argument.
        entropy: True: over the sets; "full": over the whole vocabulary; False: none.
        others: other policies' log-probabilities, (...) each.
    """

    sets: KeptIds
    without_set: WithoutSet
    ids: Tensor
    ids_name: str = "ids"
    entropy: bool | str = True
    others: Mapping[str, Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(kept_ids: Any, without_set: Any, ids: Tensor, **options: Any) -> Kept:
        """Read the argument `kept_ids` of checked `ids`."""
        check_choice("without_set", without_set, choices(WithoutSet))
        entropy = options.get("entropy", True)
        if not isinstance(entropy, bool) and entropy != "full":
            raise ValueError(f"entropy: expected True, False or 'full', got {entropy!r}")
        return Kept(read_kept_ids(kept_ids, ids), without_set, ids, **options)


def score_kept(call: Call, kept: Kept, expected: Expected | None) -> tuple[Scores, KeptMetrics]:
    """Score a call's rows over their sets, rows without a set over the whole vocabulary.

    Args:
        call: planned for the torch backend.
        expected: the expected gradient where there is no set.

    Returns:
        The scores, and the metrics of the sets.
    """
    rows, budget = call.rows, call.run.workspace_bytes
    plan = replace(call.plan, workspace_bytes=WORKSPACE_BYTES if budget is None else budget)
    survey = _survey(call, kept, plan)
    operands = call.head.operands(rows.positions)
    sets, any_without = _plan_sets(call, kept, plan, survey, operands)
    in_full, whole = kept.entropy == "full", None
    if any_without or in_full:
        whole_rows = rows if in_full else take(rows, survey.without.nonzero()[:, 0])
        gradient = read_expected(
            expected, kept.ids, whole_rows.positions, plan.accumulator, entropy=bool(kept.entropy)
        )
        served = call.with_backend()
        whole_rows = served.check_range(kept.ids_name, whole_rows)
        whole = request_of(served, whole_rows, gradient, entropy=bool(kept.entropy))
    shape = call.head.hidden.shape[:-1]
    logps, entropies = KeptSetLogprob.apply(sets, *operands)
    logps, entropies = logps.view(shape), None if entropies is None else entropies.view(shape)
    if whole is not None:
        without = scatter(survey.without, rows, shape.numel()).view(shape)
        full = scored(call, whole)
        logps = torch.where(without, full.logps, logps)
        if kept.entropy:
            entropies = (
                full.entropies
                if entropies is None
                else torch.where(without, full.entropies, entropies)
            )
    return Scores.of(logps=logps, entropies=entropies), survey.metrics(plan.accumulator)


class Survey(NamedTuple):
    """Counts of ids in the sets of n rows, and the rows to treat apart, (n,) each."""

    sizes: Tensor  # ids in the set, repetitions included
    local: Tensor  # ids among this rank's rows of the head
    without: Tensor  # bool: scored over the whole vocabulary
    invalid: Tensor | None  # bool: results are NaN; None: none are

    def metrics(self, dtype: torch.dtype) -> KeptMetrics:
        """Return the sets' mean size and the share of positions without one, as (sum, count)."""
        without, has_set = self.without.to(dtype), (~self.without).to(dtype)
        return {
            "kept/size": ((has_set * self.sizes).sum(), has_set.sum()),
            "kept/without_set": (without.sum(), torch.ones_like(without).sum()),
        }


def _survey(call: Call, kept: Kept, plan: HeadPlan) -> Survey:
    """Count the kept ids of all positions, a workspace at a time. Waits for no device but a CPU."""
    sets, rows, rows_here = kept.sets, call.rows, call.head.weight.shape[0]
    (vocab, first), sampled = call.ids_here, kept.ids.detach().reshape(-1)
    # per position: ids, ids among this rank's rows, ids that do not exist, the sampled one
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
    invalid = (outside > 0) if kept.without_set == "full" else (outside > 0) | missing
    if invalid.device.type != "cpu":
        without = missing & ~invalid
        return Survey(sizes, local, without, invalid)
    if bool(invalid.any()):
        i = int(invalid.nonzero()[0])
        raise ValueError(_wrong(kept, rows.positions[i], int(sizes[i]), int(outside[i]), vocab))
    _check_others(kept, rows.positions[(sizes == 1) & ~missing])
    return Survey(sizes, local, missing, None)


def _check_others(kept: Kept, alone: Tensor) -> None:
    """Raise unless other policies' log-probabilities are 0 at positions whose set is one id.

    Otherwise they were computed over other sets.
    """
    for name, x in kept.others.items():
        logps = None if x is None else x.detach().reshape(-1)[alone]
        if logps is not None and bool((logps.abs() > HIGHEST_LOGP).any()):
            raise ValueError(
                f"{name}: expected log-probabilities over the same kept sets, so 0 where a set is "
                f"one id, got {logps[logps.abs() > HIGHEST_LOGP][0].item():.4g}: make them with "
                "kept_ids, too"
            )


def _wrong(kept: Kept, position: Tensor, size: int, outside: int, vocab: int) -> str:
    """Return the message about a wrong set at a position."""
    sets, at = kept.sets, tuple(int(x) for x in torch.unravel_index(position, kept.ids.shape))
    if outside:
        entries = sets.ids[int(sets.offsets[position]) : int(sets.offsets[position + 1])]
        bad = entries[(entries < -1) | (entries >= vocab)][0].item()
        return f"kept_ids: expected ids in [0, V) = [0, {vocab}) or -1, got {bad} at position {at}"
    way_out = "; without_set='full' scores such positions over the whole vocabulary"
    if size == 0:
        return f"kept_ids: expected a set where the mask counts, got none at position {at}{way_out}"
    got = kept.ids.reshape(-1)[position].item()
    return (
        f"{kept.ids_name}: expected an id of the position's kept set, got {got} at position {at}"
        f"{way_out}"
    )


def _plan_sets(
    call: Call, kept: Kept, plan: HeadPlan, survey: Survey, operands: Operands
) -> tuple[KeptSets, bool]:
    """Plan the work; also return True if a position has no set. Waits for the sets' sizes."""
    rows, sets, (_, first_id) = call.rows, kept.sets, call.ids_here
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
        needs_grad=call.needs_grad,
        entropy=kept.entropy is True,
        gathered_weight=call.run.gather or nullcontext,
    )
    return kept_sets, any(without)


def plan_spans(
    sizes: list[int], longest: list[int], budget: int, head_bytes: int, row_bytes: int
) -> list[Span]:
    """Return spans of rows that fit the budget, each set at least half as long as the longest.

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
        spans.append((slice(start, stop), width, max(longest[start:stop])))
        start = stop
    return spans
