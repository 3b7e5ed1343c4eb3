"""Sequences whose tokens are split over the ranks of a process group (context parallel, Ulysses).

Every rank has a part of every one of the B sequences. What looks at a whole sequence, or at all tokens, goes through a
`Span`: it gathers the ranks' numbers and adds them up in the order of the ranks, so that all ranks get the same bits,
the same in every run. Which collectives there are, and in which order, depends on nothing that a rank may have alone:
not on how many tokens it has, nor on its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.agreement import Agreement, described
from grpo_kernels.distributed import gather_stacked, gather_uneven

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from grpo_kernels.batch import Tokens


@dataclass(frozen=True)
class Span:
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


def check_span(sequence_group: ProcessGroup | None, cu_seqlens: Any, objective: Any) -> None:
    """Raise unless the other arguments go with a `sequence_group`."""
    if sequence_group is None:
        return
    if cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens: expected None with a sequence_group, whose ranks hold (B, T_local) parts of sequences, got "
            f"{type(cu_seqlens).__name__}"
        )
    if objective is not None and not getattr(objective, "token_level", False):
        raise ValueError(
            "objective: expected a token_level function with a sequence_group, whose ranks hold parts of sequences, "
            "got one that may look at whole sequences"
        )


def describe_part(parts: Agreement, tokens: Tokens, inputs: Mapping[str, Tensor | None]) -> None:
    """Say what must be alike on ranks that hold parts of the same sequences; `inputs` as they came."""
    parts.same({"sequences of completion_ids": tokens.layout.batch})
    parts.same({f"dtype and shape of {name}": described(x, own=(1,)) for name, x in inputs.items()})
    whole = {
        "advantages": inputs["advantages"] if tokens.advantages_per_sequence else None,
        "importance_sampling_ratio": tokens.sequence_ratio,
    }
    for name, x in whole.items():
        parts.same_values({name: None if x is None else x.detach().reshape(-1)})


def spanned(tokens: Tokens, group: ProcessGroup) -> Tokens:
    """`tokens` of this rank as a part of the sequences that the ranks of `group` share. A collective."""
    import torch.distributed as dist

    layout, counts = tokens.layout, tokens.layout.lengths
    counts = gather_stacked(counts, group) if layout.batch > 0 else counts.new_zeros(dist.get_world_size(group), 0)
    return replace(tokens, layout=replace(layout, span=Span(group, dist.get_rank(group), counts)))
