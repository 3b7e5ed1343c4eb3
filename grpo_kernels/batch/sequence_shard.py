"""Sequences whose tokens are split over the ranks of a process group (context parallel, Ulysses).

Every rank has a part of each of the B sequences. Sums over whole sequences, or over all tokens, go through a
`SequenceShard`: it gathers the ranks' numbers and adds them up in the order of the ranks, so that all ranks get the
same bits, and every run does. All ranks call the same collectives in the same order, whatever number of tokens or
amount of memory each has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.base.distributed import gather_stacked, gather_uneven

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SequenceShard:
    """The ranks that have the tokens of each sequence. All of them must call a method that is a collective."""

    group: ProcessGroup
    rank: int
    counts: Tensor  # (R, B) int64: the counted tokens of each sequence on each rank

    @cached_property
    def sizes(self) -> list[int]:
        """The counted tokens of each rank. On a GPU this waits for the device."""
        sizes: list[int] = self.counts.sum(dim=1).tolist()
        return sizes

    @cached_property
    def reports_on(self) -> Tensor:
        """(B,) bool: sequences that this rank reports on. The first rank with a token does; rank 0 if none has."""
        has = self.counts > 0
        first = has.to(torch.uint8).argmax(
            dim=0
        )  # the first of equal values: rank 0 if no rank has a token
        return first == self.rank

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x`, of one shape on all ranks, over the ranks. A collective."""
        return gather_stacked(x, self.group).sum(dim=0) if x.numel() > 0 else x

    def rows(self, x: Tensor) -> Tensor:
        """Gather `x` (n,), one number for each token of this rank, from all ranks in their order. A collective."""
        return gather_uneven(x, self.sizes, self.group)
