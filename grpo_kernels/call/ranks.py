"""Agreement of a group's ranks on a loss: the same call on each, or parts of the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_kernels.base.agreement import Agreement, described
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.batch.sequence_shard import SequenceShard
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.config import LossConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def describe_options(
    ranks: Agreement,
    config: LossConfig,
    objective: Callable[..., Any] | None,
    num_items_in_batch: float | Tensor | None,
    asked: Mapping[str, Any],
) -> None:
    """Say the options of a loss; `asked` are how it is to be computed."""
    ranks.same({**asked, **{x.name: getattr(config, x.name) for x in fields(config)}, "objective": _named(objective)})
    if isinstance(num_items_in_batch, Tensor):
        ranks.same({"num_items_in_batch": "a tensor"})
        ranks.same_values({"num_items_in_batch, the tensor": num_items_in_batch.detach().reshape(1)})
    else:
        ranks.same({"num_items_in_batch": None if num_items_in_batch is None else float(num_items_in_batch)})


def describe_tokens(ranks: Agreement, tokens: Tokens, inputs: Mapping[str, Tensor | None]) -> None:
    """Say the per-token inputs of ranks that all have the same: `inputs` as they came, `tokens` what counts of them."""
    ranks.same({f"dtype and shape of {name}": described(x) for name, x in inputs.items()})
    ranks.same_bits("completion_mask", tokens.layout.positions)
    ranks.same_bits("cu_seqlens", tokens.layout.sequence)
    ranks.same_bits("completion_ids", tokens.ids)
    ranks.same_values({name: getattr(tokens, name) for name in inputs if name != "hidden"})


def check_sequence_group(sequence_group: ProcessGroup | None, cu_seqlens: Any, objective: Any) -> None:
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


def sharded(tokens: Tokens, group: ProcessGroup) -> Tokens:
    """`tokens` of this rank as a part of the sequences that the ranks of `group` share. A collective."""
    import torch.distributed as dist

    layout, counts = tokens.layout, tokens.layout.lengths
    counts = gather_stacked(counts, group) if layout.batch > 0 else counts.new_zeros(dist.get_world_size(group), 0)
    return replace(tokens, layout=replace(layout, shard=SequenceShard(group, dist.get_rank(group), counts)))


def _named(objective: Callable[..., Any] | None) -> str | None:
    """The function's name; of a dataclass its numbers too."""
    if objective is None:
        return None
    name: str = getattr(objective, "__qualname__", type(objective).__qualname__)
    if not is_dataclass(objective):
        return name
    values = {x.name: getattr(objective, x.name) for x in fields(objective)}
    return f"{name}({', '.join(f'{k}={x}' for k, x in values.items() if isinstance(x, (int, float)))})"
