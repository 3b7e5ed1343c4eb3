"""What a sampler of another engine adds to a loss, in plain torch: TRL's correction, its options
and ratio; and score centering (https://arxiv.org/abs/2609.20807), over all logits, the term of its
K most likely ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support import reference
from tests.support.case_builder import Case, seeded
from tests.support.run_case import config_of

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask")
PREFIX = "vllm_importance_sampling_"
Gradients = dict[str, Tensor]
FLOOR = 1e-6  # of the tails, the paper's appendix A.3


def trls_ratio(case: Case, old: Tensor) -> Tensor:
    """As TRL 1.16 writes it: (B, T), 1 where masked, or (B, 1); the last mode as OpenRLHF does."""
    config, mask = config_of(case), (case.completion_mask != 0).to(old.dtype)
    difference = (old - case.sampling_per_token_logps.to(old.dtype)) * mask
    difference = difference.nan_to_num(nan=0.0)
    mode, low, high = (getattr(config, PREFIX + x) for x in ("mode", "clip_min", "clip_max"))
    if mode == "sequence_mean_mask":
        mean = torch.exp(difference.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1))
        return difference.exp() * ((mean >= (low or 0.0)) & (mean <= (high or math.inf)))
    of_level = difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference
    ratio = of_level.exp()
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def given_ratio(case: Case, old: Tensor) -> Case:
    """The same loss, with the ratio made beforehand."""
    config = {f"{PREFIX}correction": False}
    return case.but(importance_sampling_ratio=trls_ratio(case, old), config=config)


def candidates(case: Case, k: int) -> Case:
    """`case` with a sampler near the policy, and its k most likely ids (B, T, k) in any order.

    Where there is room for it, some repeat, one is the sampled id, one is padding, one has no mass,
    and one position has none.
    """
    g, ids = seeded(f"{case.name} candidates"), case.completion_ids
    everywhere = reference.head(case.but(completion_mask=torch.ones_like(case.completion_mask)))
    policy = everywhere.log_probs.detach().reshape(*ids.shape, -1)
    noise = torch.randn(policy.shape, generator=g, dtype=torch.float64)
    logq = (policy + 0.5 * noise).log_softmax(-1)
    topk = logq.topk(k, -1).indices
    topk = topk.gather(-1, torch.rand(topk.shape, generator=g).argsort(-1))
    if ids.shape[1] > 4 and k > 2:
        topk[0, 0, -1] = topk[0, 0, 0]
        topk[0, 1, 1], topk[0, 2, 0], topk[0, 4] = ids[0, 1], -1, -1
    logps = logq.gather(-1, topk.clamp(min=0))
    if ids.shape[1] > 4 and k > 2:
        logps[0, 0, -1] = -0.1  # the repetition's is not read
        topk[0, 3, -1], logps[0, 3, -1] = topk[0, 3, 1], logps[0, 3, 1]
        logps[0, 3, 1] = -torch.inf  # the repetition counts
    wide = torch.promote_types(case.hidden.dtype, torch.float32)
    sampled = logq.gather(-1, ids[..., None])[..., 0]
    return case.but(
        sampling_topk_ids=topk,
        sampling_topk_logps=logps.to(wide),
        sampling_per_token_logps=sampled.to(wide),
    )


def importance(case: Case, ratio: Tensor) -> Tensor:
    """f of a ratio: 1 without a correction."""
    config = config_of(case)
    if not config.vllm_importance_sampling_correction:
        return torch.ones_like(ratio)
    low, high = (getattr(config, f"{PREFIX}clip_{x}") for x in ("min", "max"))
    if config.vllm_importance_sampling_mode == "token_truncate":
        return ratio.clamp(low, high)
    out = torch.zeros_like(ratio, dtype=torch.bool)
    out = out if low is None else out | (ratio < low)
    out = out if high is None else out | (ratio > high)
    return torch.where(out, 0.0, ratio)


def sampler(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q (n, V), 0 where an id is not a candidate; and which are."""
    counted = case.completion_mask != 0
    ids, logps = case.sampling_topk_ids[counted], case.sampling_topk_logps[counted].to(dtype)
    q = torch.zeros(len(ids), case.weight.shape[0], dtype=dtype)
    listed = torch.zeros_like(q, dtype=torch.bool)
    for k in reversed(range(ids.shape[1])):  # the first of equal ids is written last
        row = ((ids[:, k] >= 0) & (logps[:, k] > -torch.inf)).nonzero()[:, 0]
        q[row, ids[row, k]], listed[row, ids[row, k]] = logps[row, k].exp(), True
    return q, listed


def centered_loss(case, dtype=torch.float64, *, whole=False):
    """The loss of a case with candidates, and its gradients by autograd.

    With `whole` the expectation is one over the vocabulary, tail included, whose gradient is the
    same.
    """
    h, o = reference.head(case, dtype), reference.settings(case)
    dtype = torch.promote_types(dtype, torch.float32)  # of all that comes after the logits
    scores = [x.to(dtype) for x in reference.on_grids(case, h, None)]
    corrects = config_of(case).vllm_importance_sampling_correction
    same = given_ratio(case, scores[0].detach()) if corrects else case
    log_probs = h.log_probs.to(dtype)
    p, (q, listed) = log_probs.detach().exp(), sampler(case, dtype)
    rest = lambda x: (1 - (x * listed).sum(1, keepdim=True)).clamp(min=FLOOR)  # noqa: E731
    rho = rest(q) / rest(p)
    c = q * importance(case, p / torch.where(listed, q, 1.0))
    if whole:
        c = torch.where(listed, c, rho * p * importance(case, 1 / rho))
    else:
        c = torch.where(listed, c - rho * importance(case, 1 / rho) * p, 0.0)
    mean = reference.on_grid((c * torch.where(c == 0, 0.0, log_probs)).sum(1), h.counted)
    adv = case.advantages.to(dtype)
    adv = adv if adv.dim() == 2 else adv[:, None]
    acts, _ = reference.policy_masks(case, scores[0].detach(), scores[1], scores[0].detach(), adv)
    weights = reference.token_weights(o, h.counted, case.num_items_in_batch, dtype)
    policy = reference.evaluate(same, *scores).loss
    loss = policy + (weights * reference.pick(adv * mean, acts)).sum()
    grads = torch.autograd.grad(loss, [*h.leaves.values()], allow_unused=True)
    found = {
        name: reference.on_grid(x, h.counted) if name in ("hidden", "lora_input") else x
        for name, x in zip(h.leaves, grads, strict=True)
        if x is not None
    }
    return loss.detach(), found
