"""A head whose vocabulary is divided among ranks: statistics of their columns, joined to all.

Every rank reduces its part of a row to a few numbers (`RowStats` of its own columns), and gathers
those of all ranks: O(rows) numbers, whatever the vocabulary. With m_r, s_r, E_r a rank's largest
logit, log sum and entropy, M = max m_r::

    t_r      = m_r - M + s_r                 the rank's share of the sum, as a logarithm
    log_sum  = log sum_r exp(t_r)
    entropy  = sum_r w_r (E_r - log w_r),    w_r = exp(t_r - log_sum), by the chain rule
    logp     = -log(1 + sum_r exp(x_r)),     x_r = m_r + s_r - z_y; on y's rank without y's term

The rank with the largest logit is left out of the logarithms, like the largest term in
`torch_rows`, so that nothing cancels when a token is nearly certain. All ranks join the same
numbers in the same order, and get the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowBackend, RowStats
from grpo_kernels.base.distributed import all_reduce, gather_stacked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from grpo_kernels.backends.interface import Chunk, LogitTransform


def widest_part(weight: Tensor, shard: Shard | None) -> Tensor:
    """Return a tensor in the shape of the largest part of the head, perhaps without data.

    Plans made by its size are the same on all ranks.
    """
    if shard is None or shard.widest == weight.shape[0]:
        return weight
    return weight.new_empty(()).expand(shard.widest, weight.shape[1])


@dataclass(frozen=True)
class Shard:
    """The rows of the head that this rank has: [start, start + sizes[rank]) of `vocab`."""

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
        """Return `RowBackend.stats` of the whole vocabulary. All ranks call it for the same rows.

        Ids of the chunk (n, V_r) are counted from `start`, outside [0, V_r) if another rank's.
        """
        stats = backend.stats(
            replace(chunk, ids=self.local_ids(chunk.ids)), entropy=entropy, extras=extras
        )
        return self.joined(stats, chunk.ids, chunk.transform)

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return `ids`, with 0 for those that other ranks have."""
        return torch.where((ids >= 0) & (ids < self.sizes[self.rank]), ids, 0)

    def joined(self, stats: RowStats, ids: Tensor, transform: LogitTransform) -> RowStats:
        """Return the statistics of the whole vocabulary, from those of this rank's columns for its
        `local_ids`."""
        extras, max_logit = tuple(stats.extras), stats.max_logit
        # a backend makes a row without a finite logit NaN; here other ranks may have one. A
        # soft-cap makes all finite
        if transform.bias is not None and transform.softcap is None:
            max_logit = max_logit.masked_fill((transform.bias == -torch.inf).all(), -torch.inf)
        columns = [max_logit, stats.log_sum, stats.logps, *stats.extras.values()]
        columns += [] if stats.entropies is None else [stats.entropies]
        parts = gather_stacked(
            torch.stack([x.to(stats.logps.dtype) for x in columns]), self.process_group
        )
        first = [sum(self.sizes[:rank]) - self.start for rank in range(len(self.sizes))]
        here = torch.stack(
            [(ids >= x) & (ids < x + size) for x, size in zip(first, self.sizes, strict=True)]
        )
        return self._join(parts.unbind(1), here, extras, entropy=stats.entropies is not None)

    def _join(
        self, parts: tuple[Tensor, ...], here: Tensor, extras: tuple[str, ...], *, entropy: bool
    ) -> RowStats:
        """Join the numbers of all ranks, (R, n) each, to statistics (n,); `here` (R, n) marks the
        rank with the id."""
        most, log_sum, logps = parts[:3]
        nothing = most == -torch.inf  # all tokens of the rank are banned: its sum is 0
        log_sum, logps = (x.masked_fill(nothing, 0.0) for x in (log_sum, logps))
        max_logit, top = most.max(dim=0, keepdim=True)  # the first of equal ones
        top = torch.zeros_like(most, dtype=torch.bool).scatter_(0, top, True)
        share = most - max_logit + log_sum
        rest = torch.exp(share).masked_fill(top, 0.0).sum(dim=0)
        top_sum = log_sum.masked_fill(~top, 0.0).sum(dim=0)
        joined = torch.log1p(torch.expm1(top_sum) + rest)
        log_weights = share - joined
        weights = torch.exp(log_weights)

        def weighted(x: Tensor) -> Tensor:  # where the weight is 0, x may be infinite
            return torch.where(weights == 0, 0.0, weights * x).sum(dim=0)

        def at_target(x: Tensor) -> Tensor:
            return x.masked_fill(~here, 0.0).sum(dim=0)

        # log of a rank's sum over the target's term; on the target's rank the sum of the others:
        # exp(-logp) - 1
        excess = torch.where(
            here, torch.log(-torch.expm1(logps)), (most - at_target(most)) + log_sum
        )
        excess = excess - torch.where(here, 0.0, at_target(log_sum)) - at_target(logps)
        # the difference adds 0, or NaN if no logit is finite or one is +inf
        margin = (
            torch.logsumexp(excess.masked_fill(nothing, -torch.inf), dim=0)
            + (max_logit - max_logit)[0]
        )
        more = dict(zip(extras, parts[3:], strict=False))
        joined_extras: dict[str, Tensor] = {}
        if "log_sum_sq_probs" in more:
            joined_extras["log_sum_sq_probs"] = torch.logsumexp(
                2 * log_weights + more["log_sum_sq_probs"], dim=0
            )
        if "mean_logits" in more:
            totals = [
                mean * size for mean, size in zip(more["mean_logits"], self.sizes, strict=True)
            ]
            joined_extras["mean_logits"] = torch.stack(totals).sum(dim=0) / self.vocab
        if "is_top1" in more:
            joined_extras["is_top1"] = at_target(more["is_top1"] * top) != 0
        return RowStats(
            logps=-torch.logaddexp(torch.zeros_like(margin), margin),
            max_logit=max_logit[0],
            log_sum=joined,
            entropies=weighted(parts[-1].masked_fill(nothing, 0.0) - log_weights)
            if entropy
            else None,
            extras=joined_extras,
        )

    def sum_(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place: the gradient of a tensor that every rank has."""
        return all_reduce(x, "sum", self.process_group)
