"""Rollout correction for tokens that a different engine, or an older policy, has sampled.

The module computes importance weights and a mask of the tokens to keep. All arithmetic is on (B, T)
tensors, in float64 (float32 on devices without float64) and without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor

from grpo_kernels.base import CorrectionLevel, CorrectionMode
from grpo_kernels.base.checks import (
    check_choice,
    check_number,
    hints_names,
    only_public,
    read_sampled,
)
from grpo_kernels.base.distributed import all_reduce, check_group
from grpo_kernels.base.tensors import (
    bounded,
    extreme,
    scored_difference,
    sequence_means,
    sequences_of,
    spread,
    widen,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Correction", "correct"]

only_public(__name__)

Bound = float | tuple[float | None, float | None]


class Correction(NamedTuple):
    """Result of `correct`.

    Attributes:
        weights: importance weights, (B, T) or (N,), 0 where masked.
        keep: the completion mask in the same shape, with 0 at rejected tokens.
        metrics: a dict from names to numbers, for a logger.
    """

    weights: Tensor
    keep: Tensor
    metrics: dict[str, float]


# (x (R, T), mask (R, T)) -> (R, T) or (R, 1); every row has a counted token
_AGGREGATES = {
    "token": lambda x, mask: x,
    "seq_sum": lambda x, mask: torch.where(mask, x, 0.0).sum(dim=1, keepdim=True),
    "seq_mean": sequence_means,
    "seq_max": lambda x, mask: x.masked_fill(~mask, -math.inf).amax(dim=1, keepdim=True),
}
_DIVERGENCES = {  # functions of D, of any shape
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d) - d,
    "reverse_k3": lambda d: torch.expm1(-d) + d,
}
_STATISTICS = {  # name -> (aggregate, kind)
    f"{level}_{kind}": (aggregate, kind)
    for level, aggregate in _AGGREGATES.items()
    for kind in ("ratio", *_DIVERGENCES)
}
# level -> the statistic that is its weight
_WEIGHTS = {"token": "token_ratio", "sequence": "seq_sum_ratio", "geometric": "seq_mean_ratio"}


@hints_names
@torch.no_grad()
def correct(
    old_per_token_logps: Tensor,  # (B, T), or packed (N,)
    sampling_per_token_logps: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor,  # (B, T) or (N,)
    *,
    level: CorrectionLevel | None = "token",
    mode: CorrectionMode = "truncate",
    clip_max: float | None = 2.0,
    clip_min: float | None = None,
    batch_normalize: bool = False,
    reject: Mapping[str, Bound] | None = None,
    veto_threshold: float | None = None,
    safety_bound: float = 20.0,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    process_group: ProcessGroup | None = None,
) -> Correction:
    """Correct for a sampler that differs from the policy: weights, a mask and metrics.

    ::

        weights, keep, metrics = correct(
            old_logps, sampling_logps, completion_mask, reject={"seq_mean_k3": 0.01}
        )

    D_t is the policy's log-probability of counted token t minus the sampler's. `level` sets the
    weight w of a token:

        level "token"      exp(D_t)                         TIS, IcePop
        level "sequence"   exp(sum of D over the sequence)  unbiased if unclipped; high variance
        level "geometric"  exp(mean of D over the sequence)
        level None         1; nothing is weighted

    `reject` maps statistics to bounds, and drops the tokens or sequences outside these bounds. A
    key has the form LEVEL_STATISTIC; for example, "seq_mean_k3" is the mean of k3 over a sequence.
    LEVEL is "token", "seq_sum", "seq_mean" or "seq_max"; STATISTIC is one of:

        ratio        exp(D); for a sequence, exp of the sum, mean or maximum of D
        k1           -D; its bounds apply to exp(-D), as in verl
        k2           D^2 / 2
        k3           exp(D) - 1 - D
        reverse_k3   exp(-D) - 1 + D

    Rejection does not change the weights. If you pass `keep` as the mask of the loss, rejected
    tokens do not count in the loss's denominator. If you pass ``weights * keep`` with the original
    mask, rejected tokens count there.

    Args:
        old_per_token_logps: (B, T), or packed (N,): log-probabilities of the policy being trained,
            from before the first update of the step.
        sampling_per_token_logps: (B, T) or (N,): the sampler's log-probabilities of the same
            tokens. NaN, for a token that the sampler did not report, counts as D = 0.
        completion_mask: (B, T) or (N,). Positions where it is 0 are never read.
        level: how a weight is computed (first table); None leaves all weights at 1.
        mode: ``"truncate"`` clamps w to the bounds; ``"mask"`` sets it to 0 outside them.
        clip_max, clip_min: bounds of w; None means no bound.
        batch_normalize: divide the weights by their mean, which is over tokens for level "token"
            and over sequences otherwise.
        reject: maps statistics (second table) to inclusive bounds (low, high). None means no bound
            on that side. A token is kept only if all its statistics are within their bounds. A
            single number u means (None, u); for k1, it means (1 / u, u), as in verl.
        veto_threshold: reject a sequence in which any token has exp(D) below this threshold; None:
            no veto.
        safety_bound: exponents, and D in k1, k2, k3 and reverse_k3, are clamped to
            [-safety_bound, safety_bound]. ``math.inf``: no limit.
        cu_seqlens: (B + 1,) int32 or int64, boundaries of the packed sequences, from 0 to N.
        process_group: with `batch_normalize`, the ranks that share one mean. Metrics cover only
            this rank.

    Returns:
        `Correction`. Pass `weights`, in the dtype of `old_per_token_logps`, to the loss as
        ``importance_sampling_ratio=``, and `keep`, in the mask's dtype, as ``completion_mask=``.
        Both tensors are shaped like the inputs and are 0 where masked. `metrics` uses verl's names,
        such as ``"rollout_corr/kl"``; the dict is empty if no sequence has a counted token.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, shapes disagree, or `old_per_token_logps` is not
            finite at a counted position.

    Sources: https://fengyao.notion.site/off-policy-rl (TIS), https://richardli.xyz/rl-collapse
    (MIS, rejection); verl's ``rollout_corr_helper``.
    """
    check_group(process_group)
    check_choice("mode", mode, get_args(CorrectionMode))
    if not isinstance(batch_normalize, bool):
        raise TypeError(f"batch_normalize: expected True or False, got {batch_normalize!r}")
    if level is not None:
        check_choice("level", level, get_args(CorrectionLevel))
    elif batch_normalize or clip_min is not None or mode != "truncate" or clip_max not in (2, None):
        why = "since clip_max, clip_min, mode or batch_normalize ask for weights"
        raise ValueError(f"level: expected a name, {why}, got None")
    limits = {"clip_max": clip_max, "clip_min": clip_min, "veto_threshold": veto_threshold}
    for name, bound in limits.items():
        if bound is not None:
            check_number(name, bound, lowest=0, inclusive=name == "clip_min")
    high = math.inf if clip_max is None else clip_max
    if clip_min is not None and clip_min > high:
        raise ValueError(f"clip_min: expected at most clip_max = {clip_max}, got {clip_min}")
    if safety_bound != math.inf:
        check_number("safety_bound", safety_bound, lowest=0)
    if reject is not None and not hasattr(reject, "items"):
        expected = "a mapping from statistics to bounds, or None"
        raise TypeError(f"reject: expected {expected}, got {type(reject).__name__}")
    rules = {name: _bounds(name, bound) for name, bound in (reject or {}).items()}
    packed = cu_seqlens is not None
    wanted = ("(N,), since there are cu_seqlens", (None,)) if packed else ("(B, T)", (None, None))
    counted = read_sampled(old_per_token_logps, sampling_per_token_logps, completion_mask, wanted)
    batch, columns, locate = sequences_of(old_per_token_logps, cu_seqlens)
    place = locate(torch.arange(counted.numel(), device=counted.device))

    def padded(x: Tensor) -> Tensor:  # (B, T)
        return x.new_zeros(batch, max(columns, 1)).index_put(place, x.flatten())

    counts = padded(counted)
    sequences = counts.any(dim=1)
    mask = counts[sequences]  # (R, T): from here on, only the R sequences with a counted token
    old = widen(padded(old_per_token_logps)[sequences])
    sampled = widen(padded(sampling_per_token_logps)[sequences])
    d = torch.where(mask, scored_difference(old, sampled), 0.0)
    results = _off_policy(old, d, mask, safety_bound)

    def statistic(name: str) -> Tensor:  # (R, T) or (R, 1)
        aggregate, kind = _STATISTICS[name]
        if kind == "ratio":
            return aggregate(d, mask).clamp(-safety_bound, safety_bound).exp()
        return aggregate(_DIVERGENCES[kind](d.clamp(-safety_bound, safety_bound)), mask)

    weights = mask.to(d.dtype)
    if level is not None:
        raw = statistic(_WEIGHTS[level])
        weights = bounded(raw, clip_min, clip_max, truncates=mode == "truncate")
        low = 1 / high if clip_min is None else clip_min  # for the metrics, as in verl
        per_token = level == "token"
        results |= _summary("rollout_is", weights, raw, mask, (low, high), per_token)
        tokens = weights.expand_as(mask)[mask]
        squares = tokens.square().mean()
        size = tokens.mean().square() / squares.clamp(min=torch.finfo(squares.dtype).tiny)
        results["rollout_is_eff_sample_size"] = size
        if mode == "mask":
            results["rollout_is_oob_ratio"] = _share(tokens != raw.expand_as(mask)[mask])
        if batch_normalize:
            averaged = weights[mask] if per_token else weights[:, 0]
            total = torch.stack([averaged.sum(), averaged.new_tensor(len(averaged))])
            total, count = all_reduce(total, "sum", process_group)
            mean = total / count
            mean = torch.where(mean > 1e-8, mean, 1.0)  # do not divide by a smaller mean
            weights = weights / mean
            results["rollout_is_batch_norm_factor"] = mean
        weights = torch.where(mask, weights, 0.0)

    kept = mask
    for name, (low, high) in rules.items():
        values = statistic(name)
        inside = ((values >= low) & (values <= high)).expand_as(mask)
        per_token = name.startswith("token_")
        results |= _summary(f"rollout_rs_{name}", values, values, mask, (low, high), per_token)
        results |= _rejected(f"rollout_rs_{name}", inside, mask)
        kept = kept & inside
    if veto_threshold is not None:
        vetoed = mask & (d.exp() < veto_threshold)
        results["catastrophic_token_fraction"] = _share(vetoed[mask])
        results["catastrophic_seq_fraction"] = _share(vetoed.any(dim=1))
        kept = kept & ~vetoed.any(dim=1, keepdim=True)
    if rules or veto_threshold is not None:
        results |= _rejected("rollout_rs", kept, mask)

    whole = (spread(x, sequences, batch) for x in (weights, kept))
    weights, kept = (x[place].view(counted.shape) for x in whole)
    keep = completion_mask.masked_fill(~kept, 0)
    numbers = torch.stack([*results.values()]).tolist()  # one synchronization with the device
    named = {f"rollout_corr/{name}": x for name, x in zip(results, numbers, strict=True)}
    return Correction(weights.to(old_per_token_logps.dtype), keep, named if len(mask) else {})


def _bounds(name: str, bound: Any) -> tuple[float, float]:
    """(low, high) in the unit of the statistic: for k1, the logarithms of `bound`."""
    check_choice("reject", name, _STATISTICS)
    is_k1, where = _STATISTICS[name][1] == "k1", f"reject[{name!r}]"
    if isinstance(bound, (tuple, list)) and len(bound) == 2:  # a configuration file has lists
        low, high = bound
    else:
        check_number(where, bound, lowest=0)
        low, high = 1 / bound if is_k1 else None, bound
    for end in (low, high):
        if end is not None:
            check_number(where, end, lowest=0, inclusive=not is_k1)
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if low > high:
        got = f"({low:g}, {high:g})"
        raise ValueError(f"{where}: expected a lower bound of at most the upper one, got {got}")
    if is_k1:
        return math.log(low) if low else -math.inf, math.log(high)
    return low, high


# Metrics with verl's names and formulas (verl/trainer/ppo/rollout_corr_helper.py), over the R
# sequences that have a counted token. verl also includes sequences without one, with a ratio and a
# perplexity of 1 and a weight of 0; these functions leave them out.


def _off_policy(old: Tensor, d: Tensor, mask: Tensor, safety_bound: float) -> dict[str, Tensor]:
    """Distance between the policies: perplexities, KL estimates, chi-squared divergences."""
    log_ppl, gap = -sequence_means(old, mask)[:, 0], -sequence_means(d, mask)[:, 0]
    sampling_log_ppl = log_ppl - gap
    tokens, sums = d[mask], d.sum(dim=1)
    return {
        "training_ppl": log_ppl.exp().mean(),
        "training_log_ppl": log_ppl.mean(),
        "kl": -tokens.mean(),
        "k3_kl": _DIVERGENCES["k3"](tokens).mean(),
        "rollout_ppl": sampling_log_ppl.exp().mean(),
        "rollout_log_ppl": sampling_log_ppl.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": extreme(gap, largest=True),
        "log_ppl_diff_min": extreme(gap, largest=False),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": torch.expm1(2 * tokens.clamp(-safety_bound, safety_bound)).mean(),
        "chi2_seq": torch.expm1(2 * sums.clamp(-safety_bound, safety_bound)).mean(),
    }


def _summary(
    prefix: str,
    values: Tensor,  # (R, T), one per token, or (R, 1), one per sequence
    raw: Tensor,  # `values` before they were bounded
    mask: Tensor,
    bounds: tuple[float, float],
    per_token: bool,  # one value per token; for T = 1, the shape does not say so
) -> dict[str, Tensor]:
    """Mean, standard deviation and extremes of `values`; shares of `raw` outside the bounds."""
    (low, high), of_weights = bounds, prefix == "rollout_is"
    tokens = values.expand_as(mask)[mask]
    extremes, judged = (tokens, raw[mask]) if per_token else (raw, raw)
    sequences = sequence_means(values.expand_as(mask), mask)[:, 0]
    raw_sequences = sequence_means(raw.expand_as(mask), mask)[:, 0]
    clamped = tokens.clamp(0.0 if of_weights else low, high)
    fraction, ideal = ("ratio_fraction", 1.0) if of_weights else ("fraction", 0.0)
    results = {
        "mean": tokens.mean(),
        "std": (clamped - clamped.mean()).square().mean().sqrt(),
        "max": extreme(extremes, largest=True),
        "min": extreme(extremes, largest=False),
        f"{fraction}_high": _share(judged > high),
        f"{fraction}_low": _share(judged < low),
        "seq_mean": sequences.mean(),
        "seq_std": sequences.new_zeros(()) if len(sequences) < 2 else sequences.std(),
        "seq_max": extreme(sequences, largest=True),
        "seq_min": extreme(sequences, largest=False),
        "seq_max_deviation": extreme((sequences - ideal).abs(), largest=True),
        "seq_fraction_high": _share(raw_sequences > high),
        "seq_fraction_low": _share(raw_sequences < low),
    }
    return {f"{prefix}_{name}": x for name, x in results.items()}


def _rejected(prefix: str, kept: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Shares of rejected tokens, and of sequences with a rejected token."""
    gone = mask & ~kept
    return {
        f"{prefix}_masked_fraction": _share(gone[mask]),
        f"{prefix}_seq_masked_fraction": _share(gone.any(dim=1)),
    }


def _share(x: Tensor) -> Tensor:
    return widen(x).mean()
