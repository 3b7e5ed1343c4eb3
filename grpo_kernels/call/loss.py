"""One call of the loss: its arguments checked, its engine chosen, and what becomes of its rows' statistics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.backends.interface import FusedRowBackend, RowStats
from grpo_kernels.base.agreement import Agreement
from grpo_kernels.base.checks import check_gather, check_head
from grpo_kernels.batch.tokens import Tokens, read_tokens
from grpo_kernels.call.context_parallel import check_span, describe_part, spanned
from grpo_kernels.call.described import describe_options, describe_tokens
from grpo_kernels.call.projection import head_config, of_shard, pick_engine, read_rows, wanted
from grpo_kernels.config import LossConfig
from grpo_kernels.engine.gradients import Wants
from grpo_kernels.engine.operands import Coefficients, HeadConfig, Rows
from grpo_kernels.engine.passes import RECOMPUTING, STORING, Gather, Request
from grpo_kernels.engine.plan import Coupling
from grpo_kernels.head.local_shard import LocalHead, describe_shard, described_head, divided, local_head, sharding_group
from grpo_kernels.head.lora import LoRA, check_lora
from grpo_kernels.objective.checks import check_config, check_terms, warn_of_inputs
from grpo_kernels.objective.custom import CustomObjective, TokenInputs
from grpo_kernels.objective.evaluation import Evaluation
from grpo_kernels.objective.measure import loss_metrics
from grpo_kernels.objective.metrics import Metrics
from grpo_kernels.objective.normaliser import check_num_items, token_weights
from grpo_kernels.objective.policy import PolicyObjective
from grpo_kernels.objective.sampler_correction import check_sampling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Objective = PolicyObjective | CustomObjective


@dataclass(frozen=True)
class LossCall:
    """A loss that is ready to be computed: `loss_pass(head, call.request, call.evaluate)`."""

    config: LossConfig
    tokens: Tokens
    request: Request
    objective: Objective
    head: LocalHead  # the tensors that are multiplied
    num_items: bool  # whether there is a num_items_in_batch

    def evaluate(self, stats: RowStats) -> Evaluation:
        """The loss and its gradient, from the statistics of all rows."""
        assert stats.entropies is not None
        if self.request.token_loss is None:
            return self.objective.evaluate(stats.logps, stats.entropies)
        assert isinstance(self.objective, PolicyObjective)
        return self.objective.assemble(stats.terms, stats.entropies)

    def metrics(self, stats: RowStats, evaluation: Evaluation) -> Metrics:
        """What happened, from the statistics of all rows and what they evaluated to."""
        assert stats.entropies is not None
        graded = self._carried(evaluation).sum()
        return loss_metrics(self.config, self.tokens, stats.entropies, evaluation, graded, num_items=self.num_items)

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
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    gather: Gather | None = None,
    sequence_group: ProcessGroup | None = None,
) -> LossCall:
    """Check the arguments of `grpo_loss` and plan its call; `wants` and `dtype` are read off the tensors if not given.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    process_group = sharding_group(hidden, weight, process_group)
    per_token = {
        "old_per_token_logps": old_per_token_logps,
        "ref_per_token_logps": ref_per_token_logps,
        "sampling_per_token_logps": sampling_per_token_logps,
        "importance_sampling_ratio": importance_sampling_ratio,
    }
    with Agreement("sequence_group", sequence_group, "grpo_loss") as parts:
        with Agreement("process_group", process_group, "grpo_loss") as ranks:
            tensors = local_head(hidden, weight, bias, lora, process_group, vocab_size)
            check_config(config)
            check_terms(config, ref_per_token_logps, objective)
            check_sampling(config, sampling_per_token_logps, importance_sampling_ratio)
            check_span(sequence_group, cu_seqlens, objective)
            check_head(*tensors[:3], ranks=(3,) if cu_seqlens is None else (2,))
            check_lora(tensors.lora, tensors.hidden, tensors.weight)
            check_num_items(num_items_in_batch)
            check_gather(gather)
            wants = wanted(*tensors) if wants is None else wants
            head = head_config(*tensors[:2], wants, config, backend, workspace_bytes, dtype, engine=engine)
            tokens = read_tokens(
                tensors.hidden,
                completion_ids,
                completion_mask,
                advantages,
                cu_seqlens=cu_seqlens,
                **per_token,
                dtype=head.accumulator,
            )
            warn_of_inputs(
                config,
                objective,
                num_items_in_batch=num_items_in_batch,
                old_per_token_logps=old_per_token_logps,
                sampling_per_token_logps=sampling_per_token_logps,
            )
            rows = Rows(tokens.layout.positions, tokens.ids, 1.0 / config.temperature)
            asked = {"engine": engine, "backend": backend, "workspace_bytes": workspace_bytes}
            options = (config, objective, num_items_in_batch, asked)
            inputs = {"hidden": tensors.hidden, "advantages": advantages, **per_token}
            if ranks:
                describe_shard(ranks, tensors, wants, head, vocab_size)
                describe_options(ranks, *options)
                describe_tokens(ranks, tokens, inputs)
        tensors, shard = divided(tensors, ranks, vocab_size)
        head = of_shard(head, shard, tensors.weight, wants, workspace_bytes)
        rows = read_rows("completion_ids", rows, tensors.weight.shape[0], shard)
        if parts:
            parts.same({"vocab_size": vocab_size})
            parts.same(described_head(tensors, wants, head, own_rows=shard is not None))
            describe_options(parts, *options)
            describe_part(parts, tokens, inputs)
    if sequence_group is not None:
        tokens = spanned(tokens, sequence_group)
    with Agreement("sequence_group", sequence_group, "the engine of grpo_loss") as parts:
        weights = token_weights(config, tokens.layout, num_items_in_batch, tokens.advantages.dtype)
        policy = _objective(config, objective, tokens, weights)
        engine = _engine(policy, wants, head, engine, only_logps=lora is None)
        parts.say({"lean": engine == "lean"})
    if any(parts.every.get("lean", ())):  # a rank is short of memory
        engine = "lean"
    graded = policy.may_have_gradient() if engine in STORING else None
    request = Request(rows=rows, config=head, wants=wants, engine=engine, graded=graded, gather=gather or nullcontext)
    if engine == "one_pass":

        def coefficients(index: Tensor, stats: RowStats) -> Coefficients:
            assert stats.entropies is not None
            return policy.coefficients(index, stats.logps, stats.entropies)

        fuses = isinstance(head.backend, FusedRowBackend) and shard is None  # which joins the ranks in between
        token_loss = policy.token_loss() if fuses else None
        request = replace(request, coefficients=coefficients, token_loss=token_loss)
    return LossCall(config, tokens, request, policy, tensors, num_items_in_batch is not None)


def _objective(
    config: LossConfig, objective: Callable[[TokenInputs], Tensor] | None, tokens: Tokens, weights: Tensor
) -> Objective:
    if objective is not None:
        return CustomObjective(objective, tokens, weights)
    policy = PolicyObjective(config, tokens, weights)
    if tokens.layout.span is not None:
        policy.settle()
    return policy


def _engine(policy: Objective, wants: Wants, head: HeadConfig, engine: str, *, only_logps: bool) -> str:
    coupling = Coupling.of(known=policy.is_known, coupled=policy.couples_tokens)
    only_hidden = wants.hidden and not wants.head  # where it matters; asking a custom objective evaluates it
    entropy_gradient = only_hidden and policy.has_entropy_gradient
    return pick_engine(coupling, wants, head, entropy_gradient=entropy_gradient, engine=engine, only_logps=only_logps)
