"""`KnownRows`: what is known about the rows of a head before it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.call.expected import Expectation


class KnownRows:
    """Facts about the rows of a batch, in the trainer's order: (B, T) or packed (N,). `at` selects those of a call.

    No dataclass: FSDP rounds the tensors of a dataclass on the way into a model.

    Attributes:
        counted: True, or not 0, for rows whose results are read. The other rows are not projected.
        fill: shaped like `counted`, log-probabilities that are reported for the other rows; None: 0.
        expected: the gradient to expect, for ids shaped like `counted`; None: not known, or there is none.
        entropy: False if no entropies are read.
    """

    def __init__(
        self,
        counted: Tensor,
        fill: Tensor | None = None,
        expected: Expectation | None = None,
        *,
        entropy: bool = True,
    ) -> None:
        self.counted, self.fill, self.expected, self.entropy = counted, fill, expected, entropy

    def at(self, positions: Tensor) -> KnownRows:
        """Return the facts about the rows at `positions` of the flattened batch; at -1 is a row that does not count."""

        def select(x: Tensor) -> Tensor:
            return F.pad(x.reshape(-1), (1, 0))[positions + 1]

        expected = self.expected if torch.is_grad_enabled() else None
        if expected is not None:
            graded = None if expected.graded is None else select(expected.graded)
            expected = replace(_renumbered(expected, positions.reshape(-1)), graded=graded)
        fill = None if self.fill is None else select(self.fill)
        return KnownRows(select(self.counted) != 0, fill, expected, entropy=self.entropy)

    def filled(self, logps: Tensor) -> Tensor:
        """Return log-probabilities, with `fill` at the rows that do not count."""
        return logps if self.fill is None else torch.where(self.counted, logps, self.fill.to(logps.dtype))


def _renumbered(expected: Expectation, positions: Tensor) -> Expectation:
    """Return an expectation that is asked about rows of a call, which are at `positions` (n,) of the batch."""
    coefficients = expected.coefficients
    if coefficients is None:
        return expected

    def of_call(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Any:
        return coefficients(positions[index], logps, entropies)

    return replace(expected, coefficients=of_call)
