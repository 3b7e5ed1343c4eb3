"""Rows of the head that count in a micro-batch of verl, and the gradient to expect there.

verl's engines hand a model packed ids: prompts, responses, padding. Only the row in front of a response's token
predicts something that the loss reads, and only where the mask counts. A micro-batch has all that tells them apart;
`packed_rows` reads it in verl's packed order. What a rank then gives its head is a part of that order, padded and
divided; an engine sends numbers through its own layout (`PackedRows.numbers`), and `PackedRows.here` reads them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.call.expected import Expectation
from grpo_kernels.integrations.verl.losses import (
    Mode,
    Slopes,
    actor_config,
    has_other_terms,
    is_sft,
    mode_of,
    reads_counted_rows,
)


class HeadRows:
    """Rows that count in one call of a head. No dataclass: FSDP rounds the tensors of a dataclass on the way in.

    Attributes:
        mask: bool, shaped like the labels: True where the result is read.
        others: shaped like the labels, log-probabilities that the other rows get; None: 0.
        expected: as in `linear_logprob`.
        entropy: whether entropies are read.
    """

    def __init__(
        self, mask: Tensor, others: Tensor | None, expected: Tensor | Expectation | None, *, entropy: bool
    ) -> None:
        self.mask, self.others, self.expected, self.entropy = mask, others, expected, entropy

    def filled(self, logps: Tensor) -> Tensor:
        """Return the log-probabilities, with `others` at the rows that do not count."""
        return logps if self.others is None else torch.where(self.mask, logps, self.others.to(logps.dtype))


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of a micro-batch in verl's packed order; N tokens.

    Attributes:
        counted: (N,) bool.
        entropy: whether entropies are read.
        others: (N,) log-probabilities for rows that do not count; None: 0.
        expected: (N,) the gradient of the log-probabilities, up to a factor; None: not known before the forward.
        slopes: derivatives of the loss at log-probabilities; None: a token's is not known before all are scored.
    """

    counted: Tensor
    entropy: bool
    others: Tensor | None = None
    expected: Tensor | None = None
    slopes: Slopes | None = None

    def numbers(self) -> Tensor:
        """Return (N,) int64, 1 for the first row and so on: 0 is left for padding."""
        return torch.arange(1, len(self.counted) + 1, device=self.counted.device)

    def here(self, numbers: Tensor) -> HeadRows:
        """Return the rows of a call of the head whose labels lie like `numbers`, some of `numbers()` among zeros."""

        def local(x: Tensor) -> Tensor:
            return F.pad(x, (1, 0))[numbers]

        expected: Tensor | Expectation | None = None
        if torch.is_grad_enabled():
            expected = None if self.expected is None else local(self.expected)
            if self.slopes is not None:
                slopes, rows = self.slopes, numbers.reshape(-1) - 1
                expected = Expectation(
                    lambda index, logps, entropies: slopes(rows[index], logps, entropies),
                    graded=local(slopes.graded),
                    has_entropy_gradient=slopes.of_entropy,
                )
        others = None if self.others is None else local(self.others)
        return HeadRows(local(self.counted), others, expected, entropy=self.entropy)


def flag(data: Any, name: str, default: Any = False) -> Any:
    """Return a value of `data`, a TensorDict of verl, that is no tensor."""
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    return tensordict_utils.get_non_tensor_data(data=data, key=name, default=default)


def packed_rows(data: Any, loss_function: Any, dp_group: Any) -> PackedRows | None:
    """Return the rows of `data`, a micro-batch, that `loss_function` reads, or the trainer if that is None.

    Returns:
        None if all rows may be read: by another loss, or since the log-probabilities go back to the caller.
    """
    if flag(data, "return_model_output"):
        return None
    if loss_function is not None and not reads_counted_rows(loss_function):
        return None
    entropy = bool(flag(data, "calculate_entropy"))
    if is_sft(loss_function):
        weights = data["loss_mask"].values().roll(-1, 0)  # as the loss rolls it
        return PackedRows(weights != 0, entropy, expected=weights.float())
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
        return PackedRows(counted, entropy, others)
    graded = counted
    if mode.by_advantage and not has_other_terms(config, entropy=entropy):
        graded = counted & (places.packed(data["advantages"]) != 0)
        if mode.by_weight and "rollout_is_weights" in names:
            graded &= places.packed(data["rollout_is_weights"]) != 0
    slopes = Slopes(loss_function, data, places.of_rows(), places.width, graded, dp_group, entropy=entropy)
    return PackedRows(counted, entropy, others, slopes=slopes)


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
