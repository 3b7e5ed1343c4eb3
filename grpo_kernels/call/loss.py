"""One call of the loss: check its arguments, choose its engine, and turn its rows' statistics into loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.agreement import Each, check_same
from grpo_kernels.base.checks import check_gather, check_ids, check_logps, warn_of_ratio
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import Tokens, read_tokens
from grpo_kernels.call.checked_head import CheckedHead, plan_head
from grpo_kernels.call.expected import Expectation
from grpo_kernels.call.options import Execution
from grpo_kernels.call.plan import fuses
from grpo_kernels.call.ranks import check_sequence_group, options_of_loss, part_of_loss, sharded, tokens_of_loss
from grpo_kernels.engine.engines import LEAN
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Coupling, Engine, Request, Stored
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
from grpo_kernels.token_loss.record import Coefficients

Objective = PolicyObjective | CustomObjective
Custom = Callable[[TokenInputs], Tensor]  # an objective of the user's own


@dataclass(frozen=True)
class LossCall:
    """A loss that is ready to run: its request to an engine, and `evaluate` for the statistics that come back."""

    config: LossConfig
    tokens: Tokens
    request: Request
    objective: Objective
    head: LMHead  # this rank's tensors, checked
    num_items: bool  # True if num_items_in_batch was given

    def evaluate(self, stats: RowStats) -> Evaluation:
        """The loss and its gradient, from the statistics of all rows."""
        assert stats.entropies is not None
        if not isinstance(self.objective, PolicyObjective):
            return self.objective.evaluate(stats.logps, stats.entropies)
        if self.request.token_loss is not None:
            return self.objective.assemble(stats.terms, stats.entropies)
        divergences = None if stats.divergence is None else stats.divergence.value
        return self.objective.evaluate(stats.logps, stats.entropies, divergences)

    def metrics(self, stats: RowStats, evaluation: Evaluation) -> Metrics:
        """Return the metrics, from the statistics of all rows and their evaluation."""
        assert stats.entropies is not None
        with_grad = self._has_grad(evaluation).sum()
        if self.tokens.old_per_token_logps is not None:
            warn_of_ratio(evaluation.terms.token_log_ratio)
        return loss_metrics(self.config, self.tokens, stats.entropies, evaluation, with_grad, num_items=self.num_items)

    def _has_grad(self, evaluation: Evaluation) -> Tensor:
        """(n,) bool: the rows that a backward product is done for."""
        request = self.request
        if request.engine.recomputes:
            return evaluation.has_gradient
        if request.may_have_grad is not None:
            return request.may_have_grad
        return torch.full(request.rows.ids.shape, request.engine.stores_gradient, device=request.rows.ids.device)


def plan_loss(
    inputs: LossInputs, head: LMHead, execution: Execution, config: LossConfig, objective: Custom | None
) -> LossCall:
    """Check the arguments of `grpo_loss` and plan its call.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    planned, tokens, rows = _checked(inputs, head.grouped(), execution, config, objective)
    if execution.sequence_group is not None:
        tokens = sharded(tokens, execution.sequence_group)
    with check_same("sequence_group", execution.sequence_group, "the engine of grpo_loss") as values:
        policy = make_objective(config, objective, tokens, inputs)
        engine = _engine(policy, planned)
        values[LEAN.name] = Each(engine is LEAN)
    if any(values[LEAN.name]):  # a rank is short of memory
        engine = LEAN
    request = Request(
        rows=rows,
        plan=planned.plan,
        needs_grad=planned.needs_grad,
        engine=engine,
        may_have_grad=policy.may_have_gradient() if engine.stores_gradient else None,
        gathered_weight=execution.gather or nullcontext,
    )
    if engine.stores is Stored.GRADIENT:
        request = _with_coefficients(request, policy)
    return LossCall(config, tokens, request, policy, planned.head, inputs.num_items_in_batch is not None)


def check_loss(
    inputs: LossInputs, config: LossConfig, objective: Custom | None = None, *, has_reference: bool = False
) -> None:
    """Raise unless `inputs` have what the loss needs; `read_tokens` checks their shapes.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    check_config(config)
    check_terms(config, inputs.ref_per_token_logps, objective, has_reference=has_reference)
    check_sampling(config, inputs.sampling_per_token_logps, inputs.importance_sampling_ratio)
    check_num_items(inputs.num_items_in_batch)


def counted_tokens(inputs: LossInputs, config: LossConfig, objective: Custom | None, dtype: torch.dtype) -> Tokens:
    """Return the tokens that count, log-probabilities checked; warn of inputs that the loss does not use."""
    tokens = read_tokens(inputs, dtype)
    for name in inputs.logps:
        check_logps(name, getattr(tokens, name))
    warn_of_inputs(
        config,
        objective,
        num_items_in_batch=inputs.num_items_in_batch,
        old_per_token_logps=inputs.old_per_token_logps,
        ref_per_token_logps=inputs.ref_per_token_logps,
        sampling_per_token_logps=inputs.sampling_per_token_logps,
    )
    return tokens


def make_objective(config: LossConfig, objective: Custom | None, tokens: Tokens, inputs: LossInputs) -> Objective:
    """The loss that `config` describes, or the custom one. A collective, if the tokens are a shard."""
    weights = token_weights(config, tokens.layout, inputs.num_items_in_batch, tokens.advantages.dtype)
    if objective is not None:
        return CustomObjective(objective, tokens, weights)
    policy = PolicyObjective(config, tokens, weights)
    if tokens.layout.shard is not None:
        policy.settle()
    return policy


def expectation_of(policy: Objective, tokens: Tokens) -> Expectation:
    """Return the gradient that `policy` will send to log-probabilities and entropies, for ids in the batch's shape."""
    layout, dtype = tokens.layout, tokens.advantages.dtype
    row = torch.zeros(math.prod(layout.shape), dtype=torch.long, device=tokens.ids.device)  # of each position
    row[layout.positions] = torch.arange(len(tokens), device=row.device)
    may_have_grad = policy.may_have_gradient()
    if may_have_grad is None:
        may_have_grad = torch.ones_like(tokens.ids, dtype=torch.bool)

    def coefficients(index: Tensor, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        entropies = logps if entropies is None else entropies
        return policy.coefficients(row[index], logps.to(dtype), entropies.to(dtype))

    return Expectation(
        None if policy.couples_tokens else coefficients,
        graded=layout.scatter(may_have_grad),
        has_entropy_gradient=policy.has_entropy_gradient,
    )


def _checked(
    inputs: LossInputs, head: LMHead, execution: Execution, config: LossConfig, objective: Custom | None
) -> tuple[CheckedHead, Tokens, Rows]:
    """Check the arguments, alike on all ranks; return the head, the tokens that count, and their rows."""
    group = execution.sequence_group
    with check_same("sequence_group", group, "grpo_loss") as part:
        with check_same("process_group", head.process_group, "grpo_loss") as whole:
            local = head.local()
            check_loss(inputs, config, objective, has_reference=head.reference is not None)
            if not config.needs_reference_head:  # beta is 0: no term reads it
                local = replace(local, reference=None)
            check_sequence_group(group, inputs.cu_seqlens, objective)
            local.check(ranks=(3,) if inputs.cu_seqlens is None else (2,))
            check_ids("completion_ids", inputs.completion_ids, local.hidden)
            execution.check()
            check_gather(execution.gather)
            planned = plan_head(local, execution)
            tokens = counted_tokens(inputs, config, objective, planned.plan.accumulator)
            rows = Rows(tokens.layout.positions, tokens.ids, 1.0 / config.temperature)
            options = (config, objective, inputs.num_items_in_batch, execution.described())
            numbers = {"hidden": local.hidden, **inputs.numbers}
            if head.process_group is not None:
                whole |= planned.described_rows() | options_of_loss(*options) | tokens_of_loss(tokens, numbers)
        planned = planned.divided(whole)
        rows = planned.check_range("completion_ids", rows)
        if group is not None:
            part |= {"vocab_size": head.vocab_size, **planned.described()}
            part |= options_of_loss(*options) | part_of_loss(tokens, numbers)
    return planned, tokens, rows


def _engine(policy: Objective, planned: CheckedHead) -> Engine:
    coupling = Coupling.of(known=policy.is_known, coupled=policy.couples_tokens)
    needs_grad = planned.needs_grad
    only_hidden = needs_grad.hidden and not needs_grad.head  # only then ask: the answer may evaluate an objective
    entropy_gradient = only_hidden and policy.has_entropy_gradient
    mixed_gradient = planned.plan.teacher is not None
    return planned.choose_engine(coupling, entropy_gradient=entropy_gradient, mixed_gradient=mixed_gradient)


def _with_coefficients(request: Request, policy: Objective) -> Request:
    """Return `request` with each row's coefficients, from its own numbers; and the loss, if the backend fuses."""

    def coefficients(index: Tensor, stats: RowStats) -> Coefficients:
        assert stats.entropies is not None
        return policy.coefficients(index, stats.logps, stats.entropies)

    return replace(request, coefficients=coefficients, token_loss=policy.token_loss() if fuses(request.plan) else None)
