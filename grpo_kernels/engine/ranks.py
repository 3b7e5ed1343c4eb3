"""A head whose vocabulary is divided among ranks: joins the statistics of the ranks' columns.

Every rank reduces its part of a row to a few numbers (`RowStats` of its own columns) and gathers
the numbers of all ranks: O(rows) in total, for any vocabulary. With m_r, s_r, E_r a rank's largest
logit, log sum and entropy, and M = max m_r::

    t_r      = m_r - M + s_r                 the rank's share of the sum, as a logarithm
    log_sum  = log sum_r exp(t_r)
    entropy  = sum_r w_r (E_r - log w_r),    w_r = exp(t_r - log_sum), by the chain rule
    logp     = -log(1 + sum_r exp(x_r)),     x_r = m_r + s_r - z_y; on y's rank without y's term

The logarithms leave out the rank with the largest logit, like the largest term in `torch_rows`, so
they lose no digits when a token is nearly certain. All ranks join the same numbers in the same
order, so they get the same bits.

The ranks must make the same call: `Ranks` compares it once, before any work.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.backends import RowBackend, RowStats
from grpo_kernels.base.distributed import all_reduce, gather_stacked, group_device
from grpo_kernels.engine.workspace import Memory
from grpo_kernels.head import Head

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from grpo_kernels.backends import Chunk, LogitTransform


@dataclass(frozen=True)
class Shard:
    """This rank's rows of the head: [start, start + sizes[rank]) of `vocab`."""

    process_group: ProcessGroup
    rank: int
    sizes: tuple[int, ...]  # rows of each rank, in rank order

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def vocab(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        # ranks gather chunk by chunk, so all plan for the widest
        return max(self.sizes)

    def stats(
        self, backend: RowBackend, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]
    ) -> RowStats:
        """Compute `RowBackend.stats` of the whole vocabulary; all ranks call it for the same rows.

        In the chunk's ids, 0 is the id `start`; an id outside [0, V_r) belongs to another rank.
        """
        is_here = (chunk.ids >= 0) & (chunk.ids < self.sizes[self.rank])
        stats = backend.stats(
            replace(chunk, ids=torch.where(is_here, chunk.ids, 0)), entropy=entropy, extras=extras
        )
        return self.joined(stats, chunk.ids, chunk.transform)

    def joined(self, stats: RowStats, ids: Tensor, transform: LogitTransform) -> RowStats:
        """Statistics of the whole vocabulary, from those of this rank's columns.

        Their log-probabilities are unread where the id belongs to another rank.
        """
        max_logit = stats.max_logit
        # a backend makes a row NaN if no logit is finite, but other ranks may have a finite one.
        # With a soft-cap all logits are finite.
        if transform.bias is not None and transform.softcap is None:
            max_logit = max_logit.masked_fill((transform.bias == -torch.inf).all(), -torch.inf)
        columns = [max_logit, stats.log_sum, stats.logps, *stats.extras.values()]
        columns += [] if stats.entropies is None else [stats.entropies]
        gathered = gather_stacked(
            torch.stack([x.to(stats.logps.dtype) for x in columns]), self.process_group
        )
        parts = gathered.unbind(1)  # (R, n) each
        starts = [sum(self.sizes[:rank]) - self.start for rank in range(len(self.sizes))]
        here = torch.stack(  # (R, n): the rank that has the id
            [(ids >= x) & (ids < x + size) for x, size in zip(starts, self.sizes, strict=True)]
        )
        maxima, log_sum, logps = parts[:3]
        nothing = maxima == -torch.inf  # a bias of -inf bans all ids of the rank: its sum is 0
        log_sum, logps = (x.masked_fill(nothing, 0.0) for x in (log_sum, logps))
        max_logit, rank = maxima.max(dim=0, keepdim=True)  # the first of equal logits
        has_max = torch.zeros_like(maxima, dtype=torch.bool).scatter_(0, rank, True)
        share = maxima - max_logit + log_sum
        rest = torch.exp(share).masked_fill(has_max, 0.0).sum(dim=0)
        sum_at_max = log_sum.masked_fill(~has_max, 0.0).sum(dim=0)
        whole_sum = torch.log1p(torch.expm1(sum_at_max) + rest)
        log_weights = share - whole_sum
        weights = torch.exp(log_weights)

        def weighted(x: Tensor) -> Tensor:  # x may be infinite if the weight is 0
            return torch.where(weights == 0, 0.0, weights * x).sum(dim=0)

        def at_target(x: Tensor) -> Tensor:
            return x.masked_fill(~here, 0.0).sum(dim=0)

        # log of a rank's sum divided by the target's term; on the target's rank the sum leaves out
        # that term, so the quotient is exp(-logp) - 1
        excess = torch.where(
            here, torch.log(-torch.expm1(logps)), (maxima - at_target(maxima)) + log_sum
        )
        excess = excess - torch.where(here, 0.0, at_target(log_sum)) - at_target(logps)
        # the difference adds 0, or NaN if no logit is finite or one is +inf
        margin = (
            torch.logsumexp(excess.masked_fill(nothing, -torch.inf), dim=0)
            + (max_logit - max_logit)[0]
        )
        # in a rank whose ids are all banned, a backend's statistics may be NaN
        pairs = zip(stats.extras, parts[3:], strict=False)
        extras = {name: x.masked_fill(nothing, -torch.inf) for name, x in pairs}
        whole: dict[str, Tensor] = {}
        if "log_sum_sq_probs" in extras:
            squares = 2 * log_weights + extras["log_sum_sq_probs"]
            whole["log_sum_sq_probs"] = torch.logsumexp(squares, dim=0)
        if "mean_logits" in extras:
            totals = [
                mean * size for mean, size in zip(extras["mean_logits"], self.sizes, strict=True)
            ]
            whole["mean_logits"] = torch.stack(totals).sum(dim=0) / self.vocab
        if "is_top1" in extras:
            is_top1 = extras["is_top1"].masked_fill(~has_max | nothing, 0.0)
            whole["is_top1"] = at_target(is_top1) != 0
        assert whole.keys() == extras.keys(), "each statistic is joined above"
        return RowStats(
            logps=-torch.logaddexp(torch.zeros_like(margin), margin),
            max_logit=max_logit[0],
            log_sum=whole_sum,
            entropies=None
            if stats.entropies is None
            else weighted(parts[-1].masked_fill(nothing, 0.0) - log_weights),
            extras=whole,
        )

    def sum_(self, x: Tensor) -> Tensor:
        """Sum `x`, the gradient of a tensor that every rank has, over the ranks in place."""
        return all_reduce(x, "sum", self.process_group)


MOST_VALUES = 96  # most values that ranks compare


class Ranks:
    """The ranks of a sharded head while they plan a call together."""

    def __init__(self, call: str, group: ProcessGroup, arguments: Mapping[str, Any]) -> None:
        self.call, self.group, self.arguments, self.compared = call, group, arguments, False

    def exchange(self, *numbers: int) -> list[list[int]]:
        """Send integers; return the integers of all ranks, position by position."""
        sent = torch.tensor([*numbers, *[0] * (MOST_VALUES + 2 - len(numbers))])
        sent = sent.to(group_device(self.group))
        return [list(column) for column in gather_stacked(sent, self.group).T.tolist()]

    def agree(self, values: Mapping[str, Any], head: Head, memory: Memory) -> tuple[Shard, Memory]:
        """Compare the call's arguments and `values` (tensors by dtype and shape) between ranks.

        Returns this rank's shard, and the memory that all ranks have.

        Raises:
            ValueError: on all ranks, if one of them refuses its call or the calls differ.
        """
        rank_values = {"rows of weight": head.weight.shape[0], **memory._asdict()}
        call_values = {**self.arguments, **values}
        if "config" in call_values:  # a loss is compared by its fields
            call_values |= vars(call_values.pop("config"))
        numbers = [_checksum(x) for x in call_values.values()]
        call = _checksum((self.call, *call_values))
        self.compared = True
        refused, calls, *columns = self.exchange(0, call, *numbers, *rank_values.values())
        if any(refused):
            raise ValueError(
                f"process_group: rank {refused.index(1)} refuses the call of {self.call}"
            )
        names = (*call_values, *rank_values)
        by_rank = dict(zip(names, columns, strict=False))  # a number of each rank, by name
        differ = [name for name in call_values if len({*by_rank[name]}) > 1]
        if len({*calls}) > 1 or differ:
            what = f"{', '.join(differ)} of {self.call}"
            what = what if len({*calls}) == 1 else f"call, {self.call} here,"
            raise ValueError(f"process_group: expected the same {what} on every rank")
        sizes = _sizes(head.vocab_size, by_rank["rows of weight"])
        tight, converts = any(by_rank["tight"]), all(by_rank["converts"])
        shard = Shard(self.group, torch.distributed.get_rank(self.group), tuple(sizes))
        return shard, Memory(tight, converts, min(by_rank["workspace"]))


def _sizes(vocab_size: int | None, sizes: list[int]) -> list[int]:
    """The head's rows on each rank, without padding rows."""
    if vocab_size is not None:
        if vocab_size > sum(sizes):
            raise ValueError(
                f"head.vocab_size: expected at most the {sum(sizes)} rows of all shards, got "
                f"{vocab_size}"
            )
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pairs = zip(sizes, starts, strict=True)
        sizes = [min(size, max(0, vocab_size - start)) for size, start in pairs]
    if min(sizes) == 0:
        raise ValueError(
            f"head.weight: expected at least one row of the vocabulary on every rank, got {sizes}"
        )
    return sizes


def _checksum(x: Any) -> int:
    return zlib.crc32(repr(_comparable(x)).encode())


def _comparable(x: Any) -> Any:
    if isinstance(x, Tensor):
        return str(x.dtype), *x.shape
    if is_dataclass(x):
        x = [getattr(x, field.name) for field in fields(x)]
    if isinstance(x, (list, tuple)):
        return [_comparable(y) for y in x]
    if isinstance(x, Real):
        return float(x)  # 1 and 1.0 are the same
    plain = x is None or isinstance(x, (str, torch.dtype))
    return x if plain else getattr(x, "__qualname__", type(x).__qualname__)
