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
from grpo_kernels.engine.gradients import Gradients, NeedsGrad
from grpo_kernels.engine.operands import Coefficients, CoefficientsOf, Head, HeadConfig, Rows
from grpo_kernels.token_loss.record import TokenLoss

Gather = Callable[[], AbstractContextManager[Any]]


class Coupling(Enum):
    """When a row's coefficients are known."""

    KNOWN = "before the forward"
    TOKEN = "from the row's own log-probability and entropy"
    CROSS_TOKEN = "only when other rows are done"

    @staticmethod
    def of(*, known: bool, coupled: bool) -> Coupling:
        """Return a loss's coupling: `known` before any log-probability, or `coupled` over its tokens, or neither."""
        return Coupling.KNOWN if known else Coupling.CROSS_TOKEN if coupled else Coupling.TOKEN


@dataclass(frozen=True)
class Situation:
    """Facts about a call that decide which engine serves it.

    Attributes:
        coupling: when the coefficients of a row are known.
        hidden_trains, head_trains: what wants a gradient (weight, bias or an adapter for the head).
        entropy_gradient: whether the loss depends on the entropies, b != 0.
        mixed_gradient: whether it depends on the divergences, c != 0, and on log-probabilities as well.
        tight_memory: whether an accumulator for d weight would not fit.
        scores_without_logits: whether the backend can.
    """

    coupling: Coupling
    hidden_trains: bool
    head_trains: bool
    entropy_gradient: bool
    mixed_gradient: bool = False
    tight_memory: bool = False
    scores_without_logits: bool = False

    @property
    def no_gradient(self) -> bool:
        return not (self.hidden_trains or self.head_trains)


class Stored(Enum):
    """Results that a first pass leaves for the backward."""

    NOTHING = "there is no gradient"
    SLOPES = "d logp / d hidden, or that of the divergence, row by row, which the backward scales"
    GRADIENT = "the gradient for coefficients that were known, or expected"
    STATISTICS = "those of the rows, from which a second pass recomputes the logits"


@dataclass(frozen=True)
class Engine:
    """One way to a call's results and gradients."""

    name: EngineName
    stores: Stored
    serves: Callable[[Situation], bool]
    needs: str  # what `serves` asks, in words; {coupling} stands for when the coefficients are known
    first_pass: Callable[[Head, Request], FirstPass]
    second_pass: Callable[[Head, Request, RowStats, Coefficients], Gradients]  # of a request's rows with gradient
    comes_first: Callable[[Situation], bool] = lambda _: False  # where "auto" prefers it to all others

    @property
    def recomputes(self) -> bool:
        """True if the whole gradient is computed in a second pass."""
        return self.stores is Stored.STATISTICS

    @property
    def stores_gradient(self) -> bool:
        """True if the first pass computes the gradient, or everything about it that is expensive."""
        return self.stores in (Stored.SLOPES, Stored.GRADIENT)


@dataclass(frozen=True)
class Request:
    """A call's inputs and settings, without the head's tensors."""

    rows: Rows  # n rows; the others are 0 in every result
    config: HeadConfig
    needs_grad: NeedsGrad
    engine: Engine
    entropy: bool = True
    extras: tuple[str, ...] = ()
    coefficients: CoefficientsOf | None = None  # the true ones for `PolicyLoss`, the expected for `LinearLogprob`
    token_loss: TokenLoss | None = None  # `PolicyLoss`: the same for a backend that fuses; its terms reach `finish`
    may_have_grad: Tensor | None = None  # (n,) bool: rows that may carry gradient; None: all of them
    gathered_weight: Gather = nullcontext  # within it the weight is whole, also in the backward (ZeRO-3)

    @property
    def main(self) -> str:
        """Which of `Coefficients` slopes are of, and an expectation at least: the divergence's, where there is one."""
        return "a" if self.config.teacher is None and self.rows.top_k is None else "c"


@dataclass(frozen=True)
class FirstPass:
    """Statistics of all rows; and, from engines that store one, a gradient of the rows that may have one."""

    stats: RowStats  # (n,)
    grads: Gradients | None
    grad_rows: Tensor  # (m,) indices of those rows
    used: Coefficients | None = None  # (n,) what `grads` was computed with, where that was asked row by row
