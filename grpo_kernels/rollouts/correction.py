"""Importance weights, bounded and normalised, and the mask of the kept tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.agreement import check_same
from grpo_kernels.base.choices import CorrectionLevel, CorrectionMode
from grpo_kernels.base.distributed import all_reduce
from grpo_kernels.base.importance import bounded, scored_difference
from grpo_kernels.base.packing import sequences_of
from grpo_kernels.base.sums import widen
from grpo_kernels.rollouts import checks, metrics
from grpo_kernels.rollouts.rules import Bound, log_ratio, statistic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SMALLEST_MEAN = 1e-8  # of weights that are divided by it


class Correction(NamedTuple):
    """Result of ``correct``: weights and the mask of the kept tokens, each (B, T) or (N,), and metrics by name."""

    weights: Tensor  # 0 where masked
    keep: Tensor  # the completion mask with 0 at rejected tokens
    metrics: dict[str, float]


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
    """Correct for a sampler whose log-probabilities are not the policy's: (weights, keep, metrics).

    With D_t = old - sampling log-probability of a counted token, the weight w of

        level "token"      exp(D_t)                         TIS, IcePop
        level "sequence"   exp(sum of D over the sequence)  unbiased, and far apart for long sequences
        level "geometric"  exp(mean of D over the sequence)
        level None         1; nothing is weighted

    is clamped to [``clip_min``, ``clip_max``] by mode "truncate", and 0 outside of them by mode "mask"; None is no
    bound. ``batch_normalize`` then divides by the mean weight, of tokens or of sequences.

    ``reject`` maps statistics to bounds, which are inclusive. A token or a sequence is kept inside all of them. The
    name says what is judged, each "token", or a sequence by the "seq_sum", "seq_mean" or "seq_max" of its tokens, and
    by which number, so that "seq_mean_k3" is the mean of k3 over a sequence:

        "_ratio"        exp(D), where a sequence's is exp(sum, mean or max of D)
        "_k1"           -D; its bounds are those of exp(-D)
        "_k2"           D^2 / 2
        "_k3"           exp(D) - 1 - D
        "_reverse_k3"   exp(-D) - 1 + D

    Bounds are (low, high), either of which may be None. A number u is (None, u); for k1 (1 / u, u), as in verl.
    ``veto_threshold`` rejects a sequence that has a token of exp(D) below it. Rejection leaves the weights as they are.
    With ``keep`` as the loss' mask a rejected token is not in its denominator; with ``weights * keep`` and the whole
    mask it is.

    Args:
        old_per_token_logps: (B, T), or packed (N,), of the policy in the trainer, before the step's first update.
        sampling_per_token_logps: (B, T) or (N,), of the same tokens, as the sampler gave them. NaN, where it gave none,
            is D = 0.
        completion_mask: (B, T) or (N,); 0 is masked, and never read.
        safety_bound: largest size of an exponent, and of D in k1, k2 and k3; both are clamped. ``math.inf``: no bound.
        cu_seqlens: (B + 1,) int32 or int64, bounds of the packed sequences, from 0 to N.
        process_group: ranks over whose weights the mean of ``batch_normalize`` is. Metrics are of this rank.

    Returns:
        weights, in the dtype of ``old_per_token_logps``, for ``importance_sampling_ratio=``; keep, in the mask's dtype,
        for ``completion_mask=``, both shaped like the arguments; metrics by verl's names, as "rollout_corr/kl", of the
        sequences that have a counted token; none if there is no such sequence.

    Sources: https://fengyao.notion.site/off-policy-rl (TIS), https://richardli.xyz/rl-collapse (MIS, rejection);
    verl's ``rollout_corr_helper``.
    Raises ValueError for arguments out of range and shapes that disagree, TypeError for wrong types.
    """
    settings = {
        "level": level,
        "mode": mode,
        "clip_max": clip_max,
        "clip_min": clip_min,
        "reject": reject,
    }
    settings |= {
        "batch_normalize": batch_normalize,
        "veto_threshold": veto_threshold,
        "safety_bound": safety_bound,
    }
    with check_same("process_group", process_group, "correct", **settings):
        checks.options(
            level, mode, clip_max, clip_min, batch_normalize, veto_threshold, safety_bound
        )
        rules = checks.rules(reject)
        inputs = old_per_token_logps, sampling_per_token_logps, completion_mask
        counted = checks.counted(*inputs, packed=cu_seqlens is not None)
        batch, columns, locate = sequences_of(old_per_token_logps, cu_seqlens)

    place = locate(torch.arange(counted.numel(), device=counted.device))

    def padded(x: Tensor) -> Tensor:  # (B, T)
        return x.new_zeros(batch, columns).index_put(place, x.flatten())

    counts = padded(counted)
    sequences = counts.any(dim=1)
    mask = counts[sequences]
    old = torch.where(mask, widen(padded(old_per_token_logps)[sequences]), 0.0)
    d = torch.where(
        mask, scored_difference(old, widen(padded(sampling_per_token_logps)[sequences])), 0.0
    )
    results = metrics.off_policy(old, d, mask, safety_bound)

    weights = mask.to(d.dtype)
    if level is not None:
        raw = log_ratio(level, d, mask).clamp(-safety_bound, safety_bound).exp()
        weights = bounded(raw, clip_min, clip_max, truncates=mode == "truncate")
        results |= metrics.of_weights(raw, weights, mask, mode, clip_min, clip_max)
        if batch_normalize:
            mean = _mean(weights[mask] if level == "token" else weights[:, 0], process_group)
            weights = weights / mean
            results["rollout_is_batch_norm_factor"] = mean
        weights = torch.where(mask, weights, 0.0)

    kept = mask
    for rule in rules:
        values = statistic(rule, d, mask, safety_bound)
        inside = ((values >= rule.low) & (values <= rule.high)).expand_as(mask)
        results |= metrics.of_rule(rule, values, inside, mask)
        kept = kept & inside
    if veto_threshold is not None:
        vetoed = mask & (d.exp() < veto_threshold)
        results |= metrics.of_veto(vetoed, mask)
        kept = kept & ~vetoed.any(dim=1, keepdim=True)
    if rules or veto_threshold is not None:
        results |= metrics.rejected("rollout_rs", kept, mask)

    whole_weights, whole_kept = weights.new_zeros(counts.shape), torch.zeros_like(counts)
    whole_weights[sequences], whole_kept[sequences] = weights, kept
    weights, kept = (x[place].view(counted.shape) for x in (whole_weights, whole_kept))
    keep = completion_mask.masked_fill(~kept, 0)
    return Correction(
        weights.to(old_per_token_logps.dtype), keep, metrics.read(results) if len(mask) else {}
    )


def _mean(weights: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Mean () of the weights (n,) of all ranks; 1 where it is too small to divide by."""
    total, count = all_reduce(
        torch.stack([weights.sum(), weights.new_tensor(len(weights))]), "sum", process_group
    )
    mean = total / count
    return torch.where(mean > SMALLEST_MEAN, mean, 1.0)
