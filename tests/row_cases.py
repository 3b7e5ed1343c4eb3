"""What the tests of the row kernels feed them: rows of logits, transforms, losses; small tiles."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowStats
from grpo_kernels.backends.triton_rows import INTERPRETED
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.token_loss import TokenLoss
from tests import interpreter

if INTERPRETED:
    interpreter.prepare()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("logps", "max_logit", "log_sum", "entropies")
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")
PLAIN = LogitTransform()


def tile(vocab: int) -> RowConfig:
    """Small, so that loops have several steps and a tail."""
    return RowConfig(block_n=16, block_v=16 if vocab < 40 else 64 if vocab < 128 else 128, num_warps=2, num_stages=1)


def rows(n: int, vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    return torch.randn(n, vocab, device=DEVICE) * scale, torch.randint(vocab, (n,), device=DEVICE)


def make_transform(n: int, vocab: int, kind: int, rounded_to: torch.dtype | None) -> LogitTransform:
    """Four kinds: plain; bias, scale and one temperature; one a row; all of them with a soft-cap."""
    bias, inv_t = torch.randn(vocab, device=DEVICE), torch.rand(n, 1, device=DEVICE) + 0.5
    kinds = (
        PLAIN,
        LogitTransform(scale=0.3, inv_temperature=1.7, bias=bias),
        LogitTransform(scale=1.5, inv_temperature=inv_t),
        LogitTransform(scale=1.5, softcap=4.0, inv_temperature=inv_t, bias=bias),
    )
    return replace(kinds[kind % 4], rounded_to=rounded_to)


def make_loss(logps: Tensor, kind: int) -> TokenLoss:
    """Each surrogate and estimator in turn, with log-ratios on both sides of the bounds."""
    some = lambda: torch.randn_like(logps)  # noqa: E731
    kl = (None, "k1", "k2", "k3")[kind % 4]
    return TokenLoss(
        surrogate=("clipped", "cispo", "sapo", "constant", "linear")[kind % 5],
        kl=kl,
        corrects_kl=kind % 3 == 0,
        advantages=some(),
        weights=torch.rand_like(logps),
        old=None if kind % 5 > 2 else logps + 0.3 * some(),
        ref=None if kl is None else logps + 0.3 * some(),
        gate=None if kind % 2 else torch.rand_like(logps).round(decimals=1),
        clip_low=0.8,
        clip_high=1.28,
        delta=math.inf if kind % 7 else 1.5,
        tau_pos=1.0,
        tau_neg=1.05,
        beta=0.0 if kl is None else 0.04,
        b=0.0 if kind % 3 else -0.01,
    )


def assert_same(got: RowStats, want: RowStats, name: str = "") -> None:
    """The same bits, in all that both have."""
    for field in FIELDS:
        assert torch.equal(getattr(got, field), getattr(want, field)), f"{name}: {field}"
    for field in got.extras.keys() & want.extras.keys():
        assert torch.equal(got.extras[field], want.extras[field]), f"{name}: {field}"
