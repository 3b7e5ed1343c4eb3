"""Metrics of a correction, by verl's names and formulas (``verl/trainer/ppo/rollout_corr_helper.py``).

All are of R sequences that have a counted token each. Values of tokens are (R, T), those of sequences (R, 1). Where
verl counts sequences without a token, with a ratio and a perplexity of 1 and a weight of 0, these do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_kernels.base.sums import widen
from grpo_kernels.rollouts.rules import DIVERGENCES, Rule, row_means

Metrics = dict[str, Tensor]


def off_policy(old: Tensor, d: Tensor, mask: Tensor, safety_bound: float) -> Metrics:
    """Distance between the two policies: perplexities, KL estimates, chi-squared divergences."""
    log_ppl, gap = -row_means(old, mask), -row_means(d, mask)
    sampling_log_ppl = log_ppl - gap
    tokens = d[mask]
    sums = d.sum(dim=1)
    return {
        "training_ppl": log_ppl.exp().mean(),
        "training_log_ppl": log_ppl.mean(),
        "kl": -tokens.mean(),
        "k3_kl": DIVERGENCES["k3"](tokens).mean(),
        "rollout_ppl": sampling_log_ppl.exp().mean(),
        "rollout_log_ppl": sampling_log_ppl.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": _extreme(gap, "max"),
        "log_ppl_diff_min": _extreme(gap, "min"),
        "ppl_ratio": gap.exp().mean(),
        "chi2_token": torch.expm1(2 * tokens.clamp(-safety_bound, safety_bound)).mean(),
        "chi2_seq": torch.expm1(2 * sums.clamp(-safety_bound, safety_bound)).mean(),
    }


def of_weights(
    raw: Tensor,
    bounded: Tensor,
    mask: Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Metrics:
    """Metrics of the weights before normalisation; without ``clip_min``, a weight below 1 / ``clip_max`` is low."""
    high = math.inf if clip_max is None else clip_max
    low = 1 / high if clip_min is None else clip_min
    of_tokens = raw.shape == mask.shape
    tokens = bounded.expand_as(mask)[mask]
    extremes = tokens if of_tokens else raw
    sequences = row_means(bounded.expand_as(mask), mask)
    results = _spread(tokens, sequences, tokens.clamp(0, high), ideal=1.0)
    results |= {"max": _extreme(extremes, "max"), "min": _extreme(extremes, "min")}
    results |= _outside("ratio_fraction", raw[mask] if of_tokens else raw, low, high)
    results |= _outside("seq_fraction", row_means(raw.expand_as(mask), mask), low, high)
    squares = tokens.square().mean()
    results["eff_sample_size"] = tokens.mean().square() / squares.clamp(
        min=torch.finfo(squares.dtype).tiny
    )
    if mode == "mask":
        results["oob_ratio"] = _share(tokens != raw.expand_as(mask)[mask])
    return {f"rollout_is_{name}": x for name, x in results.items()}


def of_rule(rule: Rule, values: Tensor, inside: Tensor, mask: Tensor) -> Metrics:
    """Metrics of one statistic, and the share that it alone rejects."""
    tokens = values.expand_as(mask)[mask]
    judged = tokens if rule.level == "token" else values
    sequences = row_means(values.expand_as(mask), mask)
    results = _spread(tokens, sequences, tokens.clamp(rule.low, rule.high), ideal=0.0)
    results |= {"max": _extreme(judged, "max"), "min": _extreme(judged, "min")}
    results |= _outside("fraction", judged, rule.low, rule.high)
    results |= _outside("seq_fraction", sequences, rule.low, rule.high)
    prefix = f"rollout_rs_{rule.name}"
    return {f"{prefix}_{name}": x for name, x in results.items()} | rejected(
        prefix, inside & mask, mask
    )


def of_veto(vetoed: Tensor, mask: Tensor) -> Metrics:
    """The tokens that veto their sequence, by slime's names."""
    return {
        "catastrophic_token_fraction": _share(vetoed[mask]),
        "catastrophic_seq_fraction": _share(vetoed.any(dim=1)),
    }


def rejected(prefix: str, kept: Tensor, mask: Tensor) -> Metrics:
    """Shares of the tokens, and of the sequences that lose one."""
    gone = mask & ~kept
    return {
        f"{prefix}_masked_fraction": _share(gone[mask]),
        f"{prefix}_seq_masked_fraction": _share(gone.any(dim=1)),
    }


def read(results: Mapping[str, Tensor]) -> dict[str, float]:
    """Bring the numbers to the host, in one wait for the device."""
    values = torch.stack([*results.values()]).tolist()
    return {f"rollout_corr/{name}": x for name, x in zip(results, values, strict=True)}


def _spread(tokens: Tensor, sequences: Tensor, clamped: Tensor, ideal: float) -> Metrics:
    """Means and standard deviations; a token's is of the `clamped` values (n,)."""
    lone = len(sequences) < 2
    return {
        "mean": tokens.mean(),
        "std": (clamped - clamped.mean()).square().mean().sqrt(),
        "seq_mean": sequences.mean(),
        "seq_std": sequences.new_zeros(()) if lone else sequences.std(),
        "seq_max": _extreme(sequences, "max"),
        "seq_min": _extreme(sequences, "min"),
        "seq_max_deviation": _extreme((sequences - ideal).abs(), "max"),
    }


def _outside(name: str, values: Tensor, low: float, high: float) -> Metrics:
    """Shares of the values above and below the bounds."""
    return {f"{name}_high": _share(values > high), f"{name}_low": _share(values < low)}


def _extreme(x: Tensor, which: str) -> Tensor:
    """Largest or smallest of the values; NaN if there are none."""
    if x.numel() == 0:
        return x.new_full((), math.nan)
    return x.max() if which == "max" else x.min()


def _share(x: Tensor) -> Tensor:
    """Share that is True."""
    return widen(x).mean()
