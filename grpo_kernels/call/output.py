"""Result of a loss, and how torch takes it apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.objective.metrics import Metrics


@dataclass  # not frozen: Lightning's Fabric copies what a module returns, and sets the copy's fields
class LossOutput:
    """Result of `grpo_loss`.

    Attributes:
        loss: 0-d, attached to the graph; fp32 (fp64 for fp64 inputs).
        per_token_logps: (B, T) or (N,), detached, 0 where masked; of the dtype of `loss`.
        entropies: of the same shape and dtype, detached, 0 where masked.
        metrics: name -> mean, and ``metrics.pairs``: name -> (sum, count).
        engine: which engine served the call: one of `engine.engines.ENGINES`.
        backend: which backend computed it: ``"cpp"``, ``"triton"`` or ``"torch"``.
    """

    loss: Tensor
    per_token_logps: Tensor
    entropies: Tensor
    metrics: Metrics
    engine: str
    backend: str


_Context = tuple[str, str]  # engine, backend


def _flatten(out: LossOutput) -> tuple[list[Any], _Context]:
    return [out.loss, out.per_token_logps, out.entropies, out.metrics], (out.engine, out.backend)


def _flatten_with_keys(out: LossOutput) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    found, context = _flatten(out)
    names = (field.name for field in fields(LossOutput))
    return [(pytree.GetAttrKey(name), x) for name, x in zip(names, found, strict=False)], context


def _unflatten(found: Iterable[Any], context: _Context) -> LossOutput:
    loss, per_token_logps, entropies, metrics = found
    return LossOutput(loss, per_token_logps, entropies, metrics, *context)


# DDP with static_graph=True silently drops the gradients of an output that is not a registered pytree.
pytree.register_pytree_node(
    LossOutput,
    _flatten,
    _unflatten,
    serialized_type_name="grpo_kernels.LossOutput",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
