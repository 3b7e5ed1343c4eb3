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

import math
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """These options, which must have known names, and the defaults of all others."""
    unknown = [x for x in options if x not in DEFAULTS and not x.startswith("vllm_")]
    assert not unknown, f"no such options: {unknown}"
    o = SimpleNamespace(**{**DEFAULTS, **options})
    o.epsilon_high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    return o


def kl_estimate(o: Options, logps: Tensor, ref: Tensor) -> Tensor:
    """KL(policy || ref) per token, with d = ref - logp."""
    d = ref - logps
    if o.kl_estimator == "k1":
        return -d
    if o.kl_estimator == "k2":
        return d * d / 2
    return torch.exp(d.clamp(max=LOG_RATIO_LIMIT[d.dtype])) - d - 1


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


# fields of a case that may want a gradient
LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b", "lora_input")
SCORES = ("logps", "entropies", "divergences")


@dataclass
class Head:
    """The projection of the n counted positions, in one dtype."""

    counted: Tensor  # (B, T) bool
    ids: Tensor  # (n,)
    leaves: dict[str, Tensor]  # those of LEAVES that there are, (n, H) where one per position
    temperature: Tensor | float  # (n, 1) if one per position
    raw: Tensor  # (n, V) logit_scale * (hidden @ weight.T + the adapter's + bias)
    log_probs: Tensor  # (n, V), -inf outside of a kept set
    wide_log_probs: Tensor  # (n, V), what the entropies are of
    logps: Tensor  # (n,)
    entropies: Tensor  # (n,)

    def __getattr__(self, name: str) -> Tensor | None:
        """A leaf, None if there is none of that name."""
        if name in LEAVES:
            return self.leaves.get(name)
        raise AttributeError(name)


def teacher_case(case: Case) -> Case:
    """The case with the other head in the place of the policy's."""
    names = ("final_logit_softcapping", "logit_scale")
    options = {name: getattr(settings(case), f"teacher_{name}") for name in names}
    return case.but(
        hidden=case.teacher_hidden, weight=case.teacher_weight, bias=case.teacher_bias,
        config=options,
        lora_a=None, lora_b=None, lora_input=None,
    )  # fmt: skip


class Exact:
    """The operations of a head that a tolerance replaces, to see what their rounding changes."""

    dtype = torch.float64  # of the loss from the per-token numbers
    log_softmax = staticmethod(torch.log_softmax)

    def raw(self, raw: Tensor) -> Tensor:
        """The products' result."""
        return raw

    def between(self, u: Tensor) -> Tensor:
        """What lies between the two products of an adapter."""
        return u

    def softcap(self, raw: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(raw / cap)

    def teacher(self, case: Case) -> Exact:
        """The operations of the other head, `case`."""
        return self


def head(case: Case, dtype: torch.dtype = torch.float64, does: Exact | None = None) -> Head:
    """Log-probabilities and entropies of the counted positions, straight from the full logits.

    logits = softcap(logit_scale * (hidden @ weight.T + scaling * input @ a.T @ b.T + bias)) /
    temperature, at -inf outside of a kept set; softcap(x) = cap * tanh(x / cap); entropy = -sum_v
    p_v log p_v over the lanes with p_v > 0.
    """
    o, does = settings(case), does or Exact()
    counted = case.completion_mask != 0
    flat = counted.reshape(-1).nonzero().squeeze(1)
    rows = lambda x: x.reshape(-1, *x.shape[2:])[flat]  # noqa: E731
    ids, vocab = rows(case.completion_ids).long(), case.weight.shape[0]
    if ((ids < 0) | (ids >= vocab)).any():
        raise ValueError(f"completion_ids: a counted id lies outside [0, {vocab})")
    tensors = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    leaves = {}
    for name, x in tensors.items():
        x = rows(x) if name in ("hidden", "lora_input") else x
        leaves[name] = x.detach().to(dtype).requires_grad_()
    raw = leaves["hidden"] @ leaves["weight"].T
    if "lora_a" in leaves:
        seen = leaves.get("lora_input", leaves["hidden"])
        raw = raw + o.lora_scaling * does.between(seen @ leaves["lora_a"].T) @ leaves["lora_b"].T
    raw = does.raw(o.logit_scale * (raw + leaves["bias"] if "bias" in leaves else raw))
    cap = o.final_logit_softcapping
    capped = raw if cap is None else does.softcap(raw, cap)
    temperature = o.temperature
    if case.temperature is not None:
        temperature = rows(case.temperature).to(dtype)[:, None]
    logits = capped / temperature
    log_probs = wide = does.log_softmax(logits, -1)
    if case.kept_ids is not None:
        inside = kept_lanes(rows(case.kept_ids).long(), vocab)
        if o.on_missing_set == "full":
            inside = inside | ~inside.gather(1, ids[:, None])
        log_probs = does.log_softmax(logits.masked_fill(~inside, -torch.inf), -1)
        wide = log_probs if o.entropy_of == "the set" else wide
    logps = log_probs.gather(1, ids[:, None]).squeeze(1)
    entropies = -(wide.exp() * wide.masked_fill(wide == -torch.inf, 0.0)).sum(-1)
    return Head(counted, ids, leaves, temperature, raw, log_probs, wide, logps, entropies)


def kept_lanes(kept: Tensor, vocab: int) -> Tensor:
    """(n, V) bool of ids (n, K) that are padded with -1."""
    lanes = torch.zeros(len(kept), vocab + 1, dtype=torch.bool)
    return lanes.scatter(-1, torch.where(kept < 0, vocab, kept), True)[:, :vocab]


def divergences_of(case: Case, log_probs: Tensor, does: Exact | None) -> Tensor | None:
    """(n,) from the case's other head, or from the ids that its teacher lists."""
    if case.listed_ids is not None and case.listed_logps is not None:
        counted = case.completion_mask != 0
        ids, logps = case.listed_ids[counted].long(), case.listed_logps[counted].double()
        least = torch.finfo(case.listed_logps.dtype).eps
        return listed_divergence(settings(case), log_probs, ids, logps, least)
    if case.teacher_hidden is None:
        return None
    other = teacher_case(case)
    log_q = head(other, does=does and does.teacher(other)).log_probs.detach()
    return divergence(settings(case).beta_of_divergence, log_probs, log_q)


def on_grid(rows: Tensor, counted: Tensor) -> Tensor:
    """(n, ...) values of the counted positions -> (B, T, ...), 0 elsewhere, differentiable."""
    grid = rows.new_zeros((counted.numel(), *rows.shape[1:]))
    index = counted.reshape(-1).nonzero().squeeze(1)
    return grid.index_put((index,), rows).reshape(*counted.shape, *rows.shape[1:])


@dataclass
class Evaluation:
    """The loss as a function of the per-token numbers, with what is needed to bound its error."""

    loss: Tensor  # 0-d
    # (B, T), the log of the ratio that each token's surrogate sees (gmpo: before their mean)
    log_ratios: Tensor
    parts: dict[str, Tensor]  # their sums add up to the loss
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
    overflow = unweighted.detach().abs() > OVERFLOW
    result = Evaluation(parts.sum(), full, {"policy": parts}, overflow, list(keeps.values()))
    if o.beta != 0.0 and o.kl_estimator == "full":
        result.parts["kl"] = o.beta * weights * divergences
        result.loss = result.loss + result.parts["kl"].sum()
        result.means["kl"] = (divergences.detach(), counted)
    elif o.beta != 0.0:
        add_kl(result, case, logps, ratio, weights)
    result.means["policy_loss"] = (result.loss.detach()[None], torch.ones(1, dtype=torch.bool))
    if o.entropy_coef != 0.0:
        chosen = keeps.get("high entropy", counted)
        bonus = -o.entropy_coef * pick(entropies, chosen) / chosen.sum().clamp(min=1)
        result.parts["entropy"] = bonus
        result.loss = result.loss + bonus.sum()
    add_metrics(result, case, ratio.detach(), log_ratio.detach(), adv, phi, keeps)
    result.means["entropy"] = (entropies.detach(), counted)
    return result


def add_kl(result: Evaluation, case: Case, logps: Tensor, ratio: Tensor, weights: Tensor) -> None:
    """beta * KL, added to every counted token: neither the masks nor the importance ratio touch
    it."""
    o, counted = settings(case), case.completion_mask != 0
    kl = kl_estimate(o, logps, pick(case.ref_per_token_logps.to(logps.dtype), counted))
    if o.use_bias_correction_kl and o.loss_type != "gmpo":
        kl = kl * ratio
    kl = pick(kl, counted)
    result.parts["kl"] = o.beta * weights * kl
    result.overflow = result.overflow | (o.beta * kl.detach().abs() > OVERFLOW)
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
    """Everything that a loss returns, in float64, and the loss by its parts."""

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


def reference_loss(case: Case, does: Exact | None = None) -> ReferenceResult:
    """Loss, per-token numbers, every gradient and the metrics of `case`, in float64 from its
    (rounded) inputs."""
    does = does or Exact()
    h, o = head(case, does=does), settings(case)
    full = o.beta != 0.0 and o.kl_estimator == "full"
    scores = on_grids(case, h, divergences_of(case, h.log_probs, does) if full else None)
    evaluation = evaluate(case, *(x.to(does.dtype) for x in scores))
    up: tuple[Tensor | None, ...] = (None,) * len(scores)
    if evaluation.loss.requires_grad and h.counted.any():
        up = torch.autograd.grad(evaluation.loss, scores, allow_unused=True, retain_graph=True)
    arrives = [torch.zeros_like(x) if g is None else g for x, g in zip(scores, up, strict=True)]
    return ReferenceResult(
        **through_head(h, scores, arrives), loss=evaluation.loss.detach(),
        metrics=mean_metrics(evaluation),
        evaluation=evaluation,
    )  # fmt: skip


def reference_scores(case: Case, up: dict[str, Tensor], does: Exact | None = None) -> ScoresResult:
    """Log-probabilities, entropies, divergences, and every gradient under what arrives at them:
    `up` (B, T) by name."""
    h = head(case, does=does)
    scores = on_grids(case, h, divergences_of(case, h.log_probs, does))
    arrives = [pick(up[name].double(), h.counted) for name, _ in zip(SCORES, scores, strict=False)]
    return ScoresResult(**through_head(h, scores, arrives))
