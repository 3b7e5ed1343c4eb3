"""One call of the loss: its arguments checked, its engine chosen, and what becomes of its rows' statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.aggregate import check_num_items, token_weights
from grpo_kernels.backends.rows import FusedRowBackend, RowStats
from grpo_kernels.batch import Tokens, read_tokens
from grpo_kernels.checks import check_config, check_head, check_terms
from grpo_kernels.config import LossConfig
from grpo_kernels.custom import CustomObjective, TokenInputs
from grpo_kernels.engine.passes import RECOMPUTING, STORING, Request
from grpo_kernels.engine.plan import Coupling
from grpo_kernels.engine.sweep import Coefficients, HeadConfig, Wants
from grpo_kernels.evaluation import Evaluation
from grpo_kernels.head import head_config, pick_engine, read_rows, wanted
from grpo_kernels.metrics import Metrics, loss_metrics
from grpo_kernels.objective import PolicyObjective

Objective = PolicyObjective | CustomObjective


@dataclass(frozen=True)
class LossCall:
    """A loss that is ready to be computed: `loss_pass(head, call.request, call.evaluate)`."""

    config: LossConfig
    tokens: Tokens
    request: Request
    objective: Objective

    def evaluate(self, stats: RowStats) -> Evaluation:
        """The loss and its gradient, from the statistics of all rows."""
        assert stats.entropies is not None
        if self.request.token_loss is None:
            return self.objective.evaluate(stats.logps, stats.entropies)
        assert isinstance(self.objective, PolicyObjective)
        return self.objective.assemble(stats.extras, stats.entropies)

    def metrics(self, stats: RowStats, evaluation: Evaluation) -> Metrics:
        """What happened, from the statistics of all rows and what they evaluated to."""
        assert stats.entropies is not None
        return loss_metrics(self.config, self.tokens, stats.entropies, evaluation, self._carried(evaluation).sum())

    def _carried(self, evaluation: Evaluation) -> Tensor:
        """(n,) bool: the rows that a backward product is done for."""
        a, b, request = evaluation.a, evaluation.b, self.request
        if request.engine in RECOMPUTING:
            return a != 0 if b is None else (a != 0) | (b != 0)
        if request.graded is not None:
            return request.graded
        return torch.full_like(a, request.engine in STORING, dtype=torch.bool)


def plan_loss(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor | None,
    advantages: Tensor,
    *,
    bias: Tensor | None,
    old_per_token_logps: Tensor | None,
    ref_per_token_logps: Tensor | None,
    sampling_per_token_logps: Tensor | None,
    importance_sampling_ratio: Tensor | None,
    num_items_in_batch: float | Tensor | None,
    config: LossConfig,
    objective: Callable[[TokenInputs], Tensor] | None,
    cu_seqlens: Tensor | None,
    engine: str,
    backend: str,
    workspace_bytes: int | None,
    wants: Wants | None = None,
    dtype: torch.dtype | None = None,
) -> LossCall:
    """Check the arguments of `grpo_loss` and plan its call; `wants` and `dtype` are read off the tensors if not given.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    check_config(config)
    check_terms(config, ref_per_token_logps, objective)
    check_head(hidden, weight, bias, ranks=(3,) if cu_seqlens is None else (2,))
    check_num_items(num_items_in_batch)
    wants = wanted(hidden, weight, bias) if wants is None else wants
    head = head_config(hidden, weight, wants, config, backend, workspace_bytes, dtype)
    tokens = read_tokens(
        hidden,
        completion_ids,
        completion_mask,
        advantages,
        cu_seqlens=cu_seqlens,
        old_per_token_logps=old_per_token_logps,
        ref_per_token_logps=ref_per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        importance_sampling_ratio=importance_sampling_ratio,
        dtype=head.accumulator,
    )
    rows = read_rows("completion_ids", tokens.ids, tokens.layout.positions, weight.shape[0], 1.0 / config.temperature)
    weights = token_weights(config, tokens.layout, num_items_in_batch, tokens.advantages.dtype)
    policy: Objective
    if objective is None:
        policy = PolicyObjective(config, tokens, weights)
    else:
        policy = CustomObjective(objective, tokens, weights)
    engine = _engine(policy, wants, head, weight, engine)
    graded = policy.may_have_gradient() if engine in STORING else None
    request = Request(rows=rows, config=head, wants=wants, engine=engine, graded=graded)
    if engine == "one_pass":

        def coefficients(index: Tensor, stats: RowStats) -> Coefficients:
            assert stats.entropies is not None
            return policy.coefficients(index, stats.logps, stats.entropies)

        token_loss = policy.token_loss() if isinstance(head.backend, FusedRowBackend) else None
        request = replace(request, coefficients=coefficients, token_loss=token_loss)
    return LossCall(config, tokens, request, policy)


def _engine(policy: Objective, wants: Wants, head: HeadConfig, weight: Tensor, engine: str) -> str:
    coupling = Coupling.of(known=policy.is_known, coupled=policy.couples_tokens)
    only_hidden = wants.hidden and not wants.head  # where it matters; asking a custom objective evaluates it
    entropy_gradient = only_hidden and policy.has_entropy_gradient
    return pick_engine(coupling, wants, head, weight, entropy_gradient=entropy_gradient, engine=engine)
