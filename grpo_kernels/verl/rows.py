"""Rows of the head that count in a micro-batch of verl, and the gradient to expect there.

verl's engines hand a model packed ids: prompts, responses, padding. Only the row in front of a response's token
predicts something that the loss reads, and only where the mask counts. A micro-batch has all that tells them apart;
`packed_rows` reads it in verl's packed order. What a rank then gives its head is a part of that order, padded and
divided; an engine sends numbers through its own layout (`numbers_of`), and `KnownRows.at` reads them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.call.expected import Expectation
from grpo_kernels.host import KnownRows
from grpo_kernels.verl.losses import (
    Mode,
    Slopes,
    actor_config,
    has_other_terms,
    is_sft,
    mode_of,
    reads_counted_rows,
)


def flag(data: Any, name: str, default: Any = False) -> Any:
    """Return a value of `data`, a TensorDict of verl, that is no tensor."""
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    return tensordict_utils.get_non_tensor_data(data=data, key=name, default=default)


def packed_rows(data: Any, loss_function: Any, dp_group: Any) -> KnownRows | None:
    """Return the rows of `data`, a micro-batch, that `loss_function` reads, or the trainer if that is None.

    Returns:
        (N,) for N tokens in verl's packed order. None if all rows may be read: by another loss, or since the
        log-probabilities go back to the caller.
    """
    if flag(data, "return_model_output"):
        return None
    if loss_function is not None and not reads_counted_rows(loss_function):
        return None
    entropy = bool(flag(data, "calculate_entropy"))
    if is_sft(loss_function):
        weights = data["loss_mask"].values().roll(-1, 0).float()  # as the loss rolls it
        expected = Expectation(
            lambda index, *_: weights[index], graded=weights != 0, has_entropy_gradient=False
        )
        return KnownRows(weights != 0, expected=expected, entropy=entropy)
    names = set(data.keys())
    if not {"responses", "response_mask"} <= names:
        return None
    places = Places(data)
    # The losses compare the log-probabilities of all tokens with the old ones, and mask the result.
    others = places.packed(data["old_log_probs"]) if "old_log_probs" in names else None
    counted = places.packed(data["response_mask"]) != 0
    config = actor_config(loss_function)
    mode = Mode() if config is None else mode_of(config)
    if others is None or not mode.by_token:
        return KnownRows(counted, others, entropy=entropy)
    graded = counted
    if mode.by_advantage and not has_other_terms(config, entropy=entropy):
        graded = counted & (places.packed(data["advantages"]) != 0)
        if mode.by_weight and "rollout_is_weights" in names:
            graded &= places.packed(data["rollout_is_weights"]) != 0
    slopes = Slopes(loss_function, data, places.of_rows(), places.width, dp_group, entropy=entropy)
    expected = Expectation(slopes, graded=graded, has_entropy_gradient=slopes.of_entropy)
    return KnownRows(counted, others, expected, entropy=entropy)


def numbers_of(rows: KnownRows) -> Tensor:
    """Return (N,) int64, 1 for the first row and so on: 0 is left for padding."""
    return torch.arange(1, len(rows.counted) + 1, device=rows.counted.device)


class Places:
    """Rows of the packed tokens that predict the tokens of the responses, (B, `width`) with padding."""

    def __init__(self, data: Any) -> None:
        ends = data["input_ids"].offsets()[1:]
        prompts, responses = data["prompts"], data["responses"]
        if responses.is_nested:
            lengths = responses.offsets().diff()
            self.width = int(lengths.max())
        else:
            lengths = data["attention_mask"][:, prompts.shape[1] :].sum(dim=1)
            self.width = responses.shape[1]
        t = torch.arange(self.width, device=ends.device)
        self._inside = t < lengths[:, None]
        starts = ends - lengths - 1  # the last token of a prompt predicts the first of the response
        self._rows = (starts[:, None] + t)[self._inside]
        self._tokens = len(data["input_ids"].values())

    def packed(self, x: Tensor) -> Tensor:
        """Return what `x`, (B, `width`) or nested, has for each packed row (N,); 0 where it predicts no response."""
        values = x.values() if x.is_nested else x[self._inside]
        return values.new_zeros(self._tokens).index_copy(0, self._rows, values)

    def of_rows(self) -> Tensor:
        """Return b * `width` + t of the response's token that each packed row (N,) predicts; 0 where it is none."""
        places = torch.arange(self._inside.numel(), device=self._rows.device)
        return self.packed(places.view(self._inside.shape))
