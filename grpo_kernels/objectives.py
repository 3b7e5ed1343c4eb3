"""Policy losses of verl, prime-rl, SkyRL, ROLL and ms-swift that `LossConfig` does not offer. Pass
them as ``objective=``::

    out = grpo_loss(..., sampling_per_token_logps=sampled, objective=objectives.ipo)
    near = functools.partial(objectives.ipo, eps=0.1)  # eps other than the default

Symbols: A is the token's advantage. p, old and mu are the probabilities of the sampled token under
the policy, the old policy and the sampler. r = p / mu, R = log(p / old), logp = log(p), and sg[x]
is x without its gradient.

Parameters and defaults are those of the named trainer. `fipo`, `clip_cov`, `kl_cov` and
`gspo_token` read a whole batch or sequence, so they take two passes. The other losses take one
pass. No loss here uses entropies or the reference. An ``importance_sampling_ratio`` multiplies the
whole loss of a token. The config's ``loss_type``, by default "dapo", sets the normalizer. Without
old log-probabilities, R is 0. If the sampler could not score a token (NaN), r is 1. A token with an
advantage of exactly 0 adds exactly 0 to the policy term. In `fipo`, `clip_cov` and `gspo_token`, a
clipped token gets no gradient. Both hold even if a ratio overflows. Means and shares are over the
tokens of the call.

`m2po_mask` computes a mask of tokens; call it before the loss.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from grpo_kernels.backends.formulas import times_or_zero
from grpo_kernels.base.checks import (
    check_number,
    check_tensor,
    only_public,
    read_sampled,
)
from grpo_kernels.base.tensors import discounted_sums, scored_difference, sequence_means
from grpo_kernels.objective.config import preset_hint
from grpo_kernels.objective.custom import TokenInputs

__all__ = [
    "cispo_two_sided", "clip_cov", "dppo_kl", "dppo_tv", "fipo", "gspo_token", "icepop_prime_rl",
    "ipo", "kl_cov", "kpop", "m2po_mask", "rollout_is", "topr",
]  # fmt: skip

only_public(__name__, preset_hint)


F = TypeVar("F", bound=Callable[..., Any])
# range of a number, as `check_number` takes it; an option that is not here is at least 0
_RANGES: dict[str, tuple[Any, ...]] = {
    "clip_cov_lb": (), "clip_cov_ub": (), "kl_cov_ratio": (0.0, False, 1.0),
    "clip_cov_ratio": (0.0,), "clip_ratio_c": (0.0,), "decay_rate": (0.0,), "ratio_high": (0.0,),
    "ratio_low": (0.0,), "ratio_max": (0.0,),
}  # fmt: skip
_SYMBOLS = next((x for x in (__doc__ or "").split("\n\n") if x.startswith("Symbols: ")), "")


def _loss(*, token_level: bool) -> Callable[[F], F]:
    """Decorate an objective that reads no entropies.

    The result checks the objective's number options, and multiplies its loss by an importance
    sampling ratio. Its docstring ends with the symbols of this module's.
    """

    def declare(function: F) -> F:
        numbers = [k for k, x in (function.__kwdefaults__ or {}).items() if isinstance(x, float)]

        @functools.wraps(function)
        def objective(tokens: TokenInputs | None = None, **options: Any) -> Tensor:
            if not isinstance(tokens, TokenInputs):
                name = function.__name__
                raise TypeError(
                    f"{name}: expected TokenInputs, which grpo_loss(objective=objectives.{name}) "
                    f"passes; with other parameters functools.partial(objectives.{name}, ...)"
                )
            for name in options.keys() & numbers:
                check_number(name, options[name], *_RANGES.get(name, (0.0, True)))
            loss, ratio = function(tokens, **options), tokens.importance_sampling_ratio
            return loss if ratio is None else times_or_zero(loss, ratio)

        objective.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_SYMBOLS}"
        vars(objective).update(token_level=token_level, uses_entropies=False)
        return cast(F, objective)

    return declare


@_loss(token_level=True)
def ipo(
    tokens: TokenInputs, *, eps: float = 0.3, kl_tau: float = 0.0, ratio_max: float = 1e4
) -> Tensor:
    """IPO (INTELLECT policy optimization), prime-rl's default: a trust region in probability.

    -A min(r, `ratio_max`) where |p - mu| <= `eps`, else 0; plus `kl_tau` log(r)^2. IPO needs no old
    log-probabilities, which suits samples that are several steps old.

    Where r is capped, there is still a gradient: -A `ratio_max` with respect to log(p).
    `eps` bounds the difference of the probabilities, whatever the sign of A.
    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3418, with the defaults of prime-rl's
    #3586.
    """
    logps, sampled = tokens.logps.detach(), _sampled(tokens)
    keep = (torch.exp(logps) - torch.exp(sampled)).abs() <= eps
    log_ratio, highest = tokens.logps - sampled, math.log(ratio_max)
    cap = highest + tokens.logps - logps  # with the gradient of logps
    capped = torch.where(log_ratio > highest, cap, log_ratio)
    return _kept(keep, capped, tokens) + _squared(kl_tau, log_ratio)


@_loss(token_level=True)
def icepop_prime_rl(
    tokens: TokenInputs, *, ratio_low: float = 0.2, ratio_high: float = 5.0
) -> Tensor:
    """IcePop as in prime-rl: the masked ratio is p / mu, which passes its gradient.

    -A r where `ratio_low` <= r <= `ratio_high`, else 0. Use this loss if p and mu are far apart at
    some tokens, as in mixtures of experts.

    `presets.ICEPOP` is IcePop as in OpenRLHF and NeMo-RL, where the ratio is a constant weight on
    PPO's loss.
    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3526.
    """
    _check_order("ratio_low", ratio_low, "ratio_high", ratio_high)
    log_ratio = tokens.logps - _sampled(tokens)
    keep = (log_ratio >= math.log(ratio_low)) & (log_ratio <= math.log(ratio_high))
    return _kept(keep, log_ratio, tokens)


@_loss(token_level=True)
def kpop(tokens: TokenInputs, *, threshold: float = 0.1, kl_tau: float = 1e-3) -> Tensor:
    """KPop: -A r where KL((p, 1 - p) || (mu, 1 - mu)) and its reverse are at most `threshold`.

    The loss of other tokens is 0. To every token's loss, `kl_tau` log(r)^2 is added. Unlike
    `icepop_prime_rl`, this loss allows rare tokens larger ratios than likely tokens.

    In both KLs, the probabilities are clamped to [1e-6, 1 - 1e-6]. The ratio has no cap.
    Sources: https://ringtech.notion.site/kpop, prime-rl's #3283.
    """
    logps, sampled = tokens.logps.detach(), _sampled(tokens)
    p, mu = (torch.exp(x).clamp(1e-6, 1 - 1e-6) for x in (logps, sampled))
    forward = p * torch.log(p / mu) + (1 - p) * torch.log((1 - p) / (1 - mu))
    reverse = mu * torch.log(mu / p) + (1 - mu) * torch.log((1 - mu) / (1 - p))
    keep, log_ratio = (forward <= threshold) & (reverse <= threshold), tokens.logps - sampled
    return _kept(keep, log_ratio, tokens) + _squared(kl_tau, log_ratio)


@_loss(token_level=True)
def rollout_is(
    tokens: TokenInputs, *, eps_clip_low: float = 0.2, eps_clip_high: float = 0.2
) -> Tensor:
    """GLM-5's loss (SkyRL's ``rollout_is``): the ratio to the sampler as a constant weight.

    -sg[r] A logp if 1 - `eps_clip_low` < r < 1 + `eps_clip_high`, else 0. Use this loss if
    asynchronous training stores no old log-probabilities.

    Source: section 4.1.2 of https://arxiv.org/abs/2602.15763; SkyRL's defaults.
    """
    ratio = torch.exp(tokens.logps.detach() - _sampled(tokens))
    keep = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    return _weighted(tokens, ratio, keep)


@_loss(token_level=True)
def topr(
    tokens: TokenInputs,
    *,
    scores: Tensor | None = None,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> Tensor:
    """TOPR (tapered off-policy REINFORCE): good completions count in full, others by their ratio.

    The loss of a good completion's token is -`positive_weight` A logp. For other completions, it is
    -`negative_weight` sg[min(p / old, 1)] A logp. Use TOPR for off-policy samples: a good
    completion counts in full, however unlikely it is now.

    `scores` has one score per position, shaped like the ids; a token belongs to a good completion
    if its score is above 0. If you have scores (B,), pass ``scores[:, None].expand_as(ids)``. None:
    the advantage serves as the score. In the paper, the reward serves as score and advantage.
    Source: equation 8 of https://arxiv.org/abs/2503.14286; ROLL's ``topr``, with its defaults.
    """
    if scores is None:
        score = tokens.advantages
    else:
        check_tensor("scores", scores, like=tokens.logps)
        index, on_cpu = tokens.index, scores.device.type == "cpu"
        if on_cpu and index.numel() and scores.numel() <= int(index.max()):
            raise ValueError(
                f"scores: expected the shape of completion_ids, got {tuple(scores.shape)}; for "
                "one value per sequence, pass scores[:, None].expand_as(completion_ids)"
            )
        score = scores.flatten()[index]
    log_ratio = tokens.logps.detach() - tokens.old_per_token_logps
    tapered = negative_weight * torch.exp(log_ratio.clamp(max=0.0))
    return _weighted(tokens, torch.where(score > 0, positive_weight, tapered))


@_loss(token_level=False)
def fipo(
    tokens: TokenInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    decay_rate: float = 32.0,
    influence_low: float = 0.0,
    influence_high: float = 0.2,
    safety_threshold: float = 4.0,
) -> Tensor:
    """FIPO (future-KL influenced policy optimization): PPO's clipped loss times a weight f.

    ``f_t = clip(exp(sum over k >= t of gamma^(k - t) R_k), 1 - influence_low, 1 +
    influence_high)``, without gradient. R_k is the R of token k. The sum is over the counted tokens
    of the sequence, k - t is a distance in positions, and gamma = 2^(-1 / decay_rate). If A is
    negative and the token's own e^R is above `safety_threshold`, f is also clipped to [0.8, 1].
    Source: https://arxiv.org/abs/2603.19835; ms-swift's ``loss_type="fipo"``, with its defaults.
    ms-swift's ``fipo_clip_high_only`` corresponds to influence_low = 0; its ``delta`` is not
    available.
    """
    log_ratio = tokens.logps - tokens.old_per_token_logps
    moved = torch.where(tokens.mask, log_ratio.detach(), 0.0)
    future = discounted_sums(moved, 2 ** (-1 / decay_rate))
    influence = torch.exp(future).clamp(1 - influence_low, 1 + influence_high)
    unsafe = (tokens.advantages < 0) & (torch.exp(moved) > safety_threshold)
    influence = torch.where(unsafe, influence.clamp(0.8, 1.0), influence)
    return _clipped(log_ratio, tokens, clip_ratio_low, clip_ratio_high)[0] * influence


@_loss(token_level=True)
def cispo_two_sided(
    tokens: TokenInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2
) -> Tensor:
    """CISPO as in verl, with a lower bound.

    -sg[clip(p / old)] A logp. The ratio is clipped to [1 - `clip_ratio_low`, 1 +
    `clip_ratio_high`]. Unlike in PPO, a clipped token keeps its gradient.
    ``loss_type="cispo"`` is TRL's CISPO, which equals this loss with clip_ratio_low=1 and
    clip_ratio_high=epsilon_high - 1.
    Source: https://arxiv.org/abs/2506.13585.
    """
    ratio = _constant_ratio(tokens).clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return _weighted(tokens, ratio)


@_loss(token_level=True)
def dppo_tv(
    tokens: TokenInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> Tensor:
    """verl's DPPO with total variation.

    -sg[min(p / old, `clip_ratio_c`)] A logp where the token is kept, else 0. A token with A > 0 is
    kept if p - old is at most `clip_ratio_high`. Any other token is kept if p - old is at least
    -`clip_ratio_low`. DPPO is made for large vocabularies, where PPO's clip holds rare tokens back
    and lets likely tokens move far. `clip_ratio_c` caps the ratio. verl's config sets the cap to 3;
    the paper recommends a higher cap (section 5.4).
    Source: https://arxiv.org/abs/2602.04879.
    """
    moved = torch.exp(tokens.logps.detach()) - torch.exp(tokens.old_per_token_logps)
    raised, lowered = moved <= clip_ratio_high, moved >= -clip_ratio_low
    return _dppo(tokens, raised, lowered, clip_ratio_c)


@_loss(token_level=True)
def dppo_kl(
    tokens: TokenInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> Tensor:
    """Like `dppo_tv`, but a token is kept if KL((old, 1 - old) || (p, 1 - p)) is in bounds.

    The bound is `clip_ratio_high` if A > 0, else `clip_ratio_low`. A token is dropped only if its
    probability moved in its advantage's direction, up if A > 0. 1 - p is computed by expm1. Like
    verl, the logarithm of (1 - old) / (1 - p) adds 1e-8 to both.
    Source: https://arxiv.org/abs/2602.04879.
    """
    logps, old = tokens.logps.detach(), tokens.old_per_token_logps
    p, p_old = torch.exp(logps), torch.exp(old)
    rest, rest_old = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old))
    kl = times_or_zero(old - logps, p_old) + rest_old * torch.log((rest_old + 1e-8) / (rest + 1e-8))
    raised = (kl <= clip_ratio_high) | (p <= p_old)
    lowered = (kl <= clip_ratio_low) | (p >= p_old)
    return _dppo(tokens, raised, lowered, clip_ratio_c)


def _dppo(tokens: TokenInputs, raised: Tensor, lowered: Tensor, cap: float) -> Tensor:
    """The loss of the tokens that count: `raised` if A > 0, else `lowered`."""
    keep = torch.where(tokens.advantages > 0, raised, lowered)
    return _weighted(tokens, _constant_ratio(tokens).clamp(max=cap), keep)


@_loss(token_level=False)
def clip_cov(
    tokens: TokenInputs,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """verl's Clip-Cov: PPO's clipped loss without some of the tokens that lower the entropy most.

    Use it if the entropy collapses. ``max(int(clip_cov_ratio * counted tokens), 1)`` tokens get a
    loss of 0. These tokens are drawn at random from the unclipped tokens whose covariance is
    between `clip_cov_lb` and `clip_cov_ub`. A token's covariance is (A - mean A) (logp - mean
    logp), with means over the call's tokens.

    As in verl, the draw is a ``torch.randperm`` on the CPU, from `generator` or torch's default
    generator. With a sharded head, this generator must be in the same state on all ranks.
    Otherwise, the ranks draw different tokens.
    Source: https://arxiv.org/abs/2505.22617.
    """
    _check_order("clip_cov_lb", clip_cov_lb, "clip_cov_ub", clip_cov_ub)
    log_ratio = tokens.logps - tokens.old_per_token_logps
    loss, clipped = _clipped(log_ratio, tokens, clip_ratio_low, clip_ratio_high)
    covariance = _covariance(tokens)
    eligible = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & tokens.mask & ~clipped
    places = eligible.flatten().nonzero()[:, 0]
    number = max(int(clip_cov_ratio * int(tokens.mask.sum())), 1)
    drawn = torch.randperm(len(places), generator=generator)[:number]
    dropped = _at_places(places[drawn.to(places.device)], eligible)
    return torch.where(dropped, 0.0, loss)


@_loss(token_level=False)
def kl_cov(
    tokens: TokenInputs, *, kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 0.1
) -> Tensor:
    """verl's KL-Cov: a penalty for the tokens that lower the entropy most.

    A token's loss is -e^R A. The ``max(1, int(kl_cov_ratio * counted tokens))`` tokens with the
    highest covariance also get a penalty, `ppo_kl_coef` |R|. `clip_cov` defines the covariance. Use
    KL-Cov if the entropy collapses.
    Source: https://arxiv.org/abs/2505.22617.
    """
    log_ratio = tokens.logps - tokens.old_per_token_logps
    places = tokens.mask.flatten().nonzero()[:, 0]
    number = min(max(1, int(len(places) * kl_cov_ratio)), len(places))
    highest = places[_covariance(tokens).flatten()[places].topk(number).indices]
    penalised = _at_places(highest, tokens.mask)
    penalty = torch.where(penalised, ppo_kl_coef * log_ratio.abs(), 0.0)
    return -_times_exp(log_ratio, tokens.advantages) + penalty


@_loss(token_level=False)
def gspo_token(
    tokens: TokenInputs, *, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2
) -> Tensor:
    """GSPO-token, verl's ``gspo``: PPO's clipped loss with the sequence's ratio.

    The ratio s = exp(sg[mean R] + logp - sg[logp]), with the mean over the sequence, is clamped to
    at most e^10. You may pass one advantage and one importance sampling ratio per token. If both
    are the same for all tokens of a sequence, prefer `presets.GSPO`, which has the same gradient
    and also metrics of the ratio.
    Source: https://arxiv.org/abs/2507.18071.
    """
    logps = tokens.logps.detach()
    mean = sequence_means(logps - tokens.old_per_token_logps, tokens.mask)
    log_ratio = tokens.logps - logps + mean  # the mean, with the gradient of logps
    # no clamp: its gradient at the bound depends on the release of torch
    log_ratio = torch.where(log_ratio > 10.0, 10.0, log_ratio)
    return _clipped(log_ratio, tokens, clip_ratio_low, clip_ratio_high)[0]


def m2po_mask(
    old_per_token_logps: Tensor,  # (B, T), or packed (N,), like the others
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    threshold: float = 0.04,
) -> Tensor:
    """Compute M2PO's mask: True at counted tokens, except the stalest ones.

    The mask has the shape of `completion_mask`. With d = old - sampling, the tokens with the
    largest d^2 are dropped until the mean d^2 of the remaining tokens is below `threshold`; at
    least one token is kept. NaN (not scored by the sampler) counts as d = 0. If you pass the mask
    as ``completion_mask=``, the loss's denominator leaves out the dropped tokens. If you convert it
    to floating point and pass it as ``importance_sampling_ratio=``, dropped tokens still count in
    the denominator.
    Source: https://arxiv.org/abs/2510.01161. `threshold` is AReaL's ``m2_threshold``; AReaL's
    example uses 0.04.
    """
    check_number("threshold", threshold, lowest=0.0)
    old, sampling = old_per_token_logps, sampling_per_token_logps
    counts = read_sampled(old, sampling, completion_mask)
    wide = old.to(torch.promote_types(old.dtype, torch.float32))
    moved = scored_difference(wide, sampling)[counts].square()
    places = moved.argsort(descending=True)
    number = torch.arange(len(moved), 0, -1, device=moved.device)
    # mean of each token's d^2 and all smaller ones
    rest = moved[places].flip(0).cumsum(0).flip(0) / number
    kept = torch.empty_like(counts[counts])
    kept[places] = (rest < threshold) | (number == 1)
    return counts.masked_scatter(counts, kept)


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise ValueError(f"{low_name}: expected at most {high_name} = {high}, got {low}")


def _clipped(
    log_ratio: Tensor, tokens: TokenInputs, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """PPO's ``-min(e^R A, clip(e^R) A)``, and where it is clipped.

    A ratio beyond its bound is never used.
    """
    advantages, ratio = tokens.advantages, torch.exp(log_ratio.detach())
    up = advantages > 0
    bound = torch.where(up, torch.full_like(log_ratio, 1 + high), 1 - low)
    beyond = torch.where(up, ratio > bound, ratio < bound) & (advantages != 0)
    inside = _times_exp(torch.where(beyond, 0.0, log_ratio), advantages)
    return -torch.where(beyond, bound * advantages, inside), beyond


def _sampled(tokens: TokenInputs) -> Tensor:
    """The sampler's log-probabilities; where they are NaN, the policy's, held constant."""
    sampled = tokens.sampling_per_token_logps
    if sampled is None:
        expected = "a tensor, since the objective reads it"
        raise ValueError(f"sampling_per_token_logps: expected {expected}, got None")
    return torch.where(torch.isnan(sampled), tokens.logps.detach(), sampled)


def _weighted(tokens: TokenInputs, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """``-weight A logp``, with a constant weight; 0 where `keep` is False."""
    factor = -weight * tokens.advantages
    return times_or_zero(tokens.logps, factor if keep is None else torch.where(keep, factor, 0.0))


def _kept(keep: Tensor, log_ratio: Tensor, tokens: TokenInputs) -> Tensor:
    """``-A e^log_ratio`` where `keep`; elsewhere 0, without the ratio."""
    advantages = torch.where(keep, tokens.advantages, 0.0)
    return -_times_exp(torch.where(keep, log_ratio, 0.0), advantages)


def _squared(weight: float, log_ratio: Tensor) -> Tensor | float:
    """``weight R^2``; a weight of 0 gives 0, even for an infinite R."""
    return weight * log_ratio.square() if weight else 0.0


def _constant_ratio(tokens: TokenInputs) -> Tensor:
    """e^R, without gradient; verl clamps R."""
    log_ratio = tokens.logps.detach() - tokens.old_per_token_logps
    return torch.exp(log_ratio.clamp(-20.0, 20.0))


def _times_exp(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """``e^log_ratio A``.

    An A of 0 gives 0 and no gradient for any ratio except NaN.
    """
    nothing = (advantages == 0) & ~torch.isnan(log_ratio)
    return torch.exp(torch.where(nothing, 0.0, log_ratio)) * advantages


def _covariance(tokens: TokenInputs) -> Tensor:
    """(A - mean A) (logp - mean logp) of every counted token, without gradient."""
    count = tokens.mask.sum().clamp(min=1)

    def centered(x: Tensor) -> Tensor:
        return x - torch.where(tokens.mask, x, 0.0).sum() / count

    return centered(tokens.advantages) * centered(tokens.logps.detach())


def _at_places(places: Tensor, like: Tensor) -> Tensor:
    """Bool, shaped like `like`: True at `places`, indices into the flattened tensor."""
    return torch.zeros_like(like).flatten().index_fill(0, places, True).view_as(like)
