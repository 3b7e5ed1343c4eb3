"""The GRPO family of losses straight from hidden states. Read this file to see the algorithm.

::

    tokens  = the positions that count                                           batch.py
    weights = the loss type's normaliser, one weight a token                     aggregate.py
    logps, entropies = hidden @ weight.T, a chunk of rows at a time              engine/sweep.py, backends/
    R       = logps - old_per_token_logps                                        objective.py
    l       = -min(e^R A, clip(e^R, 1 - epsilon, 1 + epsilon_high) A) + beta KL  surrogates.py
    loss    = sum(weights * l) - entropy_coef * mean entropy
    engine  = the cheapest that gives this loss its exact gradient               engine/plan.py

and the gradient of the logits is ``a_t (1[j = y_t] - p_j) - b_t p_j (log p_j + entropy_t)`` with the objective's two
numbers a_t = d loss / d logp_t and b_t = d loss / d entropy_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.aggregate import check_num_items, token_weights
from grpo_kernels.backends.rows import FusedRowBackend, RowStats
from grpo_kernels.batch import Tokens, read_tokens
from grpo_kernels.checks import check_config, check_head, check_terms
from grpo_kernels.config import LossConfig
from grpo_kernels.custom import CustomObjective, TokenInputs
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.functions import LinearLogprob, OnePassLoss, Request
from grpo_kernels.engine.plan import Coupling
from grpo_kernels.engine.sweep import Coefficients, HeadConfig, Wants
from grpo_kernels.logprob import head_config, pick_engine, read_rows, wanted
from grpo_kernels.metrics import Metrics, loss_metrics
from grpo_kernels.objective import Evaluation, PolicyObjective

Objective = PolicyObjective | CustomObjective


@dataclass(frozen=True)
class LossOutput:
    """What `grpo_loss` returns.

    Attributes:
        loss: 0-d, attached to the graph; fp32 (fp64 for fp64 inputs).
        per_token_logps: (B, T) or (N,), detached, 0 where masked; of the dtype of `loss`.
        entropies: likewise.
        metrics: name -> mean, and ``metrics.pairs``: name -> (sum, count).
        engine: which engine served the call.
    """

    loss: Tensor
    per_token_logps: Tensor
    entropies: Tensor
    metrics: Metrics
    engine: str


def grpo_loss(
    hidden: Tensor,  # (B, T, H), or packed (N, H)
    weight: Tensor,  # (V, H)
    completion_ids: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    old_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    sampling_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,); (N,)
    num_items_in_batch: float | Tensor | None = None,
    config: LossConfig | None = None,
    objective: Callable[[TokenInputs], Tensor] | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    engine: str = "auto",
    backend: str = "auto",
    workspace_bytes: int | None = None,
) -> LossOutput:
    """The loss that `config` describes, from hidden states, never building the (tokens, vocabulary) logits.

    What stands at a masked position, in whatever argument, is never read. Hidden states, weight and bias get exact
    gradients, all other arguments are constants; a batch without a counted token gives an attached loss of 0.

    Args:
        hidden: hidden states that predict `completion_ids` (aligned: nothing is shifted here), floating.
        weight, bias: the head.
        completion_ids: integers; those that count must lie in [0, V).
        completion_mask: bool, int or float; non-zero counts. None: every position does, without waiting for the device
            to say how many.
        advantages: one a sequence or one a token; packed with N = B, one a sequence.
        old_per_token_logps: of the policy that generated; absent: on-policy, the ratio is exactly 1.
        ref_per_token_logps: of the reference model; needed if ``config.beta`` is not 0.
        sampling_per_token_logps: the sampler's own, for the off-policy mask; NaN: it could not score the token.
        importance_sampling_ratio: weight of the policy term to correct for the sampler; ``"vespo"`` takes it into w.
        num_items_in_batch: normaliser of ``"dapo"``, ``"cispo"`` and ``"vespo"``: a number, accumulation and world size
            included, clamped at 1; absent: the counted tokens of this call. The other loss types, and the entropy
            bonus, are means over this call: under gradient accumulation the caller divides.
        config: default `LossConfig()`.
        objective: a per-token loss of your own in place of all of the config's terms, see `grpo_kernels.custom`; of
            `config` only the normaliser, `temperature` and the head's fields then apply.
        cu_seqlens: bounds of the packed sequences, (B + 1,) int32 or int64; per-token arguments are then (N,). Read on
            the host.
        engine, backend, workspace_bytes: as in `linear_logprob`.

    Returns:
        `LossOutput`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it, what was expected and what came. Raised before
            any work is done, and nothing is changed.
    """
    config = LossConfig() if config is None else config
    check_config(config)
    check_terms(config, ref_per_token_logps, objective)
    check_head(hidden, weight, bias, ranks=(3,) if cu_seqlens is None else (2,))
    check_num_items(num_items_in_batch)
    wants = wanted(hidden, weight, bias)
    head = head_config(hidden, weight, wants, config, backend, workspace_bytes)
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
    policy = _objective(config, tokens, num_items_in_batch, objective)
    request = Request(
        rows=rows,
        config=head,
        wants=wants,
        engine=_engine(policy, wants, head, weight, engine),
        graded=policy.may_have_gradient(),
    )
    loss, logps, entropies, evaluation, carried = _run(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, request, policy
    )
    positions, layout = tokens.layout.positions, tokens.layout
    metrics = loss_metrics(config, tokens, entropies.detach()[positions], evaluation, carried)
    shape = layout.shape
    return LossOutput(loss, logps.detach().view(shape), entropies.detach().view(shape), metrics, request.engine)


def _objective(
    config: LossConfig,
    tokens: Tokens,
    num_items_in_batch: float | Tensor | None,
    function: Callable[[TokenInputs], Tensor] | None,
) -> Objective:
    weights = token_weights(config, tokens.layout, num_items_in_batch, tokens.advantages.dtype)
    if function is not None:
        return CustomObjective(function, tokens, weights)
    return PolicyObjective(config, tokens, weights)


def _engine(policy: Objective, wants: Wants, head: HeadConfig, weight: Tensor, engine: str) -> str:
    coupling = Coupling.KNOWN if policy.is_known else Coupling.COUPLED if policy.couples_tokens else Coupling.TOKEN
    only_hidden = wants.hidden and not wants.head  # where it matters; asking a custom objective evaluates it
    entropy_gradient = only_hidden and policy.has_entropy_gradient
    return pick_engine(coupling, wants, head, weight, entropy_gradient=entropy_gradient, engine=engine)


def _run(
    hidden: Tensor,  # (N, H)
    weight: Tensor,
    bias: Tensor | None,
    request: Request,
    policy: Objective,
) -> tuple[Tensor, Tensor, Tensor, Evaluation, Tensor]:
    """Loss, logps (N,), entropies (N,), the evaluation behind the loss, and how many rows carried gradient."""
    positions = request.rows.positions
    if request.engine == "one_pass":

        def coefficients(index: Tensor, stats: RowStats) -> Coefficients:
            assert stats.entropies is not None
            return policy.coefficients(index, stats.logps, stats.entropies)

        done: list[Evaluation] = []  # an autograd Function returns tensors only

        def finish(stats: RowStats) -> Tensor:
            assert stats.entropies is not None
            if token_loss is None:
                done.append(policy.evaluate(stats.logps, stats.entropies))
            else:
                assert isinstance(policy, PolicyObjective)
                done.append(policy.assemble(stats.extras, stats.entropies))
            return done[0].loss.clone()  # what is returned gets attached to the graph, the evaluation must not

        token_loss = policy.token_loss() if isinstance(request.config.backend, FusedRowBackend) else None
        request = replace(request, coefficients=coefficients, token_loss=token_loss)
        loss, logps, entropies = OnePassLoss.apply(hidden, weight, bias, request, finish)
        assert request.graded is not None
        return loss, logps, entropies, done[0], request.graded.sum()

    logps, entropies = LinearLogprob.apply(hidden, weight, bias, request)
    evaluation = policy.evaluate(logps.detach()[positions], entropies.detach()[positions])
    loss = _ObjectiveLoss.apply(logps, entropies, positions, evaluation)
    moved = evaluation.a != 0 if evaluation.b is None else (evaluation.a != 0) | (evaluation.b != 0)
    if request.engine in ("score", "score_dot"):
        moved = torch.zeros_like(moved)
    carried = request.graded if request.engine == "frozen" else moved
    assert carried is not None
    return loss, logps, entropies, evaluation, carried.sum()


class _ObjectiveLoss(torch.autograd.Function):
    """The objective's loss, already evaluated, as a function of all log-probabilities and entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,  # (N,)
        entropies: Tensor,  # (N,)
        positions: Tensor,  # (n,)
        evaluation: Evaluation,
    ) -> Tensor:
        ctx.total = logps.shape[0]
        ctx.save_for_backward(positions, evaluation.a, evaluation.b)
        return evaluation.loss.clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        positions, a, b = ctx.saved_tensors

        def spread(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            full = x.new_zeros(ctx.total)
            full[positions] = d_loss * x
            return full

        return spread(a), spread(b), None, None


class GRPOLoss(nn.Module):
    """`grpo_loss` as a module.

    Args:
        config: the loss; or its fields as keyword arguments, ``GRPOLoss(loss_type="grpo", beta=0.04)``; given both, the
            fields replace those of `config`.
        objective, engine, backend, workspace_bytes: as in `grpo_loss`.

    Raises:
        TypeError, ValueError: an unknown field, or a wrong value.
    """

    def __init__(
        self,
        config: LossConfig | None = None,
        *,
        objective: Callable[[TokenInputs], Tensor] | None = None,
        engine: str = "auto",
        backend: str = "auto",
        workspace_bytes: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        config = LossConfig() if config is None else config
        check_config(config)
        self.config = replace(config, **fields)
        self.objective = objective
        self.engine, self.backend, self.workspace_bytes = engine, backend, workspace_bytes

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor | None,
        advantages: Tensor,
        **inputs: Any,
    ) -> LossOutput:
        """`grpo_loss` with this module's config; shapes, results and errors as there.

        `inputs` are its other arguments: bias, old_per_token_logps, ref_per_token_logps, cu_seqlens, ...
        """
        return grpo_loss(
            hidden,
            weight,
            completion_ids,
            completion_mask,
            advantages,
            config=self.config,
            objective=self.objective,
            engine=self.engine,
            backend=self.backend,
            workspace_bytes=self.workspace_bytes,
            **inputs,
        )

    def extra_repr(self) -> str:
        return repr(self.config)
