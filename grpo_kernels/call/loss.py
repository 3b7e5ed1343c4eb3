"""One call of the loss: its arguments, and the loss that they describe, ready for the statistics of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.checks import check_ids, check_logps, warn_of_ratio
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import Tokens, read_tokens
from grpo_kernels.call.expected import Expectation, fuses
from grpo_kernels.call.plan import Call
from grpo_kernels.call.planned_head import PlannedHead
from grpo_kernels.call.run import Execution
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.passes import of_loss
from grpo_kernels.engine.records import Operands, Rows
from grpo_kernels.engine.request import Coupling, ForwardResult, Request
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.objective.checks import check_config, check_terms, warn_of_inputs
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.custom import CustomObjective, TokenInputs
from grpo_kernels.objective.evaluation import Evaluation
from grpo_kernels.objective.measure import loss_metrics
from grpo_kernels.objective.metrics import Metrics
from grpo_kernels.objective.normaliser import check_num_items, token_weights
from grpo_kernels.objective.policy import PolicyObjective
from grpo_kernels.objective.sampler_correction import check_sampling
from grpo_kernels.token_loss.record import Coefficients, TokenLoss

Custom = Callable[[TokenInputs], Tensor]  # a user's objective


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss of the counted tokens: its gradient before the forward (a `RowGradient`), then its value and metrics."""

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
        weights = token_weights(
            config, tokens.layout, inputs.num_items_in_batch, tokens.advantages.dtype
        )
        num_items = inputs.num_items_in_batch is not None
        if objective is not None:
            return Loss(config, tokens, CustomObjective(objective, tokens, weights), num_items)
        return Loss(config, tokens, PolicyObjective(config, tokens, weights), num_items)

    @property
    def coupling(self) -> Coupling:
        """When the coefficients of a token are known."""
        return Coupling.of(known=self.objective.is_known, coupled=self.objective.couples_tokens)

    @property
    def of_entropy(self) -> bool:
        """True if entropies have coefficients. The answer may evaluate a custom objective."""
        return self.objective.has_entropy_gradient

    @cached_property
    def may_have_grad(self) -> Tensor | None:
        """(n,) bool: tokens that may have a coefficient other than 0; None: all."""
        return self.objective.may_have_grad()

    def coefficients_of(self, index: Tensor, stats: RowStats) -> Coefficients:
        """Return the coefficients of the tokens at `index` (m,), from the statistics of these tokens."""
        assert stats.entropies is not None
        return self.objective.coefficients_of(index, stats.logps, stats.entropies)

    def token_loss(self, plan: HeadPlan) -> TokenLoss | None:
        """Return the loss for a backend that fuses it; None if it cannot."""
        return self.objective.token_loss() if fuses(plan) else None

    def evaluate(self, request: Request, stats: RowStats) -> Evaluation:
        """Return the loss and its gradient, from the statistics of all rows."""
        assert stats.entropies is not None
        if not isinstance(self.objective, PolicyObjective):
            return self.objective.evaluate(stats.logps, stats.entropies)
        if request.token_loss is not None:
            return self.objective.assemble(stats.terms, stats.entropies)
        divergences = None if stats.divergence is None else stats.divergence.value
        return self.objective.evaluate(stats.logps, stats.entropies, divergences)

    def metrics(
        self, entropies: Tensor, evaluation: Evaluation, request: Request | None = None
    ) -> Metrics:
        """Return the metrics, from the entropies (n,) and the evaluation of all tokens.

        Without a `request` the log-probabilities come from elsewhere.
        """
        with_grad = evaluation.has_gradient
        if request is not None and not request.engine.recomputes:
            with_grad = torch.full_like(
                self.tokens.ids, request.engine.stores_gradient, dtype=torch.bool
            )
            with_grad = with_grad if request.may_have_grad is None else request.may_have_grad
        if self.tokens.old_per_token_logps is not None:
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
        """Return the gradient that log-probabilities and entropies will get, for ids of the batch's shape."""
        layout, dtype = self.tokens.layout, self.tokens.advantages.dtype
        row = torch.zeros(
            math.prod(layout.shape), dtype=torch.long, device=self.tokens.ids.device
        )  # of each position
        row[layout.positions] = torch.arange(len(self.tokens), device=row.device)
        may_have_grad = self.may_have_grad
        if may_have_grad is None:
            may_have_grad = torch.ones_like(self.tokens.ids, dtype=torch.bool)

        def coefficients(
            index: Tensor, logps: Tensor, entropies: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            entropies = logps if entropies is None else entropies
            return self.objective.coefficients_of(row[index], logps.to(dtype), entropies.to(dtype))

        return Expectation(
            None if self.objective.couples_tokens else coefficients,
            graded=layout.scatter(may_have_grad),
            has_entropy_gradient=self.of_entropy,
        )


@dataclass(frozen=True, eq=False)
class LossCall(Call[Tokens, Loss]):
    """The arguments of `grpo_loss` beside its head."""

    inputs: LossInputs
    config: LossConfig
    objective: Custom | None = None

    function, ids_name = "grpo_loss", "completion_ids"

    def check(self, head: LMHead, execution: Execution) -> LMHead:
        """Check the inputs of the loss; return the head without a reference that no term reads."""
        inputs = self.inputs
        check_loss(inputs, self.config, self.objective, has_reference=head.reference is not None)
        if not self.config.needs_reference_head:  # beta is 0
            head = replace(head, reference=None)
        head.check(ranks=(3,) if inputs.cu_seqlens is None else (2,))
        check_ids("completion_ids", inputs.completion_ids, head.hidden)
        return head

    def read(self, planned: PlannedHead) -> tuple[Rows, Tokens]:
        """Return the rows, and the tokens that count."""
        tokens = counted_tokens(self.inputs, self.config, self.objective, planned.plan.accumulator)
        return Rows(tokens.layout.positions, tokens.ids, 1.0 / self.config.temperature), tokens

    def gradient(self, planned: PlannedHead, read: Tokens) -> Loss:
        """Return the loss of the tokens."""
        return Loss.of(self.inputs, read, self.config, self.objective)


def first_pass(
    loss: Loss, operands: Operands, request: Request
) -> tuple[ForwardResult, Evaluation]:
    """Do the first pass over the rows, and evaluate the loss of their statistics."""
    with torch.no_grad():
        first = request.engine.first_pass(operands, request)
        assert first.stats is not None
        evaluation = loss.evaluate(request, first.stats)
        return of_loss(first, request, evaluation.coefficients), evaluation


def check_loss(
    inputs: LossInputs,
    config: LossConfig,
    objective: Custom | None = None,
    *,
    has_reference: bool = False,
) -> None:
    """Raise unless `inputs` have all that the loss reads; `read_tokens` checks their shapes.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    check_config(config)
    check_terms(config, inputs.ref_per_token_logps, objective, has_reference=has_reference)
    check_sampling(config, inputs.sampling_per_token_logps, inputs.importance_sampling_ratio)
    check_num_items(inputs.num_items_in_batch)


def counted_tokens(
    inputs: LossInputs, config: LossConfig, objective: Custom | None, dtype: torch.dtype
) -> Tokens:
    """Return the tokens that count, log-probabilities checked; warn of inputs that the loss does not use."""
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
