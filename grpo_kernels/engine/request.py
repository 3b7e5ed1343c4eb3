"""Records of a call: its request, the result of its first pass, and the engine that leads from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.choices import EngineName
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.records import CoefficientsOf, Gradients, NeedsGrad, Operands, Rows
from grpo_kernels.token_loss.record import NO_COEFFICIENTS, Coefficients, TokenLoss

Gather = Callable[[], AbstractContextManager[Any]]


class Coupling(Enum):
    """Moment at which a row's coefficients are known."""

    KNOWN = "before the forward"
    TOKEN = "from the row's own log-probability and entropy"
    CROSS_TOKEN = "only when other rows are done"
    UNKNOWN = "only in the backward, since no expected= was given"

    @staticmethod
    def of(*, known: bool, coupled: bool) -> Coupling:
        """Return a loss's coupling: `known` before any log-probability, or `coupled` over its tokens, or neither."""
        return Coupling.KNOWN if known else Coupling.CROSS_TOKEN if coupled else Coupling.TOKEN


@dataclass(frozen=True)
class Situation:
    """Facts about a call that decide which engine serves it.

    Attributes:
        coupling: when the coefficients of a row are known.
        hidden_trains, head_trains: True if these need a gradient (the head: weight, bias or an adapter).
        entropy_gradient: True if the loss depends on the entropies; read, and so asked, only if the head is frozen.
        mixed_gradient: True if the loss depends on the divergences, and on log-probabilities as well.
        tight_memory: True if an accumulator for d weight would not fit.
    """

    coupling: Coupling
    hidden_trains: bool
    head_trains: bool
    entropy_gradient: bool
    mixed_gradient: bool = False
    tight_memory: bool = False

    @property
    def no_gradient(self) -> bool:
        return not (self.hidden_trains or self.head_trains)


class Stored(Enum):
    """Results that a first pass leaves for the backward."""

    NOTHING = "there is no gradient"
    PER_ROW = "d logp / d hidden of each row, or that of the divergence, which the backward scales"
    GRADIENT = "the gradient for coefficients that were known, or expected"
    STATISTICS = "those of the rows, for a second pass that recomputes the logits"


@dataclass(frozen=True)
class Engine:
    """One way to compute a call's results and gradients."""

    name: EngineName
    stores: Stored
    serves: Callable[[Situation], bool]
    needs: str  # condition of `serves`, in words; {coupling} is replaced by the call's `Coupling.value`
    first_pass: Callable[[Operands, Request], ForwardResult]
    second_pass: Callable[
        [Operands, Request, RowStats, Coefficients], Gradients
    ]  # on the rows with gradient
    comes_first: Callable[[Situation], bool] = lambda _: (
        False
    )  # True if "auto" prefers it to all others

    @property
    def recomputes(self) -> bool:
        """True if the whole gradient is computed in a second pass."""
        return self.stores is Stored.STATISTICS

    @property
    def stores_gradient(self) -> bool:
        """True if the first pass computes the gradient, or everything about it that is expensive."""
        return self.stores in (Stored.PER_ROW, Stored.GRADIENT)


@dataclass(frozen=True)
class Request:
    """A call's inputs and settings, without the head's tensors."""

    rows: Rows  # n rows; every other position is 0 in all results
    plan: HeadPlan
    needs_grad: NeedsGrad
    engine: Engine
    entropy: bool = True
    extras: tuple[str, ...] = ()
    coefficients_of: CoefficientsOf | None = (
        None  # the true ones for `PolicyLoss`, the expected for `LinearLogprob`
    )
    token_loss: TokenLoss | None = (
        None  # the same, as a loss that a backend fuses; its terms reach `evaluate`
    )
    compares: bool = (
        False  # True if the backward compares these coefficients with the gradient that arrives
    )
    may_have_grad: Tensor | None = (
        None  # (n,) bool: rows that may carry gradient; None: all of them
    )
    gathered_weight: Gather = (
        nullcontext  # context in which the backward has the whole weight (ZeRO-3)
    )

    @property
    def diverges(self) -> bool:
        """True if the rows have a teacher."""
        return self.plan.teacher is not None or self.rows.top_k is not None

    def main(self, coefficients: Coefficients) -> Tensor | None:
        """Return the coefficient that a per-row gradient is stored for: d_divergence if rows have a teacher, else
        d_logp.
        """
        return coefficients.d_divergence if self.diverges else coefficients.d_logp

    def with_main(
        self, value: Tensor, coefficients: Coefficients = NO_COEFFICIENTS
    ) -> Coefficients:
        """Return `coefficients` with `value` (n,) in the place of `main`."""
        if self.diverges:
            return coefficients._replace(d_divergence=value)
        return coefficients._replace(d_logp=value)


@dataclass(frozen=True)
class ForwardResult:
    """Result of a first pass: statistics and, if the engine stores it, the gradient of the rows that may have one.

    Autograd keeps the parts that the backward reads.
    """

    stats: RowStats | None  # (n,)
    grads: Gradients | None = None
    grad_rows: Tensor | None = None  # (m,) indices of the rows of `grads`
    coefficients: Coefficients = NO_COEFFICIENTS  # (n,) those of `grads`, or for the second pass

    @property
    def entropies(self) -> Tensor:
        """The entropies (n,) of a pass that was asked for them."""
        assert self.stats is not None
        assert self.stats.entropies is not None
        return self.stats.entropies
