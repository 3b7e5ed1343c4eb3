"""Values that the ranks of a divided head compare before a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from grpo_kernels.base.agreement import described
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.config import LossConfig


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
