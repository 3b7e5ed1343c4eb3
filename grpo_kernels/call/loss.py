"""The loss of a call's tokens: its gradient before the forward, then its value and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.checks import check_logps, warn_of_ratio
from grpo_kernels.base.choices import WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.batch.tokens import Layout, LossInputs, Tokens, read_tokens
from grpo_kernels.call.expected import Expectation, fuses
from grpo_kernels.call.results import LossOutput
from grpo_kernels.engine.autograd import first_order
from grpo_kernels.engine.passes import of_loss
from grpo_kernels.engine.plan import Coupling, ForwardResult, HeadPlan, Request
from grpo_kernels.engine.records import Operands
from grpo_kernels.engine.top_k import TOPK_LOGPS
from grpo_kernels.head.head import HeadLike
from grpo_kernels.objective.config import (
    LossConfig,
    check_config,
    check_sampling,
    check_terms,
    warn_of_inputs,
)
from grpo_kernels.objective.custom import CustomObjective, TokenInputs
from grpo_kernels.objective.losses import check_num_items, token_weights
from grpo_kernels.objective.metrics import Metrics, loss_metrics
from grpo_kernels.objective.policy import Evaluation, PolicyObjective
from grpo_kernels.token_loss.record import Coefficients, TokenLoss

Custom = Callable[[TokenInputs], Tensor]  # a user's objective


class LossInputKeywords(TypedDict, total=False):
    """Keyword arguments of a `GRPOLoss`'s call, for type checkers."""

    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    reference: tuple[Tensor, HeadLike] | None
    num_items_in_batch: float | Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    sampling_topk_ids: Tensor | None
    sampling_topk_logps: Tensor | None
    kept_ids: Tensor | KeptIds | None
    without_set: WithoutSet
    cu_seqlens: Tensor | None


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss of the counted tokens: first a `RowGradient`, then its value and metrics."""

    config: LossConfig
    tokens: Tokens
    objective: PolicyObjective | CustomObjective
    num_items: bool  # True if num_items_in_batch was given

    is_expected, of_logps = False, True

    @staticmethod
    def of(
        inputs: LossInputs, tokens: Tokens, config: LossConfig, objective: Custom | None = None
    ) -> Loss:
        """Return the loss that `config` describes, or the custom one."""
        num_items = inputs.num_items_in_batch
        weights = token_weights(config, tokens.layout, num_items, tokens.advantages.dtype)
        if objective is None:
            policy = PolicyObjective(config, tokens, weights)
            return Loss(config, tokens, policy, num_items is not None)
        custom = CustomObjective(objective, tokens, weights)
        return Loss(config, tokens, custom, num_items is not None)

    @property
    def coupling(self) -> Coupling:
        return Coupling.of(known=self.objective.is_known, coupled=self.objective.couples_tokens)

    @property
    def of_entropy(self) -> bool:
        return self.objective.has_entropy_gradient  # may evaluate a custom objective

    @cached_property
    def may_have_grad(self) -> Tensor | None:
        return self.objective.may_have_grad()

    def coefficients_of(self, index: Tensor, stats: RowStats) -> Coefficients:
        """Return the coefficients of the tokens at `index` (m,), from their statistics."""
        assert stats.entropies is not None
        numbers = stats.logps, stats.entropies
        if isinstance(self.objective, CustomObjective):
            return self.objective.coefficients_of(index, *numbers)
        return self.objective.coefficients_of(index, *numbers, stats.extras.get(TOPK_LOGPS))

    def token_loss(self, plan: HeadPlan) -> TokenLoss | None:
        """Return the loss for a backend that fuses it; None if it cannot."""
        return self.objective.token_loss() if fuses(plan) else None

    def first_pass(self, operands: Operands, request: Request) -> tuple[ForwardResult, Evaluation]:
        """Do the first pass over the rows, and evaluate the loss of their statistics."""
        with torch.no_grad():
            first = request.engine.first_pass(operands, request)
            assert first.stats is not None
            evaluation = self._evaluate(request, first.stats)
            return of_loss(first, request, evaluation.coefficients), evaluation

    def _evaluate(self, request: Request, stats: RowStats) -> Evaluation:
        assert stats.entropies is not None
        if not isinstance(self.objective, PolicyObjective):
            return self.objective.evaluate(stats.logps, stats.entropies)
        if request.token_loss is not None:
            return self.objective.assemble(stats.terms, stats.entropies)
        divergences = None if stats.divergence is None else stats.divergence.value
        topk_logps = stats.extras.get(TOPK_LOGPS)
        return self.objective.evaluate(stats.logps, stats.entropies, divergences, topk_logps)

    def metrics(
        self, entropies: Tensor, evaluation: Evaluation, request: Request | None = None
    ) -> Metrics:
        """Return the metrics, from the entropies (n,) and the evaluation of all tokens.

        Without a `request` the log-probabilities come from elsewhere.
        """
        with_grad = evaluation.has_gradient
        if request is not None and not request.engine.recomputes:
            stores = request.engine.stores_gradient
            with_grad = torch.full_like(self.tokens.ids, stores, dtype=torch.bool)
            with_grad = with_grad if request.may_have_grad is None else request.may_have_grad
        if self.tokens.old_per_token_logps is not None and evaluation.terms is not None:
            warn_of_ratio(evaluation.terms.token_log_ratio)
        return loss_metrics(
            self.config,
            self.tokens,
            entropies,
            evaluation,
            with_grad.sum(),
            num_items=self.num_items,
        )

    def expectation(self) -> Expectation:
        """Return the gradient that results will get, for ids of the batch's shape."""
        layout, ids, dtype = self.tokens.layout, self.tokens.ids, self.tokens.advantages.dtype
        row = torch.zeros(math.prod(layout.shape), dtype=torch.long, device=ids.device)
        row[layout.positions] = torch.arange(len(self.tokens), device=row.device)
        may_have_grad = self.may_have_grad
        if may_have_grad is None:
            may_have_grad = torch.ones_like(ids, dtype=torch.bool)

        def coefficients(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Coefficients:
            entropies = logps if entropies is None else entropies
            return self.objective.coefficients_of(row[index], logps.to(dtype), entropies.to(dtype))

        return Expectation(
            None if self.objective.couples_tokens else coefficients,
            graded=layout.scatter(may_have_grad),
            has_entropy_gradient=self.of_entropy,
        )

    def from_logps(self, logps: Tensor, entropies: Tensor, *, engine: str = "given") -> LossOutput:
        """Return the loss with its gradient in `logps` and `entropies`, both (B, T) or (N,)."""
        layout, dtype = self.tokens.layout, self.tokens.advantages.dtype
        rows = [x.detach().reshape(-1)[layout.positions].to(dtype) for x in (logps, entropies)]
        evaluation = self.objective.evaluate(*rows)
        value = _LossFromLogps.apply(logps, entropies, evaluation, layout)
        metrics = self.metrics(rows[1], evaluation)
        per_token_logps, per_token_entropies = map(layout.scatter, rows)
        return LossOutput(value, per_token_logps, per_token_entropies, metrics, engine, "torch")


@first_order
class _LossFromLogps(torch.autograd.Function):
    """``forward(ctx, logps, entropies, evaluation, layout)`` -> the loss () of `evaluation`."""

    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, entropies: Tensor, evaluation: Evaluation, layout: Layout
    ) -> Tensor:
        ctx.layout, ctx.dtypes = layout, (logps.dtype, entropies.dtype)
        ctx.save_for_backward(evaluation.d_logp, evaluation.coefficients.d_entropy)
        return evaluation.loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if x is None else ctx.layout.scatter(d_loss * x).to(dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None


def check_loss(
    inputs: LossInputs,
    config: LossConfig,
    objective: Custom | None = None,
    *,
    has_reference: bool = False,
) -> None:
    """Raise unless `inputs` have all that the loss reads; `read_tokens` checks their shapes."""
    check_config(config)
    check_terms(config, inputs.ref_per_token_logps, objective, has_reference=has_reference)
    check_sampling(config, inputs.sampling_per_token_logps, inputs.importance_sampling_ratio)
    check_num_items(inputs.num_items_in_batch)


def counted_tokens(
    inputs: LossInputs, config: LossConfig, objective: Custom | None, dtype: torch.dtype
) -> Tokens:
    """Return the tokens that count, checked; warn of inputs that nothing reads."""
    tokens = read_tokens(inputs, dtype)
    for name in inputs.logps:
        check_logps(name, getattr(tokens, name))
    warn_of_inputs(
        config,
        objective,
        num_items_in_batch=inputs.num_items_in_batch,
        old_per_token_logps=inputs.old_per_token_logps,
        sampling_per_token_logps=inputs.sampling_per_token_logps,
    )
    return tokens
