"""Masked positions taken away before the head and put back, as 0, behind it: what trainers do that pack sequences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import Inputs

Rows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]  # (n, H), (n,) -> log-probabilities, entropies (n,)


def packed(inputs: Inputs, function: Rows) -> tuple[Tensor, Tensor | None]:
    """`function` on the tokens that count: (B, T) log-probabilities, and entropies or None."""
    if not inputs.case.padding:
        logps, entropies = function(inputs.hidden.reshape(-1, inputs.case.h), inputs.ids.reshape(-1))
        return logps.view(inputs.ids.shape), None if entropies is None else entropies.view(inputs.ids.shape)
    counted = inputs.mask.bool()
    logps, entropies = function(inputs.hidden[counted], inputs.ids[counted])
    return _whole(logps, counted), None if entropies is None else _whole(entropies, counted)


def without_masked(inputs: Inputs, ignore_index: int) -> Tensor:
    """`ids` (B, T) with `ignore_index` where the mask is 0."""
    return inputs.ids.masked_fill(inputs.mask == 0, ignore_index) if inputs.case.padding else inputs.ids


def _whole(values: Tensor, counted: Tensor) -> Tensor:
    return values.new_zeros(counted.shape).masked_scatter(counted, values)
