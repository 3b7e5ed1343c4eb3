"""Sequences whose tokens are split over the ranks of a process group (context parallel, Ulysses).

Every rank has a part of every one of the B sequences. What looks at a whole sequence, or at all tokens, goes through a
`Span`: it gathers the ranks' numbers and adds them up in the order of the ranks, so that all ranks get the same bits,
the same in every run. Which collectives there are, and in which order, depends on nothing that a rank may have alone:
not on how many tokens it has, nor on its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.distributed import agree, gather_stacked, gather_uneven

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from grpo_kernels.batch import Tokens
    from grpo_kernels.config import LossConfig


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


def check_sequence_group(sequence_group: Any, cu_seqlens: Any, objective: Any) -> None:
    """Raise unless `sequence_group` is a process group and goes with the other arguments."""
    if sequence_group is None:
        return
    from torch.distributed import ProcessGroup

    if not isinstance(sequence_group, ProcessGroup):
        raise TypeError(
            "sequence_group: expected a torch.distributed.ProcessGroup that this rank is in, got "
            f"{type(sequence_group).__name__}"
        )
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


def spanned(tokens: Tokens, group: ProcessGroup, config: LossConfig, engine: str, others: tuple[bool, ...]) -> Tokens:
    """`tokens` of this rank as a part of the sequences that the ranks of `group` share. A collective.

    Args:
        engine: the engine asked for.
        others: what else must be alike on all ranks.

    Raises:
        ValueError: on all ranks, if they were given what cannot be one loss.
    """
    import torch.distributed as dist

    layout = tokens.layout
    given = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
    own: dict[str, int | str] = {
        "sequences of completion_ids": layout.batch,
        "config": config.key,
        "engine": str(engine),
        **{f"whether there is {name}": getattr(tokens, name) is not None for name in given},
        "whether importance_sampling_ratio is one a sequence": tokens.sequence_ratio is not None,
        "whether advantages are one a sequence": tokens.advantages_per_sequence,
        "gradients wanted, num_items_in_batch, objective": sum(x << i for i, x in enumerate(others)),
    }
    agree("sequence_group", own, group, layout.positions.device)
    counts = layout.lengths
    counts = gather_stacked(counts, group) if layout.batch > 0 else counts.new_zeros(dist.get_world_size(group), 0)
    return replace(tokens, layout=replace(layout, span=Span(group, dist.get_rank(group), counts)))


def common_engine(engine: str, span: Span | None) -> str:
    """`engine`, or ``"lean"`` if another rank of the span is so short of memory that it takes that. A collective."""
    if span is None:
        return engine
    own = {"lean": engine == "lean"}
    every = agree("sequence_group", own, span.group, span.counts.device, may_differ=("lean",))
    return "lean" if any(every["lean"]) else engine
