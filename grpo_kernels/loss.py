"""The GRPO family of losses, computed from hidden states or from given log-probabilities.

`grpo_loss` with the engine one_pass, step by step. With old_per_token_logps as `old`, advantages as
A, and w one weight per token (the loss type's normalizer, objective/loss_types.py), the loss is::

    R    = logps - old                                                    objective/policy.py
    l    = -min(e^R A, clip(e^R, 1 - epsilon, 1 + epsilon_high) A)        backends/formulas.py
           + beta e^R KL                                                  objective/policy.py
    loss = sum(w * l) - entropy_coef * mean entropy                       objective/policy.py
    a, b = d loss / d logps, d loss / d entropies                         the same

and its forward and backward are::

    a module as the head: its parameters, within its hooks   head_module.py: within_module
    tokens = the positions that count                        tokens.py: read_tokens
    engine = the cheapest that gives this gradient exactly   engine/plan.py: plan, choose_engine
    for each chunk of rows, before autograd knows the call:  engine/sweep.py: first_pass, sweep
        logits = hidden @ weight.T                           Projection.project; gemm.py: Product
        z = (logits + bias) / temperature                    backends: prepare_
        logps, entropies = log softmax(z)[id], -sum p log p  backends: stats
        a, b of these rows, from logps and entropies         policy.py: coefficients_at
        dz_j = a (1[j = id] - p_j) - b p_j (log p_j + entropy)
        d_logits = dz / temperature                          backends: grad
        d_hidden = d_logits @ weight                         engine/gemm.py: Product.d_hidden
        d_weight += d_logits.T @ hidden                      Product.d_weight; sweep: GradientSums
    loss = the sum above; metrics = means over the tokens    policy.py: evaluate; metrics.py
    d_hidden and d_weight are attached to the loss           engine/autograd.py: LossWithGradient

    backward: both times d_loss, rounded once to the inputs' dtypes;
    rows of tokens that do not count become 0                engine/autograd.py: _input_gradients

This listing leaves out logit scale, soft-cap and rounding (`LogitTransform`), the upper bound
`delta`, the importance sampling ratio and the masks, which are factors of the policy term, and
`use_bias_correction_kl`, which decides whether e^R stands before KL. It shows the loop as the torch
backend runs it (backends/torch_rows.py). Where `Job.loss_to_fuse` allows it, as for most losses,
C++ and Triton do the lines from z to d_logits in one kernel, `fused`, row by row::

                                      csrc/, from ops.cpp: fused         backends/triton_rows/
    sums over the row                 rows.inl: reduce                   reduce.py: reduce_rows
    logps, entropies                  row_stats.h                        reduce.py: target_logp
    w * l, a                          fused_loss.h, formulas.h           fused.py: fused_kernel
    d_logits                          row_stats.h, rows.inl: gradient    grad.py: level_and_tilt,
                                                                         write_tile, store_target
    (choice of instruction set        dispatch.cpp, kernels.inl)

b is the same for all tokens (`FusedLoss.d_entropy`). On-policy, the kernel's loss lacks the policy
term, unless that is linear in logp (cispo, vespo); `PolicyLoss.evaluate` adds it. Without such a
kernel, the loss is evaluated for a and b of each chunk, and once more at the end for its value.
Rows that certainly get no gradient (`CoefficientSource.live`), such as rows with A = 0 without a KL
term and an entropy bonus, run through a separate loop without gradients.

Other engines compute the gradient later, or without a and b. If the head trains and a GPU's memory
is short, lean goes before all others. With a frozen head, a loss of the tokens' log-probabilities
alone takes frozen, even GSPO. Otherwise a loss takes two passes if a token's a and b depend on
other tokens (`PolicyLoss.is_coupled`): ratios per sequence, such as GSPO's, with old log-
probabilities, and masks that compare tokens, such as the top-entropy mask. With GSPO::

    for each chunk of rows: logits, logps, entropies         sweep; backends: stats, not fused
    R    = mean over the sequence of logps - old             objective/loss_types.py: LogRatio
    a, b = d loss / d logps, through R of the sequence       policy.py: _policy_term; to_logps
    statistics, a and b are saved                            engine/autograd.py: save

    backward: a and b times d_loss; for each chunk of the
    rows where one is not 0: logits again, then dz to
    d_weight as above                                        autograd.py: second_pass; sweep

======== =============================== ============================= =========================
engine   in the loop                     after it, in `grpo_loss`      in the backward
======== =============================== ============================= =========================
frozen   d_hidden as if a = 1, b = 0     a of all rows is kept         d_hidden times a d_loss
two_pass logps, entropies alone          a, b of all rows are kept     the loop again, from logits
                                                                       to d_hidden, d_weight
lean     as two_pass                     as two_pass                   as two_pass, by slices of the
                                                                       vocabulary (engine/slices.py)
score    as two_pass; nothing trains     -                             -
======== =============================== ============================= =========================

With a KL term over the whole vocabulary (`reference`) a row has a third number, c = d loss / d KL,
which adds ``c p_j (log p_j - log q_j - KL)`` to dz_j (backends/divergence.py). With a sampler's K
most likely ids v (`sampling_topk_ids`), a row has K more numbers, g_v = d loss / d log p_v. They
add ``sum_v g_v (1[j = v] - p_j)`` (engine/topk.py). Kept sets take a separate path:
log-probabilities over each set (engine/kept.py), then the loss of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from grpo_kernels.base import OnMissingSet
from grpo_kernels.base.checks import (
    check_entropies,
    check_finite,
    check_ids,
    check_logps,
    check_masses,
    check_ratios,
    check_tensor,
    did_you_mean,
    hints_names,
    outside_graphs,
    warn_of_graph,
    warn_once,
)
from grpo_kernels.base.tensors import accumulator_of
from grpo_kernels.engine.autograd import LossFromLogps, LossWithGradient, for_reading
from grpo_kernels.engine.kept import score_kept
from grpo_kernels.engine.plan import (
    Job,
    Rows,
    Run,
    call_heads,
    check_run,
    checked_on_all_ranks,
    plan,
)
from grpo_kernels.engine.sweep import first_pass
from grpo_kernels.engine.topk import TopKLogps, check_topk
from grpo_kernels.head import HeadLike, is_module, read_heads
from grpo_kernels.head_module import read_reference, within_module
from grpo_kernels.kept_ids import KeptIds, read_kept_ids
from grpo_kernels.objective.config import (
    FIELDS,
    LossConfig,
    check_config,
    check_inputs,
    check_kind,
    check_names,
    check_objective,
    warn_of_inputs,
    with_fields,
)
from grpo_kernels.objective.custom import CustomLoss, PerTokenLoss
from grpo_kernels.objective.expected import Expectation, expectation_of, read_expected
from grpo_kernels.objective.metrics import loss_metrics
from grpo_kernels.objective.policy import PolicyLoss, stats_of
from grpo_kernels.results import LossOutput
from grpo_kernels.tokens import Tokens, read_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.objective.config import LossFields


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
    on_missing_set: OnMissingSet
    cu_seqlens: Tensor | None


@outside_graphs
def grpo_loss(
    hidden: Tensor,  # (B, T, H), or packed (N, H)
    head: HeadLike,
    completion_ids: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    config: LossConfig | None = None,
    objective: PerTokenLoss | None = None,
    # policy terms
    old_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    reference: tuple[Tensor, HeadLike] | None = None,
    num_items_in_batch: float | Tensor | None = None,
    # the sampler
    sampling_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,); (N,)
    sampling_topk_ids: Tensor | None = None,  # (B, T, K) or (N, K)
    sampling_topk_logps: Tensor | None = None,  # (B, T, K) or (N, K)
    kept_ids: Tensor | KeptIds | None = None,  # (B, T, K) or (N, K)
    on_missing_set: OnMissingSet = "error",
    # packed sequences
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    # how it is computed
    run: Run | None = None,
    **fields: Unpack[LossFields],
) -> LossOutput:
    """Compute a GRPO-family loss from hidden states, without the (tokens, vocabulary) logits.

    ::

        out = grpo_loss(
            hidden, model.lm_head, completion_ids, completion_mask, advantages,
            old_per_token_logps=old_logps, loss_type="dapo", epsilon_high=0.28,
        )
        out.loss.backward()

    The default loss is TRL's: DAPO without a KL term. For the GRPO paper's loss, pass
    ``config=presets.GRPO``, whose KL term needs a reference model.

    Values at masked positions are never read, in any argument. Hidden states, weight, bias and
    adapter get exact gradients; all other arguments are constants. A batch without a counted token
    gives a loss of 0 that is still attached to the graph.

    Args:
        hidden: (B, T, H), or packed (N, H), floating point: hidden states that predict
            `completion_ids`. They must be aligned with the ids; nothing is shifted here.
        head: a weight (V, H), a `Head`, or the model's head module. If the model scales or
            soft-caps its logits, pass a `Head` with these values; they cannot be read from a weight
            or a module. ``grpo_kernels.transformers.describe_head(model)`` makes this `Head`.
        completion_ids: (B, T) or (N,) integers, in [0, V) at every counted position.
        completion_mask: (B, T) or (N,), bool, int or float. A token counts if its mask value is not
            0, even if the value is negative. NaN and an additive attention mask (0 and -inf) raise
            an error. None: every token counts, and no host-device sync is needed to count them.
        advantages: (B,), one per sequence, or (B, T) or (N,), one per token. If N = B, a 1-d tensor
            is ambiguous, and is read as per-sequence.
        config: the loss; default `LossConfig()`.
        objective: your own per-token loss, a function of `TokenInputs`, which replaces the config's
            loss. The function may build on the config's loss, ``tokens.loss``. If it does not, only
            the normalizer and `temperature` of `config` apply.

        Policy terms:

        old_per_token_logps: (B, T) or (N,), log-probabilities under the policy before the first
            update on these tokens. None: the tokens are on-policy, and the ratio is exactly 1.
        ref_per_token_logps: (B, T) or (N,), log-probabilities under the reference model; required
            if ``config.beta`` is not 0 and ``config.kl_estimator`` is not ``"full"``.
        reference: a pair (hidden states (B, T, H') or (N, H'), head) of the reference model, for
            the KL term over the whole vocabulary; both are constants. Required if ``config.beta``
            is not 0 and ``config.kl_estimator`` is ``"full"``. The head is a weight (V, H'), a
            `Head` or a module, with the same ids as the policy's head; H' may differ from H. This
            KL term adds one product with a head, and one chunk of logits in the workspace.
        num_items_in_batch: a number, or a 0-d tensor: the normalizer of ``"dapo"``, ``"cispo"`` and
            ``"vespo"``. Pass the number of counted tokens in the whole batch, over all accumulation
            steps and ranks. If gradients are averaged over ranks, divide this number by the number
            of ranks. A value below 1 counts as 1. None: the number of counted tokens in this call.
            The other loss types are means over this call. For those, omit `num_items_in_batch`
            (otherwise the call warns) and divide the loss by the number of accumulation steps. The
            entropy bonus is always a mean over this call.

        The sampler:

        sampling_per_token_logps: (B, T) or (N,), log-probabilities under the sampler. The
            off-policy mask reads them. If ``vllm_importance_sampling_correction`` is on in the
            config, the loss computes the importance sampling ratio from them, with no extra forward
            pass. NaN means that the sampler could not score the token, whose log-ratio counts as 0.
        importance_sampling_ratio: (B, T), (B, 1) or (B,), or packed (N,): a factor on the policy
            term that corrects for the sampler. If N = B, it is read as one per sequence, like
            `advantages`. In ``"vespo"`` it is part of VESPO's weight; ``"gmpo"`` does not use it.
        sampling_topk_ids, sampling_topk_logps: (B, T, K) or (N, K): the sampler's most likely ids
            at each position, and their log-probabilities. The ids are signed integers in any order,
            padded with -1. The log-probabilities are over the sampler's whole vocabulary, not over
            the K ids; -inf is padding. A repeated id counts once, with its first log-probability.
            With these arguments, the loss centers the score (formulas: docs/losses.md, *Score
            centering*). Available for the loss types ``"grpo"``, ``"bnpo"``, ``"dr_grpo"``,
            ``"dapo"`` and ``"luspo"`` without `old_per_token_logps`. Of the modes of
            ``vllm_importance_sampling_correction``, only ``"token_truncate"`` and ``"token_mask"``
            can be combined with these arguments.
        kept_ids: the kept set of each position, that is, the ids that a truncating sampler (top-k,
            top-p, min-p) kept there, as in `linear_logps`. Log-probabilities and entropies are
            then taken over these sets, and only the head's rows of these ids are read. Compute old,
            reference and sampling log-probabilities over the same sets.
        on_missing_set: what to do with a position whose set is empty or lacks the sampled id.
            ``"error"`` raises an error on a CPU; elsewhere, the position's results are NaN.
            ``"full"`` scores the position over the whole vocabulary.

        Packed sequences:

        cu_seqlens: (B + 1,) int32 or int64, the bounds of the packed sequences. With `cu_seqlens`,
            per-token arguments are (N,). The host reads the bounds.

        How it is computed:

        run: a `Run`, the options for engine, backend and memory.
        fields: overrides for fields of `config`, such as ``epsilon_high=0.28``.

    Returns:
        `LossOutput`: the loss, each token's log-probability and entropy, and the metrics. Only the
        loss has a gradient. To add your own terms in log-probabilities or entropies, pass an
        `objective`.

    Raises:
        TypeError, ValueError: a wrong argument. The message names the argument, the expected value
            and the actual value. The call raises before it does any work or changes anything. Only
            the inputs and the output of an `objective` are checked later, when it runs. Values
            (ids, signs of log-probabilities, ratios, NaN) are checked on a CPU only. On a GPU, an
            id outside [0, V) or a NaN at a counted position makes the loss NaN.
    """
    config, arguments = with_fields({**locals()}, "grpo_loss")  # by name, as passed
    if is_module(head):
        return within_module(grpo_loss, arguments)
    with checked_on_all_ranks("grpo_loss", arguments) as (head, run, ranks):
        # heads and ids
        check_inputs(arguments, has_reference=reference is not None)
        reference_model = None
        if config.needs_reference_head:
            reference_model = read_reference(reference, head, "reference.")
        dim = 3 if cu_seqlens is None else 2
        hidden, head, reference_model = read_heads(hidden, head, reference_model, dim=dim)
        check_ids("completion_ids", completion_ids, hidden)

        # the tokens that count, and their loss
        heads = call_heads(hidden, head, run, reference_model)
        tokens = _tokens(completion_ids, heads.dtype, arguments)
        rows = Rows.of(completion_ids, tokens.layout.positions, 1.0 / config.temperature)
        if sampling_topk_ids is not None:
            check_topk("sampling_topk_ids", sampling_topk_ids, hidden, sampling_topk_logps)
            rows, tokens = _with_topk(rows, tokens, sampling_topk_ids, sampling_topk_logps)
        token_loss = _token_loss(config, objective, tokens, num_items_in_batch)

        # how it is computed; over kept sets without an engine
        sets = None
        if kept_ids is not None or on_missing_set != "error":
            sets = read_kept_ids(kept_ids, completion_ids, on_missing_set)
        source = token_loss if sets is None else None
        job = plan(heads, rows, run, ranks, source)
    if sets is not None:
        return _loss_over_sets(job, run, sets, token_loss, arguments)

    # the loop over the rows; in one_pass and frozen it computes the gradient too
    first = first_pass(job, token_loss)
    logps, entropies = first.stats.logps, first.stats.entropies
    with torch.no_grad():
        evaluation = token_loss.evaluate(first.stats)
        if isinstance(token_loss, CustomLoss):
            token_loss.check_chunks(evaluation.coefficients)
        # tokens whose gradient is computed: in the loop above, or in the backward
        gradient_count: int | Tensor = 0 if first.grad_rows is None else len(first.grad_rows)
        if job.when == "later":
            gradient_count = evaluation.has_gradient.sum()
        metrics = loss_metrics(token_loss, logps, entropies, evaluation, gradient_count)
    # one_pass: `first` has the gradient; two_pass: the backward computes it from the coefficients
    loss = LossWithGradient.apply(
        job, evaluation.loss, first, evaluation.coefficients, *job.head.tensors
    )
    results = for_reading(loss, tokens.layout, logps, entropies)
    return LossOutput(loss, *results, metrics, job.engine, job.backend.name)


LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
_TOKEN_INPUTS = (*LOGPS, "importance_sampling_ratio", "cu_seqlens")
# In the helpers below, `arguments` are the arguments of a public call by name, as passed.


def _tokens(like: Tensor, dtype: torch.dtype, arguments: Mapping[str, Any]) -> Tokens:
    """Check and select the tokens that count; warn of inputs that nothing reads."""
    inputs = {name: arguments[name] for name in _TOKEN_INPUTS}
    mask, advantages = arguments["completion_mask"], arguments["advantages"]
    tokens = read_tokens(like, mask, advantages, dtype, **inputs)
    for name in LOGPS:
        check_logps(name, getattr(tokens, name))
    check_finite("advantages", tokens.advantages)
    check_ratios("importance_sampling_ratio", tokens.importance_sampling_ratio)
    for name in ("advantages", *LOGPS, "importance_sampling_ratio"):
        way_out = ", and train a value function by its own loss" if name == "advantages" else ""
        warn_of_graph(name, arguments[name], way_out)
    warn_of_inputs(tokens, arguments)
    return tokens


def _with_topk(rows: Rows, tokens: Tokens, ids: Tensor, logps: Any) -> tuple[Rows, Tokens]:
    """Add the sampler's most likely ids (..., K), and their log-probabilities."""
    ids, logps = (x.detach().flatten(0, -2)[rows.positions] for x in (ids, logps))
    # an entry that is -inf, or that repeats an earlier id, is padding
    ids = ids.masked_fill(logps == -torch.inf, -1)
    topk, padding = TopKLogps.of(ids, rows.ids, "sampling_topk_ids")
    logps = logps.to(tokens.dtype).masked_fill(padding, -torch.inf)
    check_masses("sampling_topk_logps", logps)
    return replace(rows, topk=topk), replace(tokens, sampling_topk_logps=logps)


def _token_loss(
    config: LossConfig,
    objective: PerTokenLoss | None,
    tokens: Tokens,
    num_items_in_batch: float | Tensor | None,
    *,
    has_entropies: bool = True,
) -> PolicyLoss | CustomLoss:
    """The loss that `config` describes, or the custom one."""
    w = config.definition.token_weights(tokens, num_items_in_batch, config)
    loss_over = config.definition.loss_over(num_items=num_items_in_batch is not None)
    config_loss = PolicyLoss(config, tokens, w, loss_over)
    if objective is None:
        return config_loss
    return CustomLoss(objective, tokens, config_loss, has_entropies=has_entropies)


def _loss_over_sets(
    job: Job,
    run: Run,
    sets: KeptIds,
    token_loss: PolicyLoss | CustomLoss,
    arguments: Mapping[str, Any],
) -> LossOutput:
    """The loss of log-probabilities over kept sets, for the planned rows."""
    ids, on_missing_set = arguments["completion_ids"], arguments["on_missing_set"]
    over_vocab = expectation_of(token_loss) if on_missing_set == "full" else None
    scores, set_metrics = score_kept(
        job, run, sets, ids, on_missing_set,
        lambda positions: read_expected(
            over_vocab, ids, positions, job.accumulator_dtype, entropy=True
        ),
        other_logps={name: arguments[name] for name in LOGPS},
    )  # fmt: skip
    out = _loss_of_logps(token_loss, scores["logps"], scores["entropies"], "kept_sets")
    return replace(out, metrics=out.metrics.with_pairs({**out.metrics.pairs, **set_metrics}))


def _loss_of_logps(
    token_loss: PolicyLoss | CustomLoss, logps: Tensor, entropies: Tensor, engine: str
) -> LossOutput:
    """The loss, differentiable in `logps` and `entropies`, both (B, T) or (N,)."""
    layout, dtype = token_loss.tokens.layout, token_loss.tokens.dtype

    def counted(x: Tensor) -> Tensor:
        return x.detach().reshape(-1)[layout.positions].to(dtype)

    numbers = counted(logps), counted(entropies)
    evaluation = token_loss.evaluate(stats_of(*numbers))
    d_logp, d_entropy, *_ = evaluation.coefficients
    reads_entropies = d_entropy is not None and torch.is_grad_enabled()
    if reads_entropies and logps.requires_grad and not entropies.requires_grad:
        warn_once(
            "entropies: the loss has a gradient in them, but they have no graph, so this gradient "
            "is lost; do not detach them, and compute them with gradient, as linear_logps does"
        )
    loss = LossFromLogps.apply(logps, entropies, evaluation.loss, d_logp, d_entropy, layout)
    metrics = loss_metrics(token_loss, *numbers, evaluation, evaluation.has_gradient.sum())
    results = for_reading(loss, layout, *numbers)
    return LossOutput(loss, *results, metrics, engine, "torch")


_OWN_ARGUMENTS = ("config", "objective", "run")  # of `GRPOLoss` itself, besides the fields
_CALL_ARGUMENTS = [
    name
    for name in inspect.signature(grpo_loss).parameters
    if name not in (*_OWN_ARGUMENTS, "fields")
]


@hints_names
class GRPOLoss(nn.Module):
    """A GRPO-family loss as a module; `GRPOLoss()` is TRL's default, DAPO without a KL term.

    ::

        loss_fn = GRPOLoss(presets.GRPO)              # the GRPO paper's loss, with its KL term
        loss_fn = GRPOLoss(presets.GRPO, beta=0.001)  # the same with a smaller KL weight
        loss_fn = GRPOLoss(presets.DAPO)              # without a KL term
        out = loss_fn(hidden, model.lm_head, completion_ids, completion_mask, advantages)
        out.loss.backward()

    A call takes `hidden` (B, T, H), the states that predict the ids; `head`, the model's head or
    its weight; `completion_ids` (B, T); `completion_mask` (B, T) or None; `advantages` (B,) or
    (B, T); and by name the other arguments of `grpo_loss`. It returns a `LossOutput`. `config` and
    its fields, `objective` and `run` are set at construction; a call does not take them.
    ``help(grpo_loss)`` describes the arguments, ``help(LossConfig)`` the fields. A preset follows
    its paper; a `loss_type` alone follows TRL, which multiplies the KL estimate by the ratio. The
    module has no parameters and no buffers.

    Args:
        config: the loss; default `LossConfig()`.
        fields: overrides for fields of `config`.
        objective, run: as in `grpo_loss`.

    Attributes:
        config: the `LossConfig`. Its fields are not attributes of the module. To change one of
            them: ``loss_fn.config = replace(loss_fn.config, ...)``.

    Raises:
        TypeError, ValueError: an unknown field, or a wrong value. A field that the `objective`
            ignores raises an error only when you call the module.
    """

    def __init__(
        self,
        config: LossConfig | None = None,
        *,
        objective: PerTokenLoss | None = None,
        run: Run | None = None,
        **fields: Unpack[LossFields],
    ) -> None:
        """Take a config, or its fields by name."""
        super().__init__()
        config = LossConfig() if config is None else config
        check_kind(config)
        allowed, elsewhere = (*FIELDS, *_OWN_ARGUMENTS), "an argument of a call of GRPOLoss"
        check_names(fields, "GRPOLoss", allowed, elsewhere, _CALL_ARGUMENTS)
        self.config = replace(config, **fields)
        self.objective, self.run = objective, run  # each is checked as it is set

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __setattr__(self, name: str, value: Any) -> None:
            if name in FIELDS:
                raise AttributeError(
                    f"GRPOLoss: expected {name} to be changed in the config, which alone is read: "
                    f"loss_fn.config = dataclasses.replace(loss_fn.config, {name}=...)"
                )
            is_new = type(self) is GRPOLoss and not hasattr(self, name)
            hint = did_you_mean(name, FIELDS) if is_new else ""
            if "did you mean" in hint:
                raise AttributeError(f"GRPOLoss has no {name}{hint} It is a field of its config")
            if name == "config":
                check_config(value)
            elif name == "objective":
                check_objective(self.config, value)
            elif name == "run":
                check_run(value)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name in FIELDS:
                raise AttributeError(f"GRPOLoss has no {name}: read loss_fn.config.{name}")
            return super().__getattr__(name)

    @partial(hints_names, name="a call of GRPOLoss")
    def forward(
        self,
        hidden: Tensor,
        head: HeadLike,
        completion_ids: Tensor,
        completion_mask: Tensor | None,
        advantages: Tensor,
        **inputs: Unpack[LossInputKeywords],
    ) -> LossOutput:
        """Compute the loss: `grpo_loss` with this module's config, objective and run."""
        check_names(
            inputs,
            "a call of GRPOLoss",
            _CALL_ARGUMENTS,
            "an argument of GRPOLoss(...)",
            (*_OWN_ARGUMENTS, *FIELDS),
        )
        own: Any = {"config": self.config, "objective": self.objective, "run": self.run}
        return grpo_loss(hidden, head, completion_ids, completion_mask, advantages, **own, **inputs)

    # so that help() shows the arguments by name
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(inspect.signature(grpo_loss).parameters[name] for name in _CALL_ARGUMENTS),
        ]
    )

    # `nn.Module` declares that a call, which runs hooks and `forward`, returns Any.
    if TYPE_CHECKING:

        def __call__(
            self,
            hidden: Tensor,
            head: HeadLike,
            completion_ids: Tensor,
            completion_mask: Tensor | None,
            advantages: Tensor,
            **inputs: Unpack[LossInputKeywords],
        ) -> LossOutput: ...

    def extra_repr(self) -> str:
        """The config, as ``print(loss_fn)`` shows it."""
        return repr(self.config)


@outside_graphs
def policy_loss_from_logps(
    logps: Tensor,  # (B, T), or packed (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    entropies: Tensor | None = None,  # (B, T) or (N,)
    old_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    sampling_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,); (N,)
    num_items_in_batch: float | Tensor | None = None,
    config: LossConfig | None = None,
    objective: PerTokenLoss | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    **fields: Unpack[LossFields],
) -> LossOutput:
    """Compute the loss of `grpo_loss` from log-probabilities and entropies, differentiable in both.

    ::

        logps = my_logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
        out = policy_loss_from_logps(logps, completion_mask, advantages, config=presets.DAPO)
        out.loss.backward()

    Use this function for log-probabilities that you already have, such as those from a model's own
    head, or over kept sets (`linear_logps` with `kept_ids`). Otherwise prefer `grpo_loss`: it
    computes log-probabilities and gradient in one pass, which saves a matrix product.

    Args:
        logps, entropies: (B, T), or packed (N,), floating: the policy's log-probabilities and
            entropies, attached to the graph. Values at masked positions are never read. The loss is
            computed in fp32 (fp64 if `logps` is fp64). `entropies` are required if the config
            (`entropy_coef`, `top_entropy_quantile`) or an objective reads them. Without them, the
            result lacks its `entropies` and the metric ``entropy``.
        completion_mask, advantages: as in `grpo_loss`.
        old_per_token_logps, ref_per_token_logps, sampling_per_token_logps: as in `grpo_loss`.
            Compute them in the same way as `logps`, and over the same kept sets.
        importance_sampling_ratio, num_items_in_batch, objective, cu_seqlens: as in `grpo_loss`.
        config, fields: as in `grpo_loss`. The config's `temperature` has no effect, since `logps`
            already include it.

    Returns:
        `LossOutput` with `engine` ``"given"`` and `backend` ``"torch"``. Its metric
        ``rows/gradient`` is the share of tokens that get a gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
        RuntimeError: the loss was differentiated twice.
    """
    config, arguments = with_fields({**locals()}, "policy_loss_from_logps")
    check_inputs(arguments)
    if "temperature" in fields:
        warn_once("temperature: not used, since logps include it; pass it where you compute them")
    packed = "(N,) with cu_seqlens", (None,)
    shape = ("(B, T)", (None, None)) if cu_seqlens is None else packed
    check_tensor("logps", logps, shape, floating=True)
    has_entropies = entropies is not None
    if entropies is None:
        for name, off in (("entropy_coef", 0.0), ("top_entropy_quantile", 1.0)):
            if getattr(config, name) != off:
                why = f"since {name} = {getattr(config, name)} reads them"
                raise ValueError(f"entropies: expected a tensor, {why}, got None")
        entropies = torch.zeros_like(logps)  # which nothing reads
    check_tensor("entropies", entropies, ("logps.shape", logps.shape), like=logps, floating=True)
    dtype = accumulator_of(logps.dtype)
    tokens = _tokens(logps, dtype, arguments)
    check_logps("logps", logps.detach().reshape(-1)[tokens.layout.positions])
    check_entropies("entropies", entropies.detach().reshape(-1)[tokens.layout.positions])
    token_loss = _token_loss(
        config, objective, tokens, num_items_in_batch, has_entropies=has_entropies
    )
    out = _loss_of_logps(token_loss, logps, entropies, "given")
    if has_entropies:
        return out
    absent: Any = None
    pairs = {name: x for name, x in out.metrics.pairs.items() if name != "entropy"}
    return replace(out, entropies=absent, metrics=out.metrics.with_pairs(pairs))


@hints_names
def policy_expectation(
    config: LossConfig,
    *,
    completion_mask: Tensor,  # (B, T)
    advantages: Tensor,  # (B,) or (B, T)
    old_per_token_logps: Tensor | None = None,  # (B, T)
    ref_per_token_logps: Tensor | None = None,  # (B, T)
    sampling_per_token_logps: Tensor | None = None,  # (B, T)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,)
    num_items_in_batch: float | Tensor | None = None,
) -> Expectation:
    """Tell `linear_logps` which gradient to expect, if your trainer computes the loss itself.

    With `linear_logps(..., expected=policy_expectation(...))`, such a trainer needs only one
    pass. A wrong expectation costs time, but does not change the gradient. The arguments are as in
    `grpo_loss`, in the shapes of a padded batch, such as (B, T); packed input is not accepted.

    With ``kl_estimator="full"``, pass the expectation to `linear_divergence`, whose divergences are
    the KL term.

    If the trainer computes the importance sampling ratio from the log-probabilities that
    `linear_logps` returns, turn on ``vllm_importance_sampling_correction`` in the config and pass
    `sampling_per_token_logps`.

    Returns:
        An `Expectation`. Its `live` (B, T) marks the tokens that may have a gradient. Its
        `coefficients` are None if a token's gradient depends on other tokens.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    arguments = {**locals()}
    check_kind(config)
    check_inputs(arguments, has_reference=config.needs_reference_head)
    check_tensor("completion_mask", completion_mask, ("(B, T)", (None, None)))
    inputs = {name: arguments[name] for name in _TOKEN_INPUTS if name in arguments}
    tokens = read_tokens(completion_mask, completion_mask, advantages, torch.float32, **inputs)
    token_loss = _token_loss(config, None, tokens, num_items_in_batch)
    return expectation_of(token_loss)
