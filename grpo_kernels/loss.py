"""The GRPO family of losses straight from hidden states, and the same loss on given
log-probabilities.

The algorithm of `grpo_loss`, in the order in which it runs, and where it is::

    tokens  = the positions that count                                    tokens.py
    weights = the loss type's normaliser, one weight per token            objective/losses.py
    engine  = the cheapest that gives this loss its exact gradient        engine/plan.py
    first_pass, before autograd knows of the call:                        engine/sweep.py
    for each chunk of rows:
        z = hidden @ weight.T                                             engine/gemm.py
        logps, entropies = log softmax(z)[id], -sum p log p               backends/
        R = logps - old_per_token_logps                                   objective/policy.py
        l = -min(e^R A, clip(e^R, 1 - epsilon, 1 + epsilon_high) A) + beta KL
                                                                          token_loss/formulas.py
        a, b = d loss / d logps, d loss / d entropies                     objective/policy.py
        dz_j = a (1[j = id] - p_j) - b p_j (log p_j + entropy)            backends/
        d hidden = dz @ weight                                            engine/gemm.py
        d weight += dz.T @ hidden
    loss = sum(weights * l) - entropy_coef * mean entropy                 objective/policy.py
    PolicyLoss attaches the gradient to the loss                          engine/autograd.py

What the engines do at these steps, by the functions' names:

======== ================================== ========================= ==========================
engine   in the loop of `first_pass`        after it, in `grpo_loss`  in the backward
======== ================================== ========================= ==========================
one_pass `fused`; or `reduced`, then        `evaluate`: the value     the stored gradient, times
         `derived` with `gradient`'s a, b                             the upstream one
frozen   the same, with a = 1               `evaluate`; rows times a  the same
two_pass `reduced`                          `evaluate`: value, a, b   `second_pass`: the loop
                                                                      again, `derived`
lean     `reduced`                          `evaluate`: value, a, b   `second_pass`: by slices
======== ================================== ========================= ==========================

A backend that fuses computes R, l, a, b and dz in one kernel. Two passes are for losses in which a
token's a depends on other tokens. Without old log-probabilities and KL term a is known beforehand.
Tokens that certainly get no gradient are projected apart, without one. Kept sets go another way:
`_loss_over_sets`, by torch operations on the ids of each set.

With a KL term over the whole vocabulary (`reference`) there is a third number, c = d loss / d KL,
and ``c p_j (log p_j - log q_j - KL)`` is added to dz_j. With a sampler's K candidates v
(`sampling_topk_ids`) there are K more, g_v = d loss / d log p_v, and ``sum_v g_v (1[j = v] - p_j)``
is added.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import (
    check_ids,
    check_logps,
    check_on_missing_set,
    check_shape,
    check_tensor,
    hints_names,
    warn_of_ratio,
)
from grpo_kernels.base.choices import OnMissingSet
from grpo_kernels.engine.autograd import PolicyLoss, first_order
from grpo_kernels.engine.plan import Job, Rows, Run, begin, check_run, plan, together
from grpo_kernels.engine.sweep import first_pass, with_coefficients
from grpo_kernels.engine.top_k import TopKLogps
from grpo_kernels.engine.workspace import accumulator_of
from grpo_kernels.head import (
    HeadLike,
    Tensors,
    outside_graphs,
    read_heads,
    read_reference,
    takes_heads,
    with_its_group,
)
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.module import whole_reference, within_module
from grpo_kernels.objective.config import (
    FIELDS,
    LossConfig,
    check_centering,
    check_config,
    check_names,
    check_objective,
    check_sampling,
    check_terms,
    config_with,
    warn_of_inputs,
)
from grpo_kernels.objective.custom import CustomObjective, TokenInputs
from grpo_kernels.objective.expected import Expectation, expectation_of
from grpo_kernels.objective.losses import check_num_items, token_weights
from grpo_kernels.objective.metrics import Metrics, loss_metrics
from grpo_kernels.objective.policy import Evaluation, PolicyObjective, as_stats
from grpo_kernels.results import LossOutput
from grpo_kernels.scores import check_listed, read_kept_sets, score_kept
from grpo_kernels.token_loss.record import TOPK_LOGPS
from grpo_kernels.tokens import Layout, Tokens, read_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.objective.config import LossFields

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
    on_missing_set: OnMissingSet
    cu_seqlens: Tensor | None


@takes_heads(within_module)
def grpo_loss(
    hidden: Tensor,  # (B, T, H), or packed (N, H)
    head: HeadLike,
    completion_ids: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    config: LossConfig | None = None,
    objective: Custom | None = None,
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

    Values at masked positions are never read, in any argument. Hidden states, weight, bias and
    adapter get exact gradients; all other arguments are constants. A batch without a counted token
    gives an attached loss of 0.

    Args:
        hidden: (B, T, H), or packed (N, H), floating: hidden states that predict `completion_ids`
            (aligned: nothing is shifted here).
        head: a weight (V, H), a `Head`, or the model's head module.
        completion_ids: (B, T) or (N,) integers; those that count must lie in [0, V).
        completion_mask: (B, T) or (N,), bool, int or float. Every value but 0 counts, negative ones
            too (-inf of an additive attention mask, with a warning); NaN is refused. None: every
            position counts, and the host need not wait for the device to count them.
        advantages: (B,), one per sequence, or (B, T) or (N,), one per token; in a packed batch with
            N = B, one per sequence.
        config: default `LossConfig()`.
        objective: a per-token loss of your own, a function of `TokenInputs`, instead of the
            config's. It may build on that one, ``tokens.loss``; if it does not, only the normaliser
            and `temperature` of `config` apply.

        Policy terms:

        old_per_token_logps: (B, T) or (N,), of the policy that generated the tokens; absent:
            on-policy, the ratio is exactly 1.
        ref_per_token_logps: (B, T) or (N,), of the reference model; needed if ``config.beta`` is
            not 0 and ``config.kl_estimator`` is not ``"full"``.
        reference: (hidden states (B, T, H') or (N, H'), head) of the reference model, constants,
            for the KL term over the whole vocabulary; needed if ``config.beta`` is not 0 and
            ``config.kl_estimator`` is ``"full"``. Its head is a weight (V, H'), a `Head` or a
            module, for the ids of the policy's; H' may differ from H. It costs one more product
            with a head, and a second chunk of logits within the same workspace.
        num_items_in_batch: a number, or a tensor (): normaliser of ``"dapo"``, ``"cispo"`` and
            ``"vespo"``: the counted tokens of the whole batch, over accumulation steps and ranks,
            divided by the number of ranks where gradients are averaged over them; below 1 it is 1.
            Absent: the counted tokens of this call. The other loss types, and the entropy bonus,
            are means over this call: divide the loss by the number of accumulation steps, and leave
            this out (a warning says so).

        The sampler:

        sampling_per_token_logps: (B, T) or (N,), the sampler's, for the off-policy mask and, with
            ``vllm_importance_sampling_correction`` in the config, for an importance sampling ratio
            that needs no forward beforehand. NaN: the sampler could not score the token, whose
            difference then counts as 0.
        importance_sampling_ratio: (B, T), (B, 1) or (B,), or packed (N,): factor on the policy term
            that corrects for the sampler; part of the weight w of ``"vespo"``; not used by
            ``"gmpo"``.
        sampling_topk_ids, sampling_topk_logps: (B, T, K) or (N, K): the sampler's most likely ids
            at each position, signed integers padded with -1, in any order, and their
            log-probabilities in the distribution that it sampled from, over its whole vocabulary,
            not over the K; an entry of -inf is padding, and a repeated id counts once, with its
            first one. They center the score (https://arxiv.org/abs/2609.20807): from each token's
            policy gradient A w grad log p its expectation over the sampler's tokens is taken, with
            the ids that are not among the K in proportion to the policy. The weight w is the ratio
            of ``vllm_importance_sampling_correction``, with the mode ``"token_truncate"`` or
            ``"token_mask"``, or 1 without it. For the loss types ``"grpo"``, ``"bnpo"``,
            ``"dr_grpo"``, ``"dapo"`` and ``"luspo"`` without `old_per_token_logps`; one pass, as
            without.
        kept_ids: the kept set of each position, that is the ids that a truncating sampler (top-k,
            top-p, min-p) did not cut, as in `linear_logprob`. Log-probabilities and entropies are
            taken over these sets, at the cost of the sets. The old, reference and sampling
            log-probabilities must be, too.
        on_missing_set: treatment of a position whose set is empty or lacks the sampled id:
            ``"error"`` refuses it, ``"full"`` scores it over the whole vocabulary.

        Packed sequences:

        cu_seqlens: bounds of the packed sequences, (B + 1,) int32 or int64; per-token arguments are
            then (N,). The host reads the bounds.

        How it is computed:

        run: engine, backend, memory: `Run`.
        fields: fields of `config`, which they replace: ``epsilon_high=0.28``.

    Returns:
        The loss, which carries the gradient, each token's log-probability and entropy, and the
        metrics: a `LossOutput`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it, what was expected and what
            came. Raised before any work is done, and nothing is changed.
    """
    given = {**locals()}
    given["config"] = config = config_with(config, fields, _OF_CALL, "grpo_loss")
    if reference is not None:
        reference = whole_reference(reference, hidden, head, "reference.")
    head = with_its_group(hidden, head)
    with together("grpo_loss", head.process_group, given) as ranks:
        # heads and ids
        _check_loss(config, given, has_reference=reference is not None)
        if reference is not None and not config.needs_reference_head:  # beta is 0
            read_reference(reference, head, "reference.")
            reference = None
        dims = (3,) if cu_seqlens is None else (2,)
        hidden, head, reference = read_heads(hidden, head, reference, dims=dims)
        check_ids("completion_ids", completion_ids, hidden)
        if sampling_topk_ids is not None:
            check_listed("sampling_topk_ids", sampling_topk_ids, hidden, sampling_topk_logps)
        sets = None
        if kept_ids is not None:
            sets = read_kept_sets(kept_ids, on_missing_set, completion_ids)
        job = begin(hidden, head, run, reference, backend=None if sets is None else "torch")

        # the tokens that count, and their loss
        tokens = _tokens(completion_ids, completion_mask, advantages, job.accumulator, given)
        rows = Rows(tokens.layout.positions, tokens.ids, 1.0 / config.temperature)
        if sampling_topk_ids is not None:
            rows, tokens = _with_candidates(rows, tokens, sampling_topk_ids, sampling_topk_logps)
            job = replace(job, extras=(TOPK_LOGPS,))
        loss = _objective(config, given, tokens)

        # which engine
        names = None if sets is not None else ("completion_ids", "sampling_topk_ids")
        choose_by = None if sets is not None else loss
        job, tensors, of_reference = plan(
            job, hidden, head, rows, run, ranks, choose_by, reference=reference, names=names
        )
    if sets is not None:
        return _loss_over_sets(loss, tokens, given, job, tensors, sets)

    # the loop over the rows, the loss, its gradient
    first = first_pass(job, tensors, of_reference, loss)
    with torch.no_grad():
        evaluation = loss.evaluate(first.stats)
        # a frozen head's rows are scaled by theirs here; a second pass reads them in the backward
        first = with_coefficients(job, first, evaluation.coefficients)
    value, *results = PolicyLoss.apply(job, evaluation.loss, first, of_reference, *tensors)
    logps, entropies = (x.view(tokens.layout.shape) for x in results)
    differentiated = evaluation.has_gradient if job.when == "later" else None
    if job.when == "now":
        differentiated = loss.live
    if differentiated is None:  # none of the tokens, or all
        differentiated = torch.full_like(tokens.ids, job.when == "now", dtype=torch.bool)
    metrics = _metrics(given, tokens, first.entropies, evaluation, differentiated)
    return LossOutput(value, logps, entropies, metrics, job.engine, job.backend.name)


_OF_CALL = [name for name in inspect.signature(grpo_loss).parameters if name != "fields"]
_OF_MODULE = ("config", "objective", "run", "fields")  # arguments that `GRPOLoss` has itself


class GRPOLoss(nn.Module):
    """A GRPO-family loss as a module; `GRPOLoss()` is TRL's default, DAPO without a KL term.

    ::

        loss_fn = GRPOLoss(presets.GRPO)                 # the GRPO paper's, with its KL term
        loss_fn = GRPOLoss(presets.GRPO, beta=0.001)     # with another weight of that term
        loss_fn = GRPOLoss(loss_type="grpo", beta=0.04)  # TRL's, which corrects the KL estimate
        out = loss_fn(hidden, model.lm_head, completion_ids, completion_mask, advantages)
        out.loss.backward()

    The call is `grpo_loss` with this module's config.

    Args:
        config: the loss; default `LossConfig()`.
        fields: fields of `config`, which they replace.
        objective, run: as in `grpo_loss`.

    Raises:
        TypeError, ValueError: an unknown field, or a wrong value of a field or an option.
    """

    def __init__(
        self,
        config: LossConfig | None = None,
        *,
        objective: Custom | None = None,
        run: Run | None = None,
        **fields: Unpack[LossFields],
    ) -> None:
        super().__init__()
        config = LossConfig() if config is None else config
        check_config(config)
        elsewhere = "an argument of the module's call"
        check_names(fields, "a field of LossConfig", FIELDS, elsewhere, _OF_CALL)
        self.config = replace(config, **fields)
        check_objective(self.config, objective)
        check_run(Run() if run is None else run)
        self.objective, self.run = objective, run

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
            inputs, "an argument of grpo_loss", _OF_CALL, "a field, as in GRPOLoss(...)", FIELDS
        )
        own: Any = {"config": self.config, "objective": self.objective, "run": self.run}
        return grpo_loss(hidden, head, completion_ids, completion_mask, advantages, **own, **inputs)

    # as help() shows it: the arguments by name
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        + [
            x
            for name, x in inspect.signature(grpo_loss).parameters.items()
            if name not in _OF_MODULE
        ]
    )

    # The call runs the hooks, then `forward`; `nn.Module` declares that it returns Any.
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
        return repr(self.config)


@outside_graphs
def policy_loss_from_logps(
    logps: Tensor,  # (B, T), or packed (N,)
    entropies: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    old_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    sampling_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,); (N,)
    num_items_in_batch: float | Tensor | None = None,
    config: LossConfig | None = None,
    objective: Custom | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    **fields: Unpack[LossFields],
) -> LossOutput:
    """`grpo_loss` without its projection, differentiable in `logps` and `entropies`.

    `grpo_loss` scores and differentiates in one pass, which saves a product. This is the same loss
    on log-probabilities from elsewhere: over kept sets (`linear_logprob` with `kept_ids`), or by a
    model's own head.

    Args:
        logps, entropies: (B, T), or packed (N,), floating, the policy's, with their graph; values
            at masked positions are never read. The loss is computed in fp32 (fp64 if `logps` is
            fp64).
        the others: as in `grpo_loss`. The config's `temperature` has no effect: it is in `logps`
            already. Old, reference and sampling log-probabilities must be computed like `logps`,
            over the same kept sets.

    Returns:
        `LossOutput`, its `engine` ``"given"`` and its `backend` ``"torch"``; ``rows/gradient`` is
        the share of the tokens that get a gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. RuntimeError: differentiated
            twice.
    """
    given = {**locals()}
    given["config"] = config = config_with(config, fields, _OF_LOGPS, "policy_loss_from_logps")
    _check_loss(config, given)
    check_tensor("logps", logps, floating=True)
    if logps.dim() != (2 if cu_seqlens is None else 1):
        written = "(B, T)" if cu_seqlens is None else "(N,) with cu_seqlens"
        raise ValueError(f"logps: expected shape {written}, got {tuple(logps.shape)}")
    check_tensor("entropies", entropies, like=logps, floating=True)
    check_shape("entropies", entropies, ("that of logps", tuple(logps.shape)))
    no_ids, dtype = torch.zeros_like(logps, dtype=torch.long), accumulator_of(logps.dtype)
    tokens = _tokens(no_ids, completion_mask, advantages, dtype, given)
    loss = _objective(config, given, tokens)
    return _loss_of_logps(loss, tokens, given, logps, entropies, "given")


_OF_LOGPS = [x for x in inspect.signature(policy_loss_from_logps).parameters if x != "fields"]


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
    """Return the expected gradient of a policy loss, for a trainer that computes its own loss.

    With `linear_logprob(..., expected=policy_expectation(...))` such a trainer takes one pass. The
    expectation does not have to be right; it only decides how much is recomputed. The ids have
    shape (B, T); arguments as in `grpo_loss`.

    With ``kl_estimator="full"`` pass it to `linear_divergence`, whose divergences are the KL term.

    If the trainer computes the importance sampling ratio from the log-probabilities of the call to
    come, say so in the config (``vllm_importance_sampling_correction``) and pass
    `sampling_per_token_logps`.

    Returns:
        an `Expectation` whose `graded` is (B, T). If a token's gradient depends on other tokens,
        `coefficients` is None: the gradient is not known row by row. `graded` still says which rows
        cannot have a gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    given = {**locals()}
    check_config(config)
    _check_loss(config, given, has_reference=config.needs_reference_head)
    check_tensor("completion_mask", completion_mask)
    if completion_mask.dim() != 2:
        got = tuple(completion_mask.shape)
        raise ValueError(f"completion_mask: expected shape (B, T), got {got}")
    no_ids = torch.zeros_like(completion_mask, dtype=torch.long)
    inputs = {name: given[name] for name in _INPUTS if name in given}
    tokens = read_tokens(no_ids, completion_mask, advantages, torch.float32, **inputs)
    return expectation_of(_objective(config, given, tokens), tokens)


LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
_INPUTS = (*LOGPS, "importance_sampling_ratio", "sampling_topk_logps", "cu_seqlens")
# The helpers below take the arguments of a public call by name, `given`; an absent one is None.


def _check_loss(
    config: LossConfig, given: Mapping[str, Any], *, has_reference: bool = False
) -> None:
    """Raise unless there is all that the loss reads; `read_tokens` checks shapes."""
    check_config(config)
    objective, logps = given.get("objective"), given["sampling_per_token_logps"]
    check_terms(config, given["ref_per_token_logps"], objective, has_reference=has_reference)
    check_sampling(config, logps, given["importance_sampling_ratio"])
    check_num_items(given["num_items_in_batch"])
    if given.get("kept_ids") is not None and config.needs_reference_head:
        raise ValueError(
            "kl_estimator: expected 'k1', 'k2' or 'k3' with kept_ids, which truncate the "
            "policy, got 'full', the divergence over the whole vocabulary"
        )
    if given.get("kept_ids") is None and "on_missing_set" in given:
        check_on_missing_set(given["on_missing_set"])
    if "sampling_topk_ids" in given:
        check_centering(config, objective, given)


def _tokens(
    ids: Tensor,
    completion_mask: Tensor | None,
    advantages: Tensor,
    dtype: torch.dtype,
    given: Mapping[str, Any],
) -> Tokens:
    """The tokens that count, checked; warns of inputs that nothing reads."""
    inputs = {name: given[name] for name in _INPUTS if name in given}
    tokens = read_tokens(ids, completion_mask, advantages, dtype, **inputs)
    for name in LOGPS:
        check_logps(name, getattr(tokens, name))
    warn_of_inputs(
        given["config"],
        given["objective"],
        num_items_in_batch=given["num_items_in_batch"],
        old_per_token_logps=given["old_per_token_logps"],
        sampling_per_token_logps=given["sampling_per_token_logps"],
    )
    return tokens


def _objective(
    config: LossConfig, given: Mapping[str, Any], tokens: Tokens
) -> PolicyObjective | CustomObjective:
    """The loss that `config` describes, or the custom one."""
    items = given["num_items_in_batch"]
    weights = token_weights(config, tokens.layout, items, tokens.advantages.dtype)
    if given.get("objective") is None:
        return PolicyObjective(config, tokens, weights)
    return CustomObjective(given["objective"], config, tokens, weights)


def _with_candidates(rows: Rows, tokens: Tokens, ids: Tensor, logps: Any) -> tuple[Rows, Tokens]:
    """Both with the sampler's candidates, (..., K); an entry of -inf, or repeated, is padding."""
    listed = ids.masked_fill(logps == -torch.inf, -1).detach().flatten(0, -2)[rows.positions]
    top_k, padding = TopKLogps.of(listed, rows.ids)
    return replace(rows, top_k=top_k), tokens.without_candidates(padding)


def _metrics(
    given: Mapping[str, Any],
    tokens: Tokens,
    entropies: Tensor,
    evaluation: Evaluation,
    with_grad: Tensor,
) -> Metrics:
    if tokens.old_per_token_logps is not None and evaluation.terms is not None:
        warn_of_ratio(evaluation.terms.token_log_ratio)
    config, has_items = given["config"], given["num_items_in_batch"] is not None
    return loss_metrics(config, tokens, entropies, evaluation, with_grad.sum(), num_items=has_items)


def _loss_of_logps(
    loss: PolicyObjective | CustomObjective,
    tokens: Tokens,
    given: Mapping[str, Any],
    logps: Tensor,
    entropies: Tensor,
    engine: str,
) -> LossOutput:
    """The loss with its gradient in `logps` and `entropies`, both (B, T) or (N,)."""
    layout, dtype = tokens.layout, tokens.advantages.dtype
    rows = [x.detach().reshape(-1)[layout.positions].to(dtype) for x in (logps, entropies)]
    evaluation = loss.evaluate(as_stats(*rows))
    value = _LossOfLogps.apply(logps, entropies, evaluation, layout)
    metrics = _metrics(given, tokens, rows[1], evaluation, evaluation.has_gradient)
    per_token, per_entropy = map(layout.scatter, rows)
    return LossOutput(value, per_token, per_entropy, metrics, engine, "torch")


def _loss_over_sets(
    loss: PolicyObjective | CustomObjective,
    tokens: Tokens,
    given: Mapping[str, Any],
    job: Job,
    head: Tensors,
    sets: KeptIds,
) -> LossOutput:
    """The loss of log-probabilities over the sampler's kept sets."""
    on_missing_set = given["on_missing_set"]
    expected = expectation_of(loss, tokens) if on_missing_set == "full" else None
    scores, metrics = score_kept(
        job, head, given["run"], sets, given["completion_ids"], on_missing_set,
        expected=expected, others={name: given[name] for name in LOGPS},
    )  # fmt: skip
    out = _loss_of_logps(loss, tokens, given, scores.logps, scores.entropies, "kept_sets")
    return replace(out, metrics=out.metrics.joined(metrics))


@first_order
class _LossOfLogps(torch.autograd.Function):
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
