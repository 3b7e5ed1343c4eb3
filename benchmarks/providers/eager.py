"""All logits at once, in torch: what a trainer does that has no fused head."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Inputs, capped
from benchmarks.providers import Forward, from_logps


def eager(inputs: Inputs) -> Forward:
    """`torch.log_softmax` of the logits in fp32, and the tokens' picked from that."""

    def found() -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax(_logits(inputs).float(), dim=-1)
        logps = log_p.gather(-1, inputs.ids[..., None])[..., 0]
        return logps, entropies(log_p) if inputs.case.wants_entropy else None

    return from_logps(inputs, found)


def selective(inputs: Inputs) -> Forward:
    """TRL's `selective_log_softmax`, which keeps no log-probability of other tokens."""
    from trl.trainer.utils import selective_log_softmax

    def found() -> tuple[Tensor, Tensor | None]:
        logits = _logits(inputs)
        logps = selective_log_softmax(logits, inputs.ids)
        if not inputs.case.wants_entropy:
            return logps, None
        return logps, entropies(torch.log_softmax(logits.detach().float(), dim=-1))

    return from_logps(inputs, found)


@torch.no_grad()
def entropies(log_p: Tensor) -> Tensor:
    """(B, T), without gradient, of log-probabilities (B, T, V)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def _logits(inputs: Inputs) -> Tensor:
    return capped(torch.nn.functional.linear(inputs.hidden, inputs.weight), inputs.case.softcap)
