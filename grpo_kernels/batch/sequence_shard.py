"""Sequences whose tokens are split over the ranks of a process group (context parallel, Ulysses).

Every rank has a part of every one of the B sequences. What looks at a whole sequence, or at all tokens, goes through a
`SequenceShard`: it gathers the ranks' numbers and adds them up in the order of the ranks, so that all ranks get the
same bits, the same in every run. Which collectives there are, and in which order, depends on nothing that a rank may
have alone: not on how many tokens it has, nor on its memory.
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
    """The ranks that have the tokens of each sequence. Where a method says so, all of them have to call it."""

    group: ProcessGroup
    rank: int
    counts: Tensor  # (R, B) int64: the counted tokens of each sequence on each rank

    @cached_property
    def sizes(self) -> list[int]:
        """The counted tokens of each rank. On a GPU this waits for the device."""
        found: list[int] = self.counts.sum(dim=1).tolist()
        return found

    @cached_property
    def speaks_for(self) -> Tensor:
        """(B,) bool: the sequences that this rank reports on: the first that has a token of it, or rank 0."""
        has = self.counts > 0
        first = has.to(torch.uint8).argmax(dim=0)  # of equal ones the first, so 0 if none has
        return first == self.rank

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, of one shape on all. A collective."""
        return gather_stacked(x, self.group).sum(dim=0) if x.numel() > 0 else x

    def rows(self, x: Tensor) -> Tensor:
        """(n,), one for each token of this rank -> those of all ranks, in their order. A collective."""
        return gather_uneven(x, self.sizes, self.group)
