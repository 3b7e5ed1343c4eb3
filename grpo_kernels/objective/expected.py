"""The gradient that a caller expects of its own loss, so that scores take one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, FusedLoss, RowStats
from grpo_kernels.base.checks import check_tensor, hints_names
from grpo_kernels.base.tensors import take
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.custom import CustomLoss
from grpo_kernels.objective.policy import PolicyLoss, stats_of


@hints_names
@dataclass(frozen=True)
class Expectation:
    """Tells `linear_logps` your loss's gradient in advance, so that it computes the logits once.

    Args:
        coefficients: a function, called as ``coefficients(index, logps, entropies)`` for n tokens
            at a time. `index` (n,) int64 holds the positions of the tokens in the flattened ids;
            `logps` is (n,); `entropies` is (n,) or None. Pass None instead of a function if a
            token's gradient depends on other tokens; the call then uses only `live`. The function
            returns one of the following, each tensor (n,):

            - a = d loss / d logp;
            - (a, b) with b = d loss / d entropy;
            - (a, b, c) with c = d loss / d divergence, in a call with divergences.

        live: bool, shaped like the ids. Where it is False, all coefficients are certainly 0, and
            no gradient is computed. None: True everywhere.
        has_entropy_gradient: False if b is always None.
    """

    coefficients: Callable[[Tensor, Tensor, Tensor | None], Any] | None
    live: Tensor | None = None
    has_entropy_gradient: bool = True

    def __post_init__(self) -> None:
        function: Any = self.coefficients
        if function is not None and not callable(function):
            hint = "; pass the tensor itself as expected=" if isinstance(function, Tensor) else ""
            got = f"{type(function).__name__}{hint}"
            raise TypeError(f"coefficients: expected a function or None, got {got}")


def expectation_of(token_loss: PolicyLoss | CustomLoss) -> Expectation:
    """Make the `Expectation` of a loss, for ids of the batch's shape."""
    layout, dtype = token_loss.tokens.layout, token_loss.tokens.dtype
    row = layout.positions.new_zeros(math.prod(layout.shape))
    row[layout.positions] = torch.arange(layout.total, device=row.device)
    live = token_loss.live
    live = torch.ones_like(layout.positions, dtype=torch.bool) if live is None else live

    def coefficients(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Coefficients:
        logps = logps.to(dtype)
        entropies = logps if entropies is None else entropies.to(dtype)
        return token_loss.coefficients_at(row[index], stats_of(logps, entropies))

    return Expectation(
        None if token_loss.is_coupled else coefficients,
        live=layout.scatter(live),
        has_entropy_gradient=token_loss.has_entropy_gradient,
    )


Expected = (
    Tensor | tuple[Tensor, Tensor | None] | Expectation | Callable[[Tensor, Tensor, Tensor], Any]
)


@dataclass(frozen=True)
class ExpectedGradient:
    """The expected gradient of a call's rows; the backward compares it with the upstream gradient.

    The comparison would wait for the device, so nothing is expected in a CUDA graph.

    Attributes:
        known_coefficients: coefficients (n,), if known before the forward.
        compute: otherwise, a function from the index (m,) of rows, their log-probabilities and
            their entropies to coefficients. None: a row alone does not determine them.
        live: (n,) bool, rows that may have a coefficient other than 0; None means all rows.
        one_coefficient: True if each row has a single coefficient.
    """

    known_coefficients: Coefficients | None = None
    compute: Callable[[Tensor, Tensor, Tensor | None], Coefficients] | None = None
    live: Tensor | None = None
    one_coefficient: bool = True
    is_expected = True

    @property
    def is_coupled(self) -> bool:
        return self.known_coefficients is None and self.compute is None

    def coefficients_at(self, index: Tensor, stats: RowStats) -> Coefficients:
        if self.known_coefficients is not None:
            return take(self.known_coefficients, index)
        assert self.compute is not None
        return self.compute(index, stats.logps, stats.entropies)

    def fused_loss(self) -> FusedLoss | None:
        """The gradient of divergences from a second head, as a loss."""
        coefficients = self.known_coefficients
        if coefficients is None or coefficients.d_divergence is None:
            return None
        weights, d_policy = coefficients.d_divergence, coefficients.d_logp
        d_policy = torch.zeros_like(weights) if d_policy is None else d_policy
        return FusedLoss(weights, kl_estimator="full", beta=1.0, d_policy=d_policy)


def read_d_result(
    name: str, expected: Tensor | None, hidden: Tensor, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """Read d loss / d result, (n,), at `positions` (n,); the result is usually a divergence.

    None means that the loss is the mean of the results. Errors call `expected` by `name`.
    """
    if expected is None:
        return torch.full_like(positions, 1.0 / max(1, len(positions)), dtype=dtype)
    check_tensor(name, expected, ("hidden.shape[:-1]", hidden.shape[:-1]), like=hidden)
    return _usable(expected.detach().reshape(-1)[positions], dtype)


def read_expected_divergence(
    expected: Any,
    hidden: Tensor,
    ids: Tensor | None,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    entropy: bool,
) -> ExpectedGradient:
    """Read the expected gradient of divergences and log-probabilities, up to one factor.

    Only an `Expectation` can also hold the expected gradient of the entropies.
    """
    if isinstance(expected, Expectation):
        shaped = hidden.detach()[..., 0]  # as the ids are
        return read_expected(expected, shaped, positions, dtype, entropy=entropy, divergence=True)
    pair = expected if isinstance(expected, tuple) else (expected,)
    if len(pair) not in ((1,) if ids is None else (1, 2)):
        raise ValueError(
            f"expected: expected a tensor, or two with completion_ids, got a tuple of {len(pair)}"
        )
    d_divergence, *d_logp = [
        read_d_result(name, x, hidden, positions, dtype)
        for name, x in zip(("expected", "expected[1]"), pair, strict=False)
    ]
    known = Coefficients(d_logp[0] if d_logp else None, None, d_divergence)
    return ExpectedGradient(known, one_coefficient=not d_logp)


def read_expected(
    expected: Expected | None,
    ids: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    entropy: bool,
    divergence: bool = False,
) -> ExpectedGradient:
    """Read the expected gradient at `positions` (n,) of `ids`, in `dtype`.

    `entropy` and `divergence` say which results the call has besides log-probabilities.
    """
    if isinstance(expected, tuple) and (
        len(expected) != 2 or (expected[1] is not None and not entropy)
    ):
        pair = "(a, b)" if entropy else "(a, None) since there is no entropy"
        raise ValueError(
            f"expected: expected a tensor, {pair} or an Expectation, got a tuple of {len(expected)}"
        )
    if expected is None:
        return ExpectedGradient()

    def rows(name: str, x: Any) -> Tensor:
        check_tensor(name, x, ("of the tokens", ids.shape), like=ids)
        return x.detach().reshape(-1)[positions]

    if isinstance(expected, LossConfig):
        raise TypeError(
            "expected: expected a gradient, got a LossConfig; pass policy_expectation(config, ...)"
        )
    if callable(expected):
        expected = Expectation(cast(Any, expected))
    if not isinstance(expected, Expectation):
        a, b = expected if isinstance(expected, tuple) else (expected, None)
        a = _usable(rows("expected", a), dtype)
        b = None if b is None else _usable(rows("expected[1]", b), dtype)
        nonzero = (a != 0) if b is None else (a != 0) | (b != 0)
        return ExpectedGradient(Coefficients(a, b), live=nonzero, one_coefficient=b is None)

    live, function = expected.live, expected.coefficients
    live = None if live is None else rows("expected.live", live).bool()
    one_coefficient = not (expected.has_entropy_gradient or divergence)
    if function is None:
        return ExpectedGradient(live=live, one_coefficient=one_coefficient)

    def compute(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Coefficients:
        answer = function(positions[index], logps, entropies)
        a, b, c, *_ = (*answer, None, None) if isinstance(answer, tuple) else (answer, None, None)
        # no gradient can come from a result that the call does not have
        numbers = (a, None if entropies is None else b, c if divergence else None)
        for name, x in zip(("expected", "expected[1]", "expected[2]"), numbers, strict=True):
            if x is not None or name == "expected":
                check_tensor(name, x, ("index.shape", index.shape), like=ids)
        return Coefficients(*(None if x is None else _usable(x, dtype) for x in numbers))

    return ExpectedGradient(None, compute, live, one_coefficient)


def _usable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert an expected gradient; it is 0 where products with it could overflow or underflow."""
    x, largest = x.to(dtype), torch.finfo(dtype).max ** 0.5
    return torch.where((x.abs() <= largest) & (x.abs() >= 1 / largest), x, 0.0)
