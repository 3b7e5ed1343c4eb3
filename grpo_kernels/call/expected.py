"""The gradient of a call's rows, as far as it is known before the forward: a loss's, or an expected
one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from grpo_kernels.backends.interface import FusedRowBackend, RowStats
from grpo_kernels.base.checks import check_shape, check_tensor
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.plan import Coupling, HeadPlan
from grpo_kernels.engine.records import CoefficientsOf
from grpo_kernels.token_loss.record import Coefficients, TokenLoss


@dataclass(frozen=True)
class Expectation:
    """An expected gradient that is computed from each chunk's log-probabilities and entropies.

    Args:
        coefficients: function of index (n,) int64, the positions in the flattened ids, logps (n,)
            and entropies (n,) or None. It returns a = d loss / d logp, or (a, b) with
            b = d loss / d entropy, or, in a call with divergences, (a, b, c) with
            c = d loss / d divergence; (n,) each. None: not known row by row.
        graded: bool, shaped like the ids: False where all coefficients are certainly 0; no gradient
            is computed there. None: True everywhere.
        has_entropy_gradient: False if b is always None.
    """

    coefficients: Callable[[Tensor, Tensor, Tensor | None], Any] | None
    graded: Tensor | None = None
    has_entropy_gradient: bool = True


Expected = (
    Tensor | tuple[Tensor, Tensor | None] | Expectation | Callable[[Tensor, Tensor, Tensor], Any]
)


class RowGradient(Protocol):
    """The gradient that the rows of a call will get, as far as it is known before the forward.

    Attributes:
        is_expected: True if the backward compares the coefficients with the gradient that arrives.
        coupling: when the coefficients of a row are known.
        coefficients_of: from rows and their statistics to their coefficients; None: not known row
            by row.
        may_have_grad: (n,) bool, rows that may have a coefficient other than 0; None: all.
        of_entropy, of_logps: True if entropies, log-probabilities may have coefficients.
    """

    @property
    def is_expected(self) -> bool: ...
    @property
    def coupling(self) -> Coupling: ...
    @property
    def coefficients_of(self) -> CoefficientsOf | None: ...
    @property
    def may_have_grad(self) -> Tensor | None: ...
    @property
    def of_entropy(self) -> bool: ...
    @property
    def of_logps(self) -> bool: ...

    def token_loss(self, plan: HeadPlan) -> TokenLoss | None:
        """Return the coefficients as a loss that a fusing backend computes; None if it cannot."""


@dataclass(frozen=True)
class ExpectedRows:
    """An expected gradient, read for the rows of a call: a `RowGradient`."""

    coefficients_of: CoefficientsOf | None = None
    may_have_grad: Tensor | None = None
    of_entropy: bool = False
    of_logps: bool = True
    coefficients: Coefficients | None = None  # (n,), if they are known before the forward
    is_captured: bool = False  # in a CUDA graph, where a comparison in the backward would wait

    is_expected = True

    @staticmethod
    def of(coefficients: Coefficients) -> ExpectedRows:
        """Return the expectation of these `coefficients` (n,)."""
        of_logps = coefficients.d_logp is not None
        return ExpectedRows(_listed(coefficients), of_logps=of_logps, coefficients=coefficients)

    @property
    def coupling(self) -> Coupling:
        if self.coefficients_of is None and self.may_have_grad is None and not self.is_captured:
            return Coupling.UNKNOWN
        unknown = self.coefficients_of is None or self.is_captured
        return Coupling.of(known=self.coefficients is not None and not unknown, coupled=unknown)

    def token_loss(self, plan: HeadPlan) -> TokenLoss | None:
        """Return the gradient of divergences from another head as a loss, for a fusing backend."""
        if not fuses(plan) or plan.teacher is None or self.coefficients is None:
            return None
        weights, d_logps = self.coefficients.d_divergence, self.coefficients.d_logp
        assert weights is not None
        return TokenLoss(
            surrogate="constant",
            constants=(),
            kl="full",
            corrects_kl=False,
            advantages=None,
            d_logps=torch.zeros_like(weights) if d_logps is None else d_logps,
            weights=weights,
            old=None,
            ref=None,
            gate=None,
            beta=1.0,
            d_entropy=0.0,
        )


def _listed(coefficients: Coefficients) -> CoefficientsOf:
    return lambda index, _: take(coefficients, index)


def fuses(plan: HeadPlan) -> bool:
    """Return True if one kernel can compute a whole loss.

    The ranks of a divided head combine statistics before it.
    """
    if not isinstance(plan.backend, FusedRowBackend) or plan.shard is not None:
        return False
    return plan.teacher is None or plan.backend.fuses_teacher


def divergence_weights(
    name: str, expected: Tensor | None, hidden: Tensor, positions: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the expected gradient (n,) in the divergences at `positions` (n,).

    `expected` None stands for that of their mean; errors call it `name`.
    """
    if expected is None:
        return torch.full_like(positions, 1.0 / max(1, len(positions)), dtype=dtype)
    check_tensor(name, expected, like=hidden)
    check_shape(name, expected, ("that of hidden without H", tuple(hidden.shape[:-1])))
    return expected.detach().reshape(-1)[positions].to(dtype)


def read_expected(
    expected: Expected | None,
    ids: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    *,
    entropy: bool,
    divergence: bool = False,
) -> ExpectedRows:
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
        return ExpectedRows()
    largest = torch.finfo(dtype).max ** 0.5

    # 0 where products with x could overflow, or lose bits to underflow
    def usable(x: Tensor) -> Tensor:
        x = x.to(dtype)
        return torch.where((x.abs() <= largest) & (x.abs() >= 1 / largest), x, 0.0)

    def rows(name: str, x: Any) -> Tensor:
        check_tensor(name, x, like=ids)
        check_shape(name, x, ("that of the ids", tuple(ids.shape)))
        return x.detach().reshape(-1)[positions]

    if callable(expected):
        expected = Expectation(cast(Any, expected))
    if not isinstance(expected, Expectation):
        a, b = expected if isinstance(expected, tuple) else (expected, None)
        a = usable(rows("expected", a))
        b = None if b is None else usable(rows("expected[1]", b))
        nonzero = (a != 0) if b is None else (a != 0) | (b != 0)
        return ExpectedRows(_listed(Coefficients(a, b)), nonzero, b is not None)

    graded, function = expected.graded, expected.coefficients
    may_have_grad = None if graded is None else rows("expected.graded", graded).bool()
    if function is None:
        return ExpectedRows(None, may_have_grad, expected.has_entropy_gradient)

    def compute(index: Tensor, stats: RowStats) -> Coefficients:
        answer = function(positions[index], stats.logps, stats.entropies)
        a, b, c, *_ = (*answer, None, None) if isinstance(answer, tuple) else (answer, None, None)
        # no gradient can come from a result that the call does not have
        numbers = (a, None if stats.entropies is None else b, c if divergence else None)
        for name, x in zip(("expected", "expected[1]", "expected[2]"), numbers, strict=True):
            if x is not None or name == "expected":
                check_tensor(name, x, like=ids)
                check_shape(name, x, ("that of the index", tuple(index.shape)))
        return Coefficients(*(None if x is None else usable(x) for x in numbers))

    return ExpectedRows(compute, may_have_grad, expected.has_entropy_gradient)
