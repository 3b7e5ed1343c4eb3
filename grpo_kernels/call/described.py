"""What the arguments of a loss are to the other ranks of a group: dtypes and shapes, options, checksums of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from grpo_kernels.base.agreement import Agreement, described
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.config import LossConfig


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


def _named(objective: Callable[..., Any] | None) -> str | None:
    """The function's name; of a dataclass its numbers too."""
    if objective is None:
        return None
    name: str = getattr(objective, "__qualname__", type(objective).__qualname__)
    if not is_dataclass(objective):
        return name
    values = {x.name: getattr(objective, x.name) for x in fields(objective)}
    return f"{name}({', '.join(f'{k}={x}' for k, x in values.items() if isinstance(x, (int, float)))})"
