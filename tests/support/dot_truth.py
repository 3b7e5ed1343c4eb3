"""What the scoring kernel should give in float64, and how far off it may be (tests/support/tolerance.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.interface import LogitTransform, RowStats
from tests.support.head_bounds import UNITS
from tests.support.row_cases import DEVICE, PLAIN

UNIT = UNITS[torch.float32]


@dataclass(frozen=True)
class Want:
    """Statistics (n,) in float64, and how far off they may be."""

    values: dict[str, Tensor]
    bounds: dict[str, Tensor]


def operands(n: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (torch.randn(rows, width, device=DEVICE) for rows in (n, vocab))
    return hidden.to(dtype), weight.to(dtype), torch.randint(vocab, (n,), device=DEVICE)


def want_of(hidden: Tensor, weight: Tensor, ids: Tensor, transform: LogitTransform = PLAIN) -> Want:
    h, w, cap = hidden.double(), weight.double(), transform.softcap
    inv_t = transform.inv_temperature
    inv_t = inv_t.double() if isinstance(inv_t, Tensor) else inv_t
    bias = (
        torch.zeros(len(w), device=h.device) if transform.bias is None else transform.bias.double()
    )
    raw = h @ w.T + bias
    size = (h.abs() @ w.abs().T + bias.abs().masked_fill(bias.isinf(), 0.0)).amax(1, keepdim=True)
    error = 2 * UNIT.product * size
    if transform.rounded_to is not None:
        finite = raw.masked_fill(raw.isinf(), 0.0).abs().amax(1, keepdim=True)
        error = error + torch.finfo(transform.rounded_to).eps * finite
        raw = raw.to(transform.rounded_to).double()
    z = raw * transform.scale
    z = (z if cap is None else cap * torch.tanh(z / cap)) * inv_t
    e = (error * abs(transform.scale) * inv_t + UNIT.extra)[:, 0]
    logs = z.log_softmax(1)
    p = logs.exp()
    entropies = -torch.where(p > 0, p * logs, 0.0).sum(1)
    top = z.amax(1)
    away = (torch.where(p > 0, logs, 0.0) + entropies[:, None]).abs()
    values = {
        "logps": logs.gather(1, ids[:, None])[:, 0],
        "max_logit": top,
        "log_sum": (z - top[:, None]).logsumexp(1),
        "entropies": entropies,
    }
    return Want(
        values, {"logps": e, "max_logit": e, "log_sum": e, "entropies": e * (1 + (p * away).sum(1))}
    )


def check(stats: RowStats, want: Want, what: object = "") -> None:
    for name, value in want.values.items():
        got = getattr(stats, name)
        assert got.dtype == torch.float32
        assert got.shape == value.shape
        fits = (got.double() - value).abs() <= want.bounds[name]
        fits |= (got == value) | (got.isnan() & value.isnan())
        worst = (~fits).nonzero()[:1].flatten().tolist()
        assert fits.all(), (
            f"{what}: {name}{worst}: got {got[worst]}, want {value[worst]} +- {want.bounds[name][worst]}"
        )
