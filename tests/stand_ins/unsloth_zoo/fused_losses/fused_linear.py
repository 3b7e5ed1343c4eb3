"""The names and arguments of 2026.10.9 that the adapter uses, in plain torch operations of our
own.
"""

from __future__ import annotations

import torch


def _use_triton(device: torch.device) -> bool:
    return device.type == "cuda"


def fused_linear_logprobs(
    hidden, weight, ids, *, mask, logit_softcapping, return_entropy, entropy_requires_grad
):
    """Log-probabilities (B, T), 0 where `mask` (bool) is false, and entropies (B, T) without a
    gradient."""
    assert not entropy_requires_grad
    logits = hidden.float() @ weight.float().T
    if logit_softcapping:
        logits = logit_softcapping * torch.tanh(logits / logit_softcapping)
    log_probs = logits.log_softmax(-1)
    found = log_probs.gather(-1, ids[..., None])[..., 0]
    if mask is not None:
        assert mask.dtype == torch.bool
        found = torch.where(mask, found, 0)
    if not return_entropy:
        return found
    return found, -(log_probs.exp() * log_probs).sum(-1).detach()
