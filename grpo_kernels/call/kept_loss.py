"""One call of the loss over kept sets: log-probabilities of `call.kept`, and the loss of these."""

from __future__ import annotations

from typing import Any

from grpo_kernels.base.agreement import check_same
from grpo_kernels.base.checks import check_gather, check_ids
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.given import given_loss
from grpo_kernels.call.kept import KeptInputs, score_kept
from grpo_kernels.call.loss import Custom, check_loss, counted_tokens, expectation_of, make_objective
from grpo_kernels.call.options import Execution
from grpo_kernels.call.output import LossOutput
from grpo_kernels.call.ranks import options_of_loss, tokens_of_loss
from grpo_kernels.engine.products import accumulator_of
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.objective.config import LossConfig


def kept_loss(
    inputs: LossInputs,
    head: LMHead,
    execution: Execution,
    config: LossConfig,
    objective: Custom | None,
    kept_ids: Any,  # (B, T, K) or (N, K), or `KeptIds`
    without_set: Any,
) -> LossOutput:
    """Compute the loss over kept sets; `without_set` as in `linear_logprob`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, "grpo_loss") as values:
        local = head.local()
        check_loss(inputs, config, objective, has_reference=head.reference is not None)
        _check_whole(config, execution)
        local.check(ranks=(3,) if inputs.cu_seqlens is None else (2,))
        check_ids("completion_ids", inputs.completion_ids, local.hidden)
        execution.check()
        check_gather(execution.gather)
        tokens = counted_tokens(inputs, config, objective, accumulator_of(local.compute_dtype()))
        if head.process_group is not None:
            values |= options_of_loss(config, objective, inputs.num_items_in_batch, execution.described())
            values |= tokens_of_loss(tokens, {"hidden": local.hidden, **inputs.numbers})
    policy = make_objective(config, objective, tokens, inputs)
    assert inputs.completion_ids is not None
    scores, of_sets = score_kept(
        KeptInputs(
            inputs.completion_mask,
            config.temperature,
            (),
            inputs.completion_ids,
            kept_ids,
            without_set,
            entropy_over=True,
            execution=execution,
            expected=expectation_of(policy, tokens) if without_set == "full" else None,
            others=inputs.logps,
        ),
        head,
    )
    num_items = inputs.num_items_in_batch is not None
    out = given_loss(scores.logps, scores.entropies, config, tokens, policy, num_items=num_items, engine="kept_sets")
    out.metrics = out.metrics.joined(of_sets)
    return out


def _check_whole(config: LossConfig, execution: Execution) -> None:
    """Raise if the loss needs the whole vocabulary, or the ranks of whole sequences."""
    if config.needs_reference_head:
        raise ValueError(
            "kl_estimator: expected 'k1', 'k2' or 'k3' with kept_ids, which truncate the policy, got 'full', the "
            "divergence over the whole vocabulary"
        )
    if execution.sequence_group is not None:
        raise ValueError("sequence_group: expected None with kept_ids, got a process group")
