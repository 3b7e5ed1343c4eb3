"""The GRPO loss family in float64, in plain torch with autograd: what everything else is held
against.

It shares no code with the library. The logits are all there; masked positions are selected away,
never multiplied away; each formula is written the way the papers and TRL 1.16's
`GRPOTrainer._compute_loss` state it, plus what this library promises beyond it: a clipped branch
whose ratio overflows has gradient 0, a masked position is never read, an advantage of exactly 0
adds exactly 0 to the policy term, and a sampling logp that is NaN is no evidence of being
off-policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.reference_head import SCORES, Head, divergences_of, head, on_grid
from tests.support.reference_terms import (
    CLIPPED,
    LOG_RATIO_LIMIT,
    OVERFLOW,
    TERMS,
    by_column,
    gamma_weight,
    geometric_mean,
    kl_estimate,
    pick,
    settings,
    token_weights,
    vespo,
)  # fmt: skip

if TYPE_CHECKING:
    from tests.support.case_builder import Case


@dataclass
class Evaluation:
    """The loss as a function of the per-token numbers, with what is needed to bound its error."""

    loss: Tensor  # 0-d
    policy: Tensor  # 0-d, the surrogate's share alone (no KL, no entropy bonus)
    # (B, T), the log of the ratio that each token's surrogate sees (gmpo: before their mean)
    log_ratios: Tensor
    parts: dict[str, Tensor]  # their sums add up to the loss
    # for each part the sum of the absolute values of what it is summed from
    sizes: dict[str, Tensor]
    kl_size: Tensor  # (B, T), the same for each token's KL estimate, before its weight
    kl_slope_size: Tensor  # (B, T), the same for d KL term / d logp
    overflow: Tensor  # (B, T) bool: float32 cannot hold the token's term
    # discrete decisions (off-policy mask, top-entropy mask)
    keeps: list[Tensor] = field(default_factory=list)
    # name -> (values, which of them count): the metric is their mean
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    extremes: dict[str, Tensor] = field(default_factory=dict)


def policy_masks(
    case: Case, logps: Tensor, entropies: Tensor, old: Tensor, adv: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens the surrogate acts on, (B, T): counted, advantage not 0, of high entropy, not
    too far off-policy."""
    o, counted = settings(case), case.completion_mask != 0
    keeps: dict[str, Tensor] = {}
    if o.top_entropy_quantile < 1.0:
        pool = entropies.detach()[counted]
        keeps["high entropy"] = counted
        if len(pool):
            threshold = torch.quantile(pool, 1 - o.top_entropy_quantile)
            keeps["high entropy"] = counted & (entropies.detach() >= threshold)
    if o.off_policy_mask_threshold is not None:
        sampling = case.sampling_per_token_logps
        evidence = old if sampling is None else pick(sampling.to(logps.dtype), counted)
        drift = pick(evidence - logps.detach(), counted).nan_to_num(0.0, 1e30, -1e30)
        drift = drift.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
        keeps["on policy"] = (adv >= 0) | (drift <= o.off_policy_mask_threshold)
    acts = counted & (adv != 0)
    for keep in keeps.values():
        acts = acts & keep
    return acts, keeps


def evaluate(
    case: Case, logps: Tensor, entropies: Tensor, divergences: Tensor | None = None
) -> Evaluation:
    """The loss from per-token `logps` and `entropies`, both (B, T), 0 where masked, in the dtype to
    compute in.

    And from the `divergences` of another head's distributions, where that is the KL term.
    """
    o, counted, dtype = settings(case), case.completion_mask != 0, logps.dtype
    adv = case.advantages.to(dtype)
    adv = pick(adv, counted) if adv.dim() == 2 else adv[:, None]
    old = case.old_per_token_logps
    old = logps.detach() if old is None else pick(old.to(dtype), counted)
    log_ratio = pick(logps - old, counted)
    log_w = log_ratio
    if o.importance_sampling_level == "sequence":
        log_w = log_ratio.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    log_w = log_w.clamp(max=LOG_RATIO_LIMIT[dtype])
    ratio = log_w.exp()  # (B, 1) or (B, T)
    acts, keeps = policy_masks(case, logps, entropies, old, adv)
    weights = token_weights(o, counted, case.num_items_in_batch, dtype)

    phi, full = None, log_w.expand_as(logps)
    surrogate = TERMS[o.loss_type].surrogate
    if surrogate is None:
        parts, full = geometric_mean(o, log_ratio, adv, counted, keeps.get("high entropy", counted))
        unweighted = (parts * len(parts)).expand_as(logps)
    else:
        phi = gamma_weight(o, adv, log_ratio, counted, case) if surrogate is vespo else None
        acting = pick(adv.expand_as(logps), acts)
        unweighted = pick(surrogate(o, full.exp(), acting, logps, phi), acts)
        share = case.importance_sampling_ratio
        if share is not None and phi is None:
            unweighted = unweighted * pick(by_column(share, dtype), counted)
        parts = weights * unweighted
    zeros = torch.zeros_like(logps)
    result = Evaluation(
        parts.sum(), parts.sum(), full, {"policy": parts},
        {"policy": parts.detach().abs()}, zeros, zeros, unweighted.detach().abs() > OVERFLOW,
        list(keeps.values()),
    )  # fmt: skip
    if o.beta != 0.0 and o.kl_estimator == "full":
        result.parts["kl"] = o.beta * weights * divergences
        result.sizes["kl"] = result.parts["kl"].detach().abs()
        result.loss = result.loss + result.parts["kl"].sum()
        result.means["kl"] = (divergences.detach(), counted)
        result.kl_size = divergences.detach().abs()
    elif o.beta != 0.0:
        add_kl(result, case, logps, ratio, weights)
    result.means["policy_loss"] = (result.loss.detach()[None], torch.ones(1, dtype=torch.bool))
    if o.entropy_coef != 0.0:
        chosen = keeps.get("high entropy", counted)
        bonus = -o.entropy_coef * pick(entropies, chosen) / chosen.sum().clamp(min=1)
        result.parts["entropy"], result.sizes["entropy"] = bonus, bonus.detach().abs()
        result.loss = result.loss + bonus.sum()
    add_metrics(result, case, ratio.detach(), log_ratio.detach(), adv, phi, keeps)
    result.means["entropy"] = (entropies.detach(), counted)
    return result


def add_kl(result: Evaluation, case: Case, logps: Tensor, ratio: Tensor, weights: Tensor) -> None:
    """beta * KL, added to every counted token: neither the masks nor the importance ratio touch
    it."""
    o, counted = settings(case), case.completion_mask != 0
    kl, size, slope = kl_estimate(o, logps, pick(case.ref_per_token_logps.to(logps.dtype), counted))
    through_ratio = torch.zeros_like(kl)
    if o.use_bias_correction_kl and o.loss_type != "gmpo":
        kl, size, slope = kl * ratio, size * ratio.detach(), slope * ratio.detach()
        through_ratio = weights * size
        if o.importance_sampling_level == "sequence":
            lengths = counted.sum(1, keepdim=True).clamp(min=1)
            through_ratio = through_ratio.sum(1, keepdim=True) / lengths
    kl = pick(kl, counted)
    result.parts["kl"] = o.beta * weights * kl
    result.sizes["kl"] = (o.beta * weights * size).detach()
    result.kl_size = pick(size.detach(), counted)
    result.kl_slope_size = pick(o.beta * (weights * slope + through_ratio), counted).detach()
    result.overflow = result.overflow | (counted & (o.beta * size > OVERFLOW))
    result.loss = result.loss + result.parts["kl"].sum()
    result.means["kl"] = (kl.detach(), counted)


def add_metrics(
    result: Evaluation, case: Case, ratio: Tensor, log_ratio: Tensor, adv: Tensor,
    phi: Tensor | None, keeps: dict[str, Tensor],
) -> None:  # fmt: skip
    """Clip shares, ratios and masks. What is one value a sequence is averaged over sequences, the
    rest over tokens."""
    o, counted, dtype = settings(case), case.completion_mask != 0, ratio.dtype
    sequences = torch.ones(len(counted), 1, dtype=torch.bool)
    by_sequence = o.importance_sampling_level == "sequence"
    adv_by_sequence = case.advantages.dim() == 1
    either = sequences if by_sequence and adv_by_sequence else counted
    of_adv = sequences if adv_by_sequence else counted
    if o.loss_type == "gmpo":
        acts = keeps.get("high entropy", counted)
        total = pick(result.log_ratios.detach(), acts).sum(1, keepdim=True)
        mean = total / acts.sum(1, keepdim=True).clamp(min=1)
        result.means["ratio"] = (mean.exp(), sequences)
    else:
        result.means["ratio"] = (ratio, sequences if by_sequence else counted)
    if phi is not None:
        empty = ~counted.any(1, keepdim=True)  # a sequence without tokens has the weight 1
        result.means["vespo/phi_seq_mean"] = (torch.where(empty, torch.ones_like(phi), phi), of_adv)
    if "on policy" in keeps:
        result.means["off_policy_masked"] = ((~keeps["on policy"]).to(dtype), counted)
    share = case.importance_sampling_ratio
    if share is not None:
        of_share = counted if share.shape == counted.shape else sequences
        share = by_column(share, dtype)
        if of_share is sequences:  # a sequence without tokens has the ratio 1
            share = torch.where(counted.any(1, keepdim=True), share, torch.ones_like(share))
        result.means["importance_sampling_ratio"] = (share, of_share)
    if o.loss_type == "cispo":
        capped = (ratio > o.epsilon_high) & (adv > 0) & counted.any(1, keepdim=True)
        result.means["cispo_clip_ratio"] = (capped.to(dtype), either)
    if o.loss_type in CLIPPED:
        bounded = ratio if o.delta is None else ratio.clamp(max=o.delta)
        low = (bounded < 1 - o.epsilon) & (adv < 0)
        high = (bounded > 1 + o.epsilon_high) & (adv > 0)
    elif o.loss_type == "gmpo":
        low, high = (log_ratio < -o.epsilon) & (adv < 0), (log_ratio > o.epsilon_high) & (adv > 0)
        either = counted
    else:
        return
    for name, clipped in (("low", low), ("high", high), ("region", low | high)):
        result.means[f"clip_ratio/{name}_mean"] = (clipped.to(dtype), either)
    rows = either.any(1)
    if rows.any():
        share_of = lambda x: (pick(x.to(dtype), either).sum(1) / either.sum(1))[rows]  # noqa: E731
        result.extremes["clip_ratio/low_min"] = share_of(low).min()
        result.extremes["clip_ratio/high_max"] = share_of(high).max()


@dataclass
class ScoresResult:
    """What scores are, in float64, and the gradients of all leaves under what arrives at them."""

    head: Head
    logps: Tensor  # (B, T), as all up to d_divergences
    entropies: Tensor
    divergences: Tensor | None  # from another head's distributions
    d_logps: Tensor  # d loss / d logp
    d_entropies: Tensor
    d_divergences: Tensor | None
    d_hidden: Tensor  # (B, T, H)
    d_weight: Tensor  # (V, H)
    d_bias: Tensor | None = None  # (V,)
    d_lora_a: Tensor | None = None  # (r, H)
    d_lora_b: Tensor | None = None  # (V, r)
    d_lora_input: Tensor | None = None  # (B, T, H)


@dataclass
class ReferenceResult(ScoresResult):
    """Everything that a loss returns, in float64, and the ingredients of its error bounds."""

    loss: Tensor = field(kw_only=True)
    metrics: dict[str, Tensor] = field(kw_only=True)
    evaluation: Evaluation = field(kw_only=True)


def mean_metrics(evaluation: Evaluation) -> dict[str, Tensor]:
    """Each metric as one number: means over what counts (0 if nothing does), then the extremes."""
    means = {}
    for name, pair in evaluation.means.items():
        values, counts = torch.broadcast_tensors(*pair)
        means[name] = pick(values, counts).sum() / counts.sum().clamp(min=1)
    return {**means, **evaluation.extremes}


def on_grids(case: Case, h: Head, divergences: Tensor | None) -> list[Tensor]:
    """Log-probabilities, entropies and, where there are some, divergences, (B, T) each, attached to
    the head."""
    rows = [h.logps, h.entropies, *([] if divergences is None else [divergences])]
    return [on_grid(x, h.counted) for x in rows]


def through_head(h: Head, scores: list[Tensor], up: list[Tensor]) -> dict[str, Any]:
    """The fields of a `ScoresResult`, given what arrives at the scores, (B, T) each."""
    names = [*h.leaves]
    gradients: tuple[Tensor | None, ...] = (None,) * len(names)
    if h.counted.any():
        gradients = torch.autograd.grad(
            scores, [*h.leaves.values()], up, allow_unused=True, retain_graph=True
        )
    grads = {}
    for name, x in zip(names, gradients, strict=True):
        x = torch.zeros_like(h.leaves[name]) if x is None else x
        grads[name] = on_grid(x, h.counted) if name in ("hidden", "lora_input") else x
    found = {"divergences": None} | dict(zip(SCORES, [x.detach() for x in scores], strict=False))
    arrived = {"divergences": None} | dict(zip(SCORES, up, strict=False))
    return {"head": h, **found, **{f"d_{name}": x for name, x in (arrived | grads).items()}}


def reference_loss(case: Case, edit_raw: Any = None) -> ReferenceResult:
    """Loss, per-token numbers, every gradient and the metrics of `case`, in float64 from its
    (rounded) inputs; `edit_raw` plants a fault in the products' result."""
    h, o = head(case, edit_raw=edit_raw), settings(case)
    full = o.beta != 0.0 and o.kl_estimator == "full"
    scores = on_grids(case, h, divergences_of(case, h.log_probs) if full else None)
    evaluation = evaluate(case, *scores)
    up: tuple[Tensor | None, ...] = (None,) * len(scores)
    if evaluation.loss.requires_grad and h.counted.any():
        up = torch.autograd.grad(evaluation.loss, scores, allow_unused=True, retain_graph=True)
    arrives = [torch.zeros_like(x) if g is None else g for x, g in zip(scores, up, strict=True)]
    return ReferenceResult(
        **through_head(h, scores, arrives), loss=evaluation.loss.detach(),
        metrics=mean_metrics(evaluation),
        evaluation=evaluation,
    )  # fmt: skip


def reference_scores(case: Case, up: dict[str, Tensor]) -> ScoresResult:
    """Log-probabilities, entropies, divergences, and every gradient under what arrives at them:
    `up` (B, T) by name."""
    h = head(case)
    scores = on_grids(case, h, divergences_of(case, h.log_probs))
    arrives = [pick(up[name].double(), h.counted) for name, _ in zip(SCORES, scores, strict=False)]
    return ScoresResult(**through_head(h, scores, arrives))
