"""A call of `linear_divergence`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number
from grpo_kernels.base.choices import DivergenceName, choices
from grpo_kernels.call.expected import Expectation, ExpectedRows, divergence_weights, read_expected
from grpo_kernels.call.scores import ScoreCall
from grpo_kernels.token_loss.record import Coefficients

DIVERGENCES = choices(DivergenceName)


def beta_of(divergence: Any, beta: Any) -> float:
    """Return the divergence as a beta: 0 forward KL, 1 reverse KL (`interface.Teacher`).

    Raises:
        TypeError, ValueError: an unknown divergence, a wrong `beta`, or a `beta` without ``"jsd"``.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(
            f"divergence: expected one of {', '.join(DIVERGENCES)}, got {divergence!r}"
        )
    if divergence != "jsd":
        if beta is not None:
            raise ValueError(
                f"beta: expected None with divergence = {divergence!r}, which has none, got {beta!r}"
            )
        return 1.0 if divergence == "reverse_kl" else 0.0
    beta = 0.5 if beta is None else beta
    check_beta("beta", beta)
    return float(beta)


def check_beta(name: str, beta: Any) -> None:
    """Raise unless `beta` is a number in [0, 1]."""
    check_number(name, beta, 0.0, inclusive=True)
    if beta > 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {beta!r}")


@dataclass(frozen=True, eq=False)
class DivergenceCall(ScoreCall):
    """The divergence to compute, from the head's reference, and the ids (...) to score, if any."""

    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None = None  # (...)
    jsd_beta: float = 1.0

    function = "linear_divergence"

    def expectation(self, hidden: Tensor, positions: Tensor, dtype: torch.dtype) -> ExpectedRows:
        """Return the expected gradient in divergences and log-probabilities (from an `Expectation` also in entropies),
        up to one factor.
        """
        expected = self.expected
        if isinstance(expected, Expectation):
            ids = self.ids_of(hidden)
            return read_expected(
                expected, ids, positions, dtype, entropy=self.entropy, divergence=True
            )
        pair = expected if isinstance(expected, tuple) else (expected,)
        if len(pair) not in ((1, 2) if self.scores_ids else (1,)):
            raise ValueError(
                f"expected: expected a tensor, or with ids two, got a tuple of {len(pair)}"
            )
        names = ("expected", "expected[1]")
        weights = [
            divergence_weights(name, x, hidden, positions, dtype)
            for name, x in zip(names, pair, strict=False)
        ]
        return ExpectedRows.of(
            Coefficients(d_logp=weights[1] if len(weights) == 2 else None, d_divergence=weights[0])
        )
