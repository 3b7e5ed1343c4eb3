"""The formulas of the float64 reference, one small function each: ratios in, per-token terms
out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.case_builder import Case

Options = SimpleNamespace  # a case's configuration, with all defaults
# GRPOConfig's defaults (TRL 1.16), then those of the options that are ours; stated again here on
# purpose.
DEFAULTS = {
    "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None,
    "delta": None, "beta": 0.0, "use_bias_correction_kl": True, "temperature": 1.0,
    "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "off_policy_mask_threshold": None,
    "max_completion_length": 512, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "kl_estimator": "k3", "final_logit_softcapping": None, "logit_scale": 1.0,
    "logits_dtype": "float32", "teacher_final_logit_softcapping": None, "teacher_logit_scale": 1.0,
    "beta_of_divergence": 1.0, "lora_scaling": 1.0, "on_missing_set": "error",
    "entropy_of": "the set", "arrives": "same", "more": False, "divergence": "forward_kl",
    "tail": None, "log_prob_min_clamp": None, "loss_max_clamp": None,
}  # fmt: skip
# exp() of a log-ratio is cut here, far above all that float32 can hold, so that float64 never meets
# inf * 0.
LOG_RATIO_LIMIT = {torch.float64: 600.0, torch.float32: 85.0}
# A term above this is an overflow for whoever computes in float32.
OVERFLOW = 1e37


def settings(case: Case) -> SimpleNamespace:
    """The case's configuration with the defaults filled in."""
    return filled(**{**case.config, **case.others})


def filled(**options: Any) -> SimpleNamespace:
    """These options and the defaults of all others."""
    o = SimpleNamespace(**{**DEFAULTS, **options})
    o.epsilon_high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    return o


def kl_estimate(o: Options, logps: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(policy || ref) per token, d = ref - logp; then the size of its terms and of those of its
    derivative."""
    d = ref - logps
    if o.kl_estimator == "k1":
        return -d, d.abs(), torch.ones_like(d)
    if o.kl_estimator == "k2":
        return d * d / 2, d * d / 2, d.abs()
    grown = torch.exp(d.clamp(max=LOG_RATIO_LIMIT[d.dtype]))
    return grown - d - 1, grown.detach() + d.abs() + 1, grown.detach() + 1


def gamma_weight(o: Options, adv: Tensor, log_ratio: Tensor, counted: Tensor, case: Case) -> Tensor:
    """VESPO's weight of a sequence, exp(lambda + k log w - lambda w), without gradient. (B, 1) or,
    by adv, (B, T)."""
    lowest = torch.tensor(1e-8, dtype=torch.float64).log().item()
    log_w = log_ratio.detach().clamp(-20, 20).sum(1, keepdim=True)
    if case.importance_sampling_ratio is not None:
        log_is = by_column(case.importance_sampling_ratio, log_w.dtype).log().clamp(lowest, 20)
        if log_is.shape[1] == counted.shape[1]:
            log_is = pick(log_is, counted).sum(1, keepdim=True)
        log_w = log_w + log_is
    log_w = log_w.clamp(lowest, 20)
    k = either(adv >= 0, o.vespo_k_pos, o.vespo_k_neg, log_w.dtype)
    lam = either(adv >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg, log_w.dtype).clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp()


def by_column(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One value a token (B, T), or a sequence (B, 1)."""
    return x.to(dtype)[:, None] if x.dim() == 1 else x.to(dtype)


def either(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """`torch.where` of two numbers, without a stop at float32."""
    return torch.where(condition, torch.tensor(yes, dtype=dtype), torch.tensor(no, dtype=dtype))


def pick(x: Tensor, counted: Tensor) -> Tensor:
    """`x` where counted, 0 elsewhere: a select, so that NaN and inf where masked vanish."""
    return torch.where(counted, x, torch.zeros((), dtype=x.dtype))


def clip(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """`x` within the bounds. One that is met exactly passes the gradient, which torch's clamp does
    up to 2.13 only."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def clipped(o: Options, ratio: Tensor, adv: Tensor, logps: Tensor, phi: Any) -> Tensor:
    bounded = ratio if o.delta is None else clip(ratio, high=o.delta)
    return -torch.min(bounded * adv, clip(ratio, 1 - o.epsilon, 1 + o.epsilon_high) * adv)


def cispo(o: Options, ratio: Tensor, adv: Tensor, logps: Tensor, phi: Any) -> Tensor:
    return -ratio.detach().clamp(max=o.epsilon_high) * adv * logps


def sapo(o: Options, ratio: Tensor, adv: Tensor, logps: Tensor, phi: Any) -> Tensor:
    tau = either(adv > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, adv.dtype)
    # its slope keeps its digits near a gate of 1
    gate = torch.nn.functional.logsigmoid(tau * (ratio - 1)).exp()
    return -gate * 4 / tau * adv


def vespo(o: Options, ratio: Tensor, adv: Tensor, logps: Tensor, phi: Any) -> Tensor:
    return -phi * adv * logps


def sequence_mean(o: Options, m: Tensor, items: float) -> Tensor:
    return m / (m.sum(1, keepdim=True).clamp(min=1) * max(len(m), 1))


def token_mean(o: Options, m: Tensor, items: float) -> Tensor:
    return m / m.sum().clamp(min=1)


def num_items(o: Options, m: Tensor, items: float) -> Tensor:
    return m / max(items, 1.0)


def max_length(o: Options, m: Tensor, items: float) -> Tensor:
    return m / (max(len(m), 1) * o.max_completion_length)


def sequence_sum(o: Options, m: Tensor, items: float) -> Tensor:
    return m / max(len(m), 1)


@dataclass(frozen=True)
class Loss:
    """What tells a loss from the others: an entry of `TERMS`, by which every suite has it."""

    # the per-token policy loss (B, T) before masks; None: `geometric_mean`
    surrogate: Callable[..., Tensor] | None
    # weights (B, T) from the mask: loss = sum(weight * per-token loss)
    normalizer: Callable[..., Tensor]
    per_sequence: bool = False  # one ratio per sequence at any level
    in_trl: bool = True


TERMS = {
    "grpo": Loss(clipped, sequence_mean),
    "bnpo": Loss(clipped, token_mean),
    "dr_grpo": Loss(clipped, max_length),
    "dapo": Loss(clipped, num_items),
    "cispo": Loss(cispo, num_items),
    "sapo": Loss(sapo, sequence_mean),
    "luspo": Loss(clipped, sequence_sum),
    "vespo": Loss(vespo, num_items, per_sequence=True),
    "gmpo": Loss(None, sequence_mean, per_sequence=True),
}
CLIPPED = tuple(name for name, loss in TERMS.items() if loss.surrogate is clipped)


def token_weights(
    o: Options, counted: Tensor, items: float | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(B, T): the normalizer's weights; without `items` the counted tokens are meant."""
    m = counted.to(dtype)
    return TERMS[o.loss_type].normalizer(o, m, float(m.sum() if items is None else items))


def geometric_mean(
    o: Options, log_ratio: Tensor, adv: Tensor, counted: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """GMPO: -A * exp(mean of the one-sidedly clipped log-ratios over the active tokens), (B, 1);
    those, (B, T)."""
    clamped = clip(log_ratio, -o.epsilon, o.epsilon_high)
    low, high = torch.minimum(log_ratio, clamped), torch.maximum(log_ratio, clamped)
    clipped = torch.where(adv > 0, low, high)
    clipped = pick(clipped.clamp(max=LOG_RATIO_LIMIT[log_ratio.dtype]), active)
    mean = clipped.sum(1, keepdim=True) / active.sum(1, keepdim=True).clamp(min=1)
    valid = counted.any(1, keepdim=True) & (adv != 0)
    return pick(-mean.exp() * pick(adv, valid), valid) / max(len(adv), 1), clipped


def divergence(beta: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    """(n,) of distributions (n, V): KL(q || p) for beta 0, KL(p || q) for 1.

    Between them (1 - beta) KL(p || m) + beta KL(q || m), m = (1 - beta) p + beta q.
    """
    if beta == 1.0:
        return relative_entropy(log_p, log_q)
    if beta == 0.0:
        return relative_entropy(log_q, log_p)
    shares = torch.tensor([1 - beta, beta], dtype=log_p.dtype).log()
    nowhere = log_p.isinf() & log_q.isinf()  # where the derivative of logaddexp is NaN
    terms = (x.masked_fill(nowhere, 0.0) + y for x, y in zip((log_p, log_q), shares, strict=True))
    mixture = torch.logaddexp(*terms).masked_fill(nowhere, -float("inf"))
    return (1 - beta) * relative_entropy(log_p, mixture) + beta * relative_entropy(log_q, mixture)


def relative_entropy(log_x: Tensor, log_y: Tensor) -> Tensor:
    """KL(x || y), (n,), inf where y rules out what x does not; with d = log x - log y.

    Its value as a sum of x (e^-d - 1 + d), of terms as small as d^2; its gradient as that of a sum
    of x d, where y does not cancel.
    """
    inside = ~(log_x.isinf() | log_y.isinf())
    d = log_x.masked_fill(~inside, 0.0) - log_y.masked_fill(~inside, 0.0)
    only_y = pick(log_y.masked_fill(log_y.isinf(), 0.0).exp(), log_x.isinf() & ~log_y.isinf())
    ruled_out = log_y.isinf() & ~log_x.isinf()
    x, y = (pick(z.masked_fill(~inside, 0.0).exp(), inside) for z in (log_x, log_y))
    terms = torch.where(d < -1, y - x + x * d, x * (torch.expm1(-d.clamp(min=-1)) + d))
    terms = (terms + only_y).masked_fill(ruled_out, float("inf")).sum(-1).detach()
    plain = (x * d).sum(-1)
    return terms + (plain - plain.detach())


def listed_divergence(
    o: Options, log_p: Tensor, ids: Tensor, log_q: Tensor, least_tail: float
) -> Tensor:
    """(n,) from a teacher that gives log_q of K ids a row (n, K); what is -1 or of no mass is not
    listed."""
    listed = (ids >= 0) & (log_q > -torch.inf)
    log_p = log_p.gather(-1, ids.clamp(min=0))
    log_q = pick(log_q, listed)
    total = lambda x: pick(x, listed).sum(-1)  # noqa: E731
    p_tail, q_tail = ((1 - total(x.exp())).clamp(min=least_tail) for x in (log_p, log_q))
    if o.log_prob_min_clamp is not None:
        log_p, log_q = (x.clamp(min=o.log_prob_min_clamp) for x in (log_p, log_q))
    if o.divergence == "reverse_kl":
        value = total(log_p.exp() * (log_p - log_q)) + p_tail * (p_tail / q_tail).log()
    else:
        value = total(log_q.exp() * (log_q - log_p))
        value = value + (q_tail * (q_tail / p_tail).log() if o.tail else 0.0)
    most = o.loss_max_clamp
    return value if most is None else value.clamp(min=-most, max=most)
