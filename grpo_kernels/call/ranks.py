"""Values that the ranks of a group compare before a loss: of the same call, or of parts of the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_kernels.base.agreement import described
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.batch.sequence_shard import SequenceShard
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.config import LossConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def options_of_loss(
    config: LossConfig,
    objective: Callable[..., Any] | None,
    num_items_in_batch: float | Tensor | None,
) -> dict[str, Any]:
    """Return the options of a loss by name."""
    options = {
        **{x.name: getattr(config, x.name) for x in fields(config)},
        "objective": _named(objective),
    }
    count, name = num_items_in_batch, "num_items_in_batch"
    if isinstance(count, Tensor):
        return {**options, name: "a tensor", f"{name}, the tensor": count.double()}
    return {**options, name: None if count is None else float(count)}


def tokens_of_loss(tokens: Tokens, inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the values that ranks with the same inputs compare, from the raw `inputs` and the counted `tokens`."""
    return {
        **{f"dtype and shape of {name}": described(x) for name, x in inputs.items()},
        "completion_mask": tokens.layout.positions,
        "cu_seqlens": tokens.layout.sequence,
        "completion_ids": tokens.ids,
        **{
            name: getattr(tokens, name)
            for name, x in inputs.items()
            if name != "hidden" and x is not None
        },
    }


def check_sequence_group(
    sequence_group: ProcessGroup | None, cu_seqlens: Any, objective: Any
) -> None:
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


def part_of_loss(tokens: Tokens, inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the values that ranks with parts of the same sequences compare, from the raw `inputs` and the `tokens`."""
    whole = {
        "advantages": inputs["advantages"] if tokens.advantages_per_sequence else None,
        "importance_sampling_ratio": tokens.sequence_ratio,
    }
    return {
        "sequences of completion_ids": tokens.layout.batch,
        **{f"dtype and shape of {name}": described(x, varying=(1,)) for name, x in inputs.items()},
        **{name: x for name, x in whole.items() if x is not None},
    }


def sharded(tokens: Tokens, group: ProcessGroup) -> Tokens:
    """Return this rank's `tokens` as a part of the sequences that the ranks of `group` share. A collective."""
    import torch.distributed as dist

    layout, counts = tokens.layout, tokens.layout.lengths
    counts = (
        gather_stacked(counts, group)
        if layout.batch > 0
        else counts.new_zeros(dist.get_world_size(group), 0)
    )
    return replace(
        tokens, layout=replace(layout, shard=SequenceShard(group, dist.get_rank(group), counts))
    )


def _named(objective: Callable[..., Any] | None) -> str | None:
    """Return the function's name; for a dataclass with its numeric fields."""
    if objective is None:
        return None
    name: str = getattr(objective, "__qualname__", type(objective).__qualname__)
    if not is_dataclass(objective):
        return name
    values = {x.name: getattr(objective, x.name) for x in fields(objective)}
    return (
        f"{name}({', '.join(f'{k}={x}' for k, x in values.items() if isinstance(x, (int, float)))})"
    )
