"""The public calls as torch.compile traces them: an op (`ops/`), and autograd around it whose backward is traced too.

Nothing here branches on a value, and no number becomes an input of the graph. Results are those of the eager calls, bit
for bit. Imported only while something is compiled, since the decorators of `torch.compiler` load the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends import name_backend
from grpo_kernels.base.checks import check_fake
from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.loss import LossCall
from grpo_kernels.call.output import LossOutput, Scores
from grpo_kernels.call.run import Execution
from grpo_kernels.call.scores import ScoreCall
from grpo_kernels.compiled.ops import linear_logprob as logprob_op
from grpo_kernels.compiled.ops import policy_loss as loss_op
from grpo_kernels.engine.engines import ONE_PASS, TWO_PASS, choose_engine
from grpo_kernels.engine.records import NeedsGrad
from grpo_kernels.engine.request import Coupling, Situation, Stored
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.objective.checks import check_config
from grpo_kernels.objective.config import LossConfig, config_of
from grpo_kernels.objective.measure import metric_names
from grpo_kernels.objective.metrics import Metrics
from grpo_kernels.objective.normaliser import averaged_over

_POLICY_LOSS = torch.ops.grpo_kernels.policy_loss.default
_LINEAR_LOGPROB = torch.ops.grpo_kernels.linear_logprob.default
_LINEAR_LOGPROB_BACKWARD = torch.ops.grpo_kernels.linear_logprob_backward.default

T = TypeVar("T")


@torch.compiler.disable(
    reason="grpo_kernels: a function of yours (objective, gather), an adapter, padding rows, a group of ranks, or what "
    "depends on data (kept sets, a loss from given log-probabilities) runs eagerly, outside any graph"
)
def eagerly(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call `function` eagerly: a graph break, which ``fullgraph=True`` refuses with the reason above."""
    return function(*arguments, **options)


def policy_loss(
    eager: Callable[..., LossOutput], call: LossCall, head: LMHead, execution: Execution
) -> LossOutput:
    """Compute the loss by one op, or by `eager` if a graph cannot hold the call."""
    check_config(call.config)
    execution.check()
    ids, mask = call.inputs.completion_ids, call.inputs.completion_mask
    head, execution = _for_fakes(
        head,
        execution,
        ("completion_ids", ids),
        ("completion_mask", mask),
        objective=call.objective,
        reference=head.reference,
    )
    if head.is_plain and execution.gather is None and call.objective is None:
        return LossOutput(*_policy_loss(call.inputs, head, execution, call.config))
    return eagerly(eager, call, head, execution)


def linear_logprob(
    eager: Callable[..., Scores], call: ScoreCall, head: LMHead, execution: Execution
) -> Scores:
    """Compute log-probabilities by one op, which ignores an expectation; or by `eager`."""
    execution.check()
    if (
        call.expected is not None and execution.engine == ONE_PASS.name
    ):  # an expectation only buys speed
        execution = replace(execution, engine="auto")
    head, execution = _for_fakes(head, execution, ("ids", call.ids), ("mask", call.mask))
    if head.is_plain and execution.gather is None:
        return _linear_logprob(call, head, execution)
    return eagerly(eager, call, head, execution)


def _for_fakes(
    head: LMHead, execution: Execution, ids: tuple[str, Any], mask: tuple[str, Any], **refused: Any
) -> tuple[LMHead, Execution]:
    """With fake tensors, check devices, dtypes and shapes, and drop the options on which no shape depends."""
    if torch.compiler.is_compiling():
        return head, execution
    check_fake(
        head.hidden,
        head.weight,
        head.bias,
        ids,
        mask,
        lora=head.lora,
        process_group=head.process_group,
        **refused,
    )
    return replace(head, vocab_size=None), replace(execution, gather=None)


def _policy_loss(
    inputs: LossInputs, head: LMHead, execution: Execution, config: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Metrics, str, str]:
    """Return the fields of the `LossOutput` of `grpo_loss`, for a head of plain tensors."""
    hidden, weight, bias = head.hidden, head.weight, head.bias
    ids: Any = inputs.completion_ids
    mask, num_items_in_batch = inputs.completion_mask, inputs.num_items_in_batch
    needs_grad, dtype = head.needs_grad(), head.compute_dtype()
    engine, stores, has_b, temperature, loss_over, pair_names, extreme_names = _plan_loss(
        config.key,
        inputs.old_per_token_logps is None,
        inputs.sampling_per_token_logps is not None,
        inputs.importance_sampling_ratio is not None,
        num_items_in_batch is not None,
        needs_grad.hidden,
        needs_grad.head,
        execution.engine,
    )
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor):
        # torch.full would specialise the graph on the number: a new graph for each value
        num_items_in_batch = (
            torch.ones((), dtype=torch.float64, device=hidden.device) * num_items_in_batch
        )
    computed = (
        *_constants(head),
        engine,
        execution.backend,
        execution.workspace_bytes,
        dtype,
        _three(needs_grad),
    )
    results = loss_op.LossResults(
        *_POLICY_LOSS(
            hidden.detach(),
            weight.detach(),
            None if bias is None else bias.detach(),
            ids,
            mask,
            inputs.advantages,
            inputs.old_per_token_logps,
            inputs.ref_per_token_logps,
            inputs.sampling_per_token_logps,
            inputs.importance_sampling_ratio,
            num_items_in_batch,
            inputs.cu_seqlens,
            config.key,
            *computed,
        )
    )
    loss = results.loss
    if needs_grad.hidden or needs_grad.head:
        if stores:
            stored = (results.d_hidden, results.d_weight, results.d_bias)
            loss = _Stored.apply(hidden, weight, bias, mask, loss, *stored)
        else:
            settings = logprob_op.Settings(temperature, *computed)
            stats = (
                results.logps,
                results.entropies if has_b else None,
                results.max_logit,
                results.log_sum,
            )
            logps, entropies = _SecondPass.apply(
                settings, hidden, weight, bias, ids, mask, None, *stats
            )
            d_entropies = results.d_entropies if has_b else None
            loss = _Coefficients.apply(logps, entropies, loss, results.d_logps, d_entropies)
    pairs = {
        name: (x[0], x[1]) for name, x in zip(pair_names, results.pairs.unbind(0), strict=True)
    }
    extremes = dict(zip(extreme_names, results.extremes.unbind(0), strict=True))
    sequences = ids.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    metrics = Metrics(pairs, extremes, sequences=sequences, loss_over=loss_over)
    backend = _plan_backend(execution.backend, hidden.device.type, dtype)
    return loss, results.logps, results.entropies, metrics, engine, backend


def _constants(head: LMHead) -> tuple[float | None, float, LogitsDtype]:
    """Return the constants of `head`, as the ops take them."""
    return head.final_logit_softcapping, head.logit_scale, head.logits_dtype


def _three(needs_grad: NeedsGrad) -> list[bool]:
    """Return the flags of hidden states, weight and bias, as the ops take them."""
    return [needs_grad.hidden, needs_grad.weight, needs_grad.bias]


@torch.compiler.assume_constant_result  # from strings and bools: a graph must not read the config's numbers
def _plan_loss(
    key: str,
    on_policy: bool,
    sampled: bool,
    importance_ratio: bool,
    num_items: bool,
    hidden_trains: bool,
    head_trains: bool,
    engine: str,
) -> tuple[str, bool, bool, float, str, tuple[str, ...], tuple[str, ...]]:
    """Return the engine's name, True if it stores the gradient, True if the loss depends on the entropies, the
    temperature, `averaged_over`, and the metrics' names (pairs, extremes).
    """
    config = config_of(key)
    is_known = config.knows_gradient(on_policy=on_policy, sampled=sampled)
    coupled = config.couples_tokens(on_policy=on_policy, sampled=sampled)
    has_b = config.entropy_coef != 0.0
    situation = Situation(
        Coupling.of(known=is_known, coupled=coupled),
        hidden_trains=hidden_trains,
        head_trains=head_trains,
        entropy_gradient=has_b and not head_trains,
    )
    chosen = choose_engine(situation, engine)
    names = metric_names(config, importance_ratio=importance_ratio, sampled=sampled)
    over = averaged_over(config, num_items=num_items)
    return chosen.name, chosen.stores_gradient, has_b, config.temperature, over, *names


@torch.compiler.assume_constant_result
def _plan_backend(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the name of the backend that the op will choose."""
    return name_backend(backend, torch.device(device_type), dtype)[0]


def _linear_logprob(call: ScoreCall, head: LMHead, execution: Execution) -> Scores:
    """Return the scores of `linear_logprob`, for a head of plain tensors."""
    hidden, weight, bias, temperature = head.hidden, head.weight, head.bias, call.temperature
    ids, mask, outputs, needs_grad = call.ids, call.mask, call.outputs, head.needs_grad()
    entropy = "entropy" in outputs
    engine, stores = _plan_logprob(needs_grad.hidden, needs_grad.head, entropy, execution.engine)
    temperatures = temperature.detach() if isinstance(temperature, Tensor) else None
    settings = logprob_op.Settings(
        1.0 if isinstance(temperature, Tensor) else temperature,
        *_constants(head),
        engine=engine,
        backend=execution.backend,
        workspace_bytes=execution.workspace_bytes,
        dtype=head.compute_dtype(),
        wants=_three(needs_grad),
    )
    inputs = (
        hidden.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        ids,
        mask,
        temperatures,
    )
    results = logprob_op.ScoreResults(*_LINEAR_LOGPROB(*inputs, list(outputs), *settings))
    logps, entropies = results.logps, results.entropies if entropy else None
    if needs_grad.hidden or needs_grad.head:
        if stores:
            logps = _Stored.apply(hidden, weight, bias, mask, logps, results.d_hidden, None, None)
        else:
            stats = (logps, entropies, results.max_logit, results.log_sum)
            logps, entropies = _SecondPass.apply(
                settings, hidden, weight, bias, ids, mask, temperatures, *stats
            )
    extras = dict(zip([x for x in outputs if x != "entropy"], results.extras, strict=True))
    return Scores.of(logps=logps, entropies=entropies, **extras)


@torch.compiler.assume_constant_result
def _plan_logprob(
    hidden_trains: bool, head_trains: bool, entropy: bool, engine: str
) -> tuple[str, bool]:
    """Return the engine's name, and True if it stores d logp / d hidden."""
    situation = Situation(
        Coupling.CROSS_TOKEN,
        hidden_trains=hidden_trains,
        head_trains=head_trains,
        entropy_gradient=False,  # as in the eager call, where only the backward can tell
    )
    chosen = choose_engine(situation, engine)
    if chosen.stores is Stored.PER_ROW and entropy:
        chosen = TWO_PASS
    return chosen.name, chosen.stores is Stored.PER_ROW


class _Stored(torch.autograd.Function):
    """A loss, or log-probabilities, with the gradients that the op stored.

    ``forward(ctx, hidden, weight, bias, mask, value, *gradients)`` -> value; gradients in hidden, weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        value: Tensor,  # () or (...)
        *gradients: Tensor | None,
    ) -> Tensor:
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        ctx.save_for_backward(mask, *gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        needed, (mask, *stored) = ctx.needs_input_grad, ctx.saved_tensors
        # a stored gradient is 0 where masked, but 0 * NaN is NaN
        of_rows = upstream if mask is None else torch.where(mask.ne(0), upstream, 0.0)
        gradients = [
            (x * factor).to(dtype) if wanted else None
            for x, factor, dtype, wanted in zip(
                stored,
                (of_rows[..., None], upstream, upstream),
                ctx.dtypes,
                needed[:3],
                strict=True,
            )
        ]
        return *gradients, None, None, None, None, None


class _SecondPass(torch.autograd.Function):
    """Log-probabilities and entropies whose gradient is recomputed.

    ``forward(ctx, settings, hidden, weight, bias, ids, mask, temperatures, logps, entropies, max_logit, log_sum)`` ->
    logps, entropies (None if they are None).
    """

    @staticmethod
    def forward(
        ctx: Any, settings: logprob_op.Settings, *tensors: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.settings = settings
        ctx.save_for_backward(*tensors)
        logps, entropies = (None if x is None else x.clone() for x in tensors[6:8])
        return logps, entropies

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = _LINEAR_LOGPROB_BACKWARD(
            *saved[:6], d_logps, d_entropies, *saved[6:], *ctx.settings
        )
        gradients = [
            x if wanted else None for x, wanted in zip(grads, ctx.settings.wants, strict=True)
        ]
        return None, *gradients, *[None] * 7


class _Coefficients(torch.autograd.Function):
    """A loss with a = d loss / d logp and b = d loss / d entropy: ``forward(ctx, logps, entropies, loss, a, b)``."""

    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, entropies: Tensor | None, loss: Tensor, a: Tensor, b: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return d_loss * a, None if b is None else d_loss * b, None, None, None
