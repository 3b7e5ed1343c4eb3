"""What a row kernel should give in float64, and how far one in float32 may be off.

With u = 2^-24, half a unit in the last place of a number of 1: z is a few products of the raw
projection, so each is off by some u * |z|. The other bounds follow to first order: what they depend
on is off by that much, a term e^d of a sum by |d| * 2 u and its own rounding, a sum by a rounding
for each of the sums it went through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends import FusedLoss, LogitTransform, RowStats
from grpo_kernels.backends.formulas import ESTIMATORS, SURROGATES, times_or_zero
from tests.support import reference
from tests.support.row_cases import tensors_of

U = 2.0**-24
# of a sum: a lane's roundings, its rescaling at each larger logit, the tree of lanes
TERMS = 32 * U
FEW = 8 * U
FLOOR = 1e-36  # of everything: below it numbers lose bits to underflow


@dataclass(frozen=True)
class Truth:
    """Row statistics (n,) in float64 with their bounds, and what gradients need."""

    want: dict[str, Tensor]
    bound: dict[str, Tensor]
    logs: Tensor  # (n, V) log-probabilities
    e: Tensor  # (n, 1) error of z
    slope: Tensor  # (n, V) d z / d x
    slope_error: Tensor  # (n, V), relative


def truth(raw: Tensor, ids: Tensor, transform: LogitTransform) -> Truth:
    """The statistics of `raw` (n, V) fp32; all logits finite or -inf, and no row only -inf."""
    x = raw if transform.bias is None else raw + transform.bias
    x = x if transform.rounded_to is None else x.to(transform.rounded_to)
    x, inv_t, cap = x.double(), transform.inv_temperature, transform.softcap
    inv_t = inv_t.double() if isinstance(inv_t, Tensor) else inv_t
    z, slope = x * transform.scale * inv_t, torch.ones_like(x) * transform.scale * inv_t
    slope_error = 0 * x + FEW
    if cap is not None:
        inner = x * transform.scale / cap
        z, q = torch.tanh(inner) * cap * inv_t, torch.exp(-2 * inner.abs())
        slope, slope_error = slope * 4 * q / (1 + q).square(), 16 * U * (1 + inner.abs())
    finite = z.masked_fill(z.isinf(), 0.0)
    is_plain = isinstance(inv_t, float) and transform.scale * inv_t == 1.0
    roundings = 12 if cap is not None else 0 if is_plain else 4
    e = roundings * U * finite.abs().amax(1, keepdim=True)

    top, argmax = z.amax(1, keepdim=True), z.argmax(1)
    log_sum = torch.log1p(_log_sum(z - top, argmax).exp())
    logs = z - top - log_sum[:, None]  # keeps its precision where it is near 0, unlike torch's
    p = logs.exp()
    no_target, no_top = (p.scatter(1, index[:, None], 0.0) for index in (ids, argmax))
    d = torch.where(p > 0, top - z, 0.0)
    entropy = log_sum + (p * d).sum(1)
    away = torch.where(p > 0, logs + entropy[:, None], 0.0)
    # what logp is computed from
    log_others, margin = _log_sum(z - top, ids), (top - z).gather(1, ids[:, None])[:, 0]
    want = {
        "logps": -torch.logaddexp(torch.zeros_like(margin), log_others + margin),
        "max_logit": top[:, 0],
        "log_sum": log_sum,
        "entropies": entropy,
        "log_sum_sq_probs": (2 * logs).logsumexp(1),
        "mean_logits": z.mean(1),
    }
    wide = (log_others.abs() + margin.abs()).nan_to_num(posinf=0.0)
    bound = {
        "logps": no_target.sum(1) * (2 * e[:, 0] + _sums(no_target, d) + 2 * U * wide)
        + FEW * want["logps"].abs(),
        "max_logit": e[:, 0],
        "log_sum": no_top.sum(1) * (2 * e[:, 0] + _sums(no_top, d)) + FEW * log_sum,
        "entropies": (p * away.abs()).sum(1) * 2 * e[:, 0] + (p * d * (TERMS + 2 * U * d)).sum(1)
        + no_top.sum(1) * _sums(no_top, d) + FEW * entropy,
        "log_sum_sq_probs": 4 * e[:, 0] + 4 * _sums(p, d) + FEW * log_sum,
        "mean_logits": e[:, 0] + TERMS * finite.abs().mean(1),
    }  # fmt: skip
    bound["logps"] = torch.where(want["logps"].isinf(), 0.0, bound["logps"])
    return Truth(want, bound, logs, e, slope, slope_error)


def gradient(at: Truth, ids: Tensor, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """d loss / d raw (n, V) for a = d loss / d logp, b = d loss / d entropy (n,), and its bound."""
    p = at.logs.exp()
    hot = torch.zeros_like(p).scatter_(1, ids[:, None], 1.0)
    others = -torch.expm1(at.want["logps"])[:, None]
    finite = torch.where(p > 0, at.logs, 0.0)
    away = torch.where(p > 0, finite + at.want["entropies"][:, None], 0.0)
    a, b = (torch.zeros_like(at.logs[:, :1]) if x is None else x.double()[:, None] for x in (a, b))
    dz = a * torch.where(hot > 0, others, -p) - b * p * away
    rho = 2 * at.e + TERMS + 4 * U * finite.abs() + at.bound["log_sum"][:, None]
    size = torch.where(hot > 0, others * FEW + p * at.bound["logps"][:, None], p * rho) * a.abs()
    of_entropy = FEW * (1 + at.want["entropies"][:, None] + finite.abs()) + away.abs() * rho
    of_entropy += 2 * at.e + (at.bound["logps"] + at.bound["entropies"])[:, None]
    size = size + b.abs() * p * of_entropy
    d = dz * at.slope
    return d, (size + FEW * dz.abs()) * at.slope.abs() + d.abs() * at.slope_error


def loss_stats(
    loss: FusedLoss, logps: Tensor, log_ratio: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """The terms of `loss` (n,) by `formulas` in float64, and the sizes of what they are sums of."""
    slopes = loss.d_policy if loss.advantages is None else loss.advantages
    given = logps, log_ratio, slopes, loss.weights
    logps, log_ratio, slopes, weights = (x.double() for x in given)
    ratio = log_ratio.exp()
    if loss.old is None:
        policy, a = times_or_zero(logps, slopes) if loss.is_linear else 0 * logps, slopes
    else:
        gate = torch.ones_like(weights) if loss.gate is None else loss.gate.double()
        found = SURROGATES[loss.surrogate](log_ratio, slopes, logps, *loss.constants)
        policy, d_ratio, d_logp = (times_or_zero(x, gate) for x in found)
        policy, a = weights * policy, weights * (d_ratio + d_logp)
        if loss.surrogate == "sapo":
            ratio = ratio * (1 + ratio)
    size = slopes.abs() * (1 + logps.abs()) * (1 + ratio) * (1 if loss.old is None else weights)
    if loss.kl_estimator is None or loss.ref is None:
        return {"loss": (policy, size), "d_logp": (a, size)}
    kl, d_kl, d_corrected = ESTIMATORS[loss.kl_estimator](logps, loss.ref.double())
    gap = loss.ref - logps
    kl_size = (gap.abs() + gap.expm1().abs()) * (1 + gap.abs()) * (1 + log_ratio.exp())
    if loss.corrects_kl:
        kl, d_kl = log_ratio.exp() * kl, log_ratio.exp() * d_corrected
    beta = loss.beta * weights
    slope_size = beta * (kl_size + 1 + log_ratio.exp())
    return {
        "loss": (policy + beta * kl, size + beta * kl_size),
        "d_logp": (a + beta * d_kl, size + slope_size),
        "kl": (kl, kl_size),
    }


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding to `dtype` may change."""
    kind = torch.finfo(dtype)
    return kind.eps / 2 * x.abs() + kind.smallest_normal * kind.eps


def check(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Raise with the worst element, unless every |got - want| is within its bound."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    error, bound = (got.double() - want.double()).abs(), bound + FLOOR
    excess = torch.where(got == want, 0.0, torch.nan_to_num(error / bound, nan=torch.inf))
    worst = excess.argmax()
    assert excess.max() <= 1, (
        f"{name}[{worst}]: got {got.flatten()[worst]:.9g}, want {want.flatten()[worst]:.9g}, "
        f"error {error.flatten()[worst]:.3g}, allowed {bound.flatten()[worst]:.3g}"
    )


def check_stats(got: RowStats, at: Truth) -> None:
    """Every statistic there is but `is_top1`."""
    assert got.extras.keys() <= at.want.keys() | {"is_top1"}, "a statistic's truth is missing"
    found = tensors_of(got)
    for name in found.keys() & at.want.keys():
        check(name, found[name], at.want[name], at.bound[name])


def _log_sum(z: Tensor, left_out: Tensor) -> Tensor:
    """log sum_j e^z_j (n,) without the column `left_out` (n,)."""
    return z.scatter(1, left_out[:, None], -torch.inf).logsumexp(1)


def _sums(weights: Tensor, d: Tensor) -> Tensor:
    """Relative error (n,) of the sum of terms e^-d, proportional to `weights` (n, V)."""
    return TERMS + 2 * U * (weights * d).sum(1) / weights.sum(1).clamp(min=1e-300)


RELATIVE = 1e-5  # of a term: its exponentials are off by a few last places times |log p|
LOWEST = -1e4  # in the place of -inf: e^ of it is 0 in float64 too, and 0 * it is 0


@dataclass(frozen=True)
class Divergence:
    """D (n,) and d D / d (raw logits) (n, V), with their bounds."""

    value: Tensor
    bound: Tensor
    gradient: Tensor
    gradient_bound: Tensor


def divergence(student: Truth, teacher: Truth, beta: float) -> Divergence:
    """By the definition, and autograd. Where it should be infinite it is thousands."""
    leaves = [x.logs.clamp(min=LOWEST).requires_grad_() for x in (student, teacher)]
    logs, other_logs = (torch.log_softmax(leaf, dim=1) for leaf in leaves)
    value = reference.divergence(beta, logs, other_logs)
    slopes = torch.autograd.grad(value.sum(), leaves)
    logs, other_logs, value = logs.detach(), other_logs.detach(), value.detach()
    p, q, d = logs.exp(), other_logs.exp(), logs - other_logs

    # of d: of both logits, their difference, and that less the offset; what all d share counts in
    # second order only
    own, others = (x.want["max_logit"] + x.want["log_sum"] for x in (student, teacher))
    apart = (d + (own - others)[:, None]).abs() + d.abs()
    error = student.e + teacher.e + U * apart.clamp(max=1e3)
    shared = error.amax(1) + 4 * U * (own.abs() + others.abs())
    moved = (error * (slopes[0].abs() + slopes[1].abs())).sum(1)
    bound = RELATIVE * value.abs() + 2 * moved + 4 * (1 + value.abs()) * shared.square()

    mixed = 0 < beta < 1
    of_mixture = (1 - beta) * p * (logs - _mixture(logs, other_logs, beta)) if mixed else 0 * p
    k = {0.0: p - q, 1.0: p * d}.get(beta, of_mixture)
    k = torch.where(p + q > 0, k, 0.0)
    size = RELATIVE * k.abs() + 4 * error * (p * (1 + d.abs().clamp(max=1e3)) + q)
    size = size + p * size.sum(1, keepdim=True)
    gradient = slopes[0] * student.slope
    return Divergence(
        value, bound, gradient, size * student.slope.abs() + gradient.abs() * student.slope_error
    )


def _mixture(logs: Tensor, other_logs: Tensor, beta: float) -> Tensor:
    """log((1 - beta) p + beta q) (n, V)."""
    shares = torch.tensor([1 - beta, beta], dtype=logs.dtype, device=logs.device).log()
    return torch.logaddexp(logs + shares[0], other_logs + shares[1])
