"""A few seconds of checks against float64, for a new installation.

Small random cases of every loss type, of `linear_logprob` and of `linear_divergence`, in float32, and some of them with
a larger vocabulary, in float32 and bfloat16, against a full-logits evaluation of the published formulas in float64
under autograd. The formulas are written out here on purpose: they share no line with the objective and the engines that
they check. The thorough tests are in tests/; this one needs the package only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from grpo_kernels.base.choices import DivergenceName
from grpo_kernels.diagnostics.head_shape import HeadShape
from grpo_kernels.divergence import linear_divergence
from grpo_kernels.head.head import Head
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.loss import grpo_loss
from grpo_kernels.objective.config import LossConfig

Pairs = dict[str, tuple[Any, Any]]  # name of a result -> (ours, the float64 reference)

# dtype of a result -> allowed error, over its largest element. float32 comes to about 1e-6 at these sizes. With a
# bfloat16 head only the gradients are bfloat16: d logits are rounded, and then the gradient.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}

BATCH, TIME, HIDDEN, VOCAB = 4, 9, 16, 67
WIDE_VOCAB = 9001  # several steps of a GPU kernel's tile, and a tail
DIVERGENCES: tuple[DivergenceName, ...] = get_args(DivergenceName)

# name -> differences from the default case: dapo, token ratios, old log-probabilities, a trainable head
CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo", "vespo")
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "gmpo": {"loss_type": "gmpo", "importance_sampling_level": "sequence"},
    "grpo, sequence ratios": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo, sequence ratios": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "dapo, KL and two-sided clip": {"beta": 0.04, "delta": 1.3},
    "dapo, KL and entropy bonus": {"beta": 0.04, "entropy_coef": 0.01},
    "dapo, on-policy": {"on_policy": True},
    "dapo, on-policy, frozen head": {"on_policy": True, "frozen": True},
    "grpo, sequence ratios, frozen head": {"importance_sampling_level": "sequence", "frozen": True},
}
# Cases that also run with the wide vocabulary: together they take each way through the engines.
WIDE = (
    "dapo, on-policy",
    "dapo, KL and entropy bonus",
    "grpo, sequence ratios",
    "dapo, on-policy, frozen head",
)


SMALL = HeadShape(VOCAB, HIDDEN)
WIDE_HEADS = (HeadShape(WIDE_VOCAB, HIDDEN), HeadShape(WIDE_VOCAB, HIDDEN, torch.bfloat16))


@dataclass(frozen=True)
class Check:
    """One comparison: the error of the result that is nearest to its tolerance, over that result's largest element."""

    name: str
    device: str
    error: float | None  # None: the case raised, and `detail` says what
    ok: bool
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def run(devices: Sequence[torch.device]) -> list[Check]:
    """Run every check on every device. An exception is a failed check, not a traceback."""
    return [
        _check(name + _suffix(head), device, partial(case, head, device))
        for device in devices
        for head in (SMALL, *WIDE_HEADS)
        for name, case in _cases(head).items()
    ]


def _suffix(head: HeadShape) -> str:
    """End of a check's name: nothing for the small head, so that most names stay short."""
    return "" if head == SMALL else f", V {head.vocab}, {str(head.dtype).removeprefix('torch.')}"


def _cases(head: HeadShape) -> dict[str, Callable[[HeadShape, torch.device], Pairs]]:
    """The cases that a head is run with, by name."""
    losses = {
        f"grpo_loss: {name}": partial(_loss_case, options, seed)
        for seed, (name, options) in enumerate(CASES.items())
        if head == SMALL or name in WIDE
    }
    divergences = {
        f"linear_divergence: {name}": partial(_divergence_case, name) for name in DIVERGENCES
    }
    return {**losses, "linear_logprob: bias, soft-cap, scale": _logprob_case, **divergences}


def render(checks: Sequence[Check]) -> str:
    """Render one line per check, then the totals."""
    width = max(len(check.name) for check in checks)
    lines = [
        f"  {check.name:<{width}}  {check.device:<6}  "
        + (f"{check.error:8.1e}" if check.error is not None else "       -")
        + ("  OK" if check.ok else f"  FAILED {check.detail}")
        for check in checks
    ]
    failed = sum(not check.ok for check in checks)
    tolerances = f"tolerance {TOLERANCES[torch.float32]:.0e}, of bfloat16 gradients {TOLERANCES[torch.bfloat16]:.0e}"
    return "\n".join([*lines, f"{len(checks) - failed} of {len(checks)} checks OK, {tolerances}"])


def _check(name: str, device: torch.device, case: Callable[[], Pairs]) -> Check:
    """Run one case, and compare."""
    try:
        pairs = case()
        errors = {what: _error(got, want) for what, (got, want) in pairs.items()}
    except Exception as exception:
        return Check(name, str(device), None, False, f"{type(exception).__name__}: {exception}")
    allowed = {what: TOLERANCES[got.dtype] for what, (got, _) in pairs.items()}
    worst = max(errors, key=lambda what: errors[what] / allowed[what])
    ok = errors[worst] <= allowed[worst]
    finite = errors[worst] if math.isfinite(errors[worst]) else None
    return Check(name, str(device), finite, ok, "" if ok else f"in {worst}")


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest element wanted; infinite where ours is not finite."""
    got, want = got.detach().double().cpu(), want.detach()
    error = (got - want).abs().max() / want.abs().max().clamp(min=1e-12)
    return float(error.nan_to_num(nan=math.inf))


def _drawn(head: HeadShape, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (B, T, H), weight (V, H), ids (B, T)."""
    hidden = torch.randn(BATCH, TIME, head.hidden, generator=draw)
    weight = torch.randn(head.vocab, head.hidden, generator=draw) / head.hidden**0.5
    return (
        hidden.to(head.dtype),
        weight.to(head.dtype),
        torch.randint(head.vocab, (BATCH, TIME), generator=draw),
    )


def _loss_case(
    options: Mapping[str, Any], seed: int, head: HeadShape, device: torch.device
) -> Pairs:
    """Return the results of `grpo_loss`, and of the formula in float64 on the same values."""
    fields = {name: value for name, value in options.items() if name not in ("on_policy", "frozen")}
    config = LossConfig(temperature=0.9, max_completion_length=2 * TIME, **fields)
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, ids = _drawn(head, draw)
    mask = torch.arange(TIME) < torch.tensor([[TIME], [1], [TIME - 2], [TIME // 2]])
    advantages = torch.tensor([1.3, -0.7, 0.0, -1.1])
    exact, _ = _full_logits(hidden.double(), weight.double(), ids, config.temperature)
    old, ref = (exact + 0.3 * torch.randn(2, BATCH, TIME, generator=draw)).float()

    h, w = _leaf(hidden, device), _leaf(weight, device, trains=not options.get("frozen"))
    out = grpo_loss(
        h, w, ids.to(device), mask.to(device), advantages.to(device), config=config,
        old_per_token_logps=None if options.get("on_policy") else old.to(device),
        ref_per_token_logps=ref.to(device) if config.beta else None,
    )  # fmt: skip
    out.loss.backward()

    h64, w64 = _leaf(hidden.double()), _leaf(weight.double())
    logps, entropy = _full_logits(h64, w64, ids, config.temperature)
    log_ratio = logps - (logps.detach() if options.get("on_policy") else old.double())
    loss = _formula(
        config,
        logps,
        entropy,
        log_ratio,
        ref.double() - logps,
        mask.double(),
        advantages.double()[:, None],
    )
    loss.backward()
    pairs = {
        "loss": (out.loss, loss),
        "per_token_logps": (out.per_token_logps, logps * mask),
        "entropies": (out.entropies, entropy * mask),
        "gradient of hidden": (h.grad, h64.grad),
    }
    return pairs if options.get("frozen") else pairs | {"gradient of weight": (w.grad, w64.grad)}


def _logprob_case(head: HeadShape, device: torch.device) -> Pairs:
    """`linear_logprob` with everything a head may have, and a gradient through both of its results."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, ids = _drawn(head, draw)
    bias = torch.randn(head.vocab, generator=draw).to(head.dtype)
    upstream = torch.randn(2, BATCH, TIME, generator=draw)
    temperature, cap, scale = 0.7, 4.0, 1.5

    ours = [_leaf(x, device) for x in (hidden, weight, bias)]
    head_of_call = Head(ours[1], ours[2], final_logit_softcapping=cap, logit_scale=scale)
    scores = linear_logprob(ours[0], head_of_call, ids.to(device), temperature=temperature)
    (torch.stack((scores.logps, scores.entropies)) * upstream.to(device)).sum().backward()

    full = [_leaf(x.double()) for x in (hidden, weight, bias)]
    exact = _full_logits(full[0], full[1], ids, temperature, full[2], scale, cap)
    (torch.stack(exact) * upstream).sum().backward()
    names = ("gradient of hidden", "gradient of weight", "gradient of bias")
    pairs = {
        name: (mine.grad, theirs.grad) for name, mine, theirs in zip(names, ours, full, strict=True)
    }
    return {"logps": (scores.logps, exact[0]), "entropy": (scores.entropies, exact[1]), **pairs}


def _leaf(x: Tensor, device: torch.device | str = "cpu", trains: bool = True) -> Tensor:
    """Return a copy that is a leaf of the graph."""
    return x.detach().to(device, copy=True).requires_grad_(trains)


def _full_logits(
    hidden: Tensor,  # (B, T, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (B, T)
    temperature: float,
    bias: Tensor | None = None,  # (V,)
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """logps and entropies (B, T), from all the logits at once."""
    logits = scale * (hidden @ weight.T + (0.0 if bias is None else bias))
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, ids[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _divergence_case(name: DivergenceName, head: HeadShape, device: torch.device) -> Pairs:
    """Return the results of `linear_divergence`, and of the formula in float64 on the same values."""
    draw = torch.Generator().manual_seed(len(CASES))
    shapes = ((TIME, HIDDEN), (head.vocab, HIDDEN)) * 2
    inputs = [torch.randn(shape, generator=draw).to(head.dtype) for shape in shapes]

    def leaves(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [change(x.detach()).requires_grad_(i < 2) for i, x in enumerate(inputs)]

    ours = leaves(lambda x: x.to(device))
    divergence = linear_divergence(ours[0], ours[1], ours[2], ours[3], divergence=name).divergence
    assert divergence is not None
    divergence.sum().backward()
    exact = leaves(lambda x: x.double())
    log_p, log_q = ((exact[i] @ exact[i + 1].T).log_softmax(-1) for i in (0, 2))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    want = {
        "reverse_kl": log_p.exp() * (log_p - log_q),
        "forward_kl": log_q.exp() * (log_q - log_p),
        "jsd": (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2,
    }[name].sum(-1)
    want.sum().backward()
    pairs = zip(("d hidden", "d weight"), ours, exact, strict=False)
    return {"divergence": (divergence, want), **{what: (x.grad, y.grad) for what, x, y in pairs}}


def _formula(
    config: LossConfig,
    logps: Tensor,  # (B, T), like everything without a comment
    entropy: Tensor,
    log_ratio: Tensor,
    ref_gap: Tensor,  # ref - logps
    mask: Tensor,
    advantages: Tensor,  # (B, 1)
) -> Tensor:
    """The loss as published: surrogate, then KL, then the loss type's mean, then the entropy bonus."""
    lengths, log_ratio = mask.sum(1, keepdim=True), log_ratio * mask
    if config.importance_sampling_level == "sequence" and config.loss_type != "gmpo":
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths
    per_token = _surrogate(config, logps, log_ratio, lengths, advantages)
    if config.beta:
        per_token = per_token + config.beta * (ref_gap.exp() - ref_gap - 1) * log_ratio.exp()
    share = {  # weight of each token in the loss
        "bnpo": mask / mask.sum(),
        "dr_grpo": mask / (BATCH * config.max_completion_length),
        "luspo": mask / BATCH,
        **dict.fromkeys(("grpo", "sapo", "gmpo"), mask / lengths / BATCH),
        **dict.fromkeys(("dapo", "cispo", "vespo"), mask / mask.sum()),
    }[config.loss_type]
    return (per_token * share).sum() - config.entropy_coef * (entropy * mask).sum() / mask.sum()


def _surrogate(
    config: LossConfig, logps: Tensor, log_ratio: Tensor, lengths: Tensor, advantages: Tensor
) -> Tensor:
    """Policy term per token, (B, T) or (B, 1)."""
    ratio, high = log_ratio.exp(), config.clip_high
    if config.loss_type == "cispo":
        return -ratio.detach().clamp(max=high) * advantages * logps
    if config.loss_type == "sapo":
        tau = torch.full_like(advantages, config.sapo_temperature_neg)
        tau[advantages > 0] = config.sapo_temperature_pos
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    if config.loss_type == "vespo":
        k = torch.where(advantages < 0, config.vespo_k_neg, config.vespo_k_pos)
        lam = torch.where(advantages < 0, config.vespo_lambda_neg, config.vespo_lambda_pos)
        log_w = log_ratio.detach().sum(1, keepdim=True)
        return -torch.exp(lam + k * log_w - lam * log_w.exp()) * advantages * logps
    if config.loss_type == "gmpo":
        sign = advantages.sign()
        worse = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-config.epsilon, high))
        return -torch.exp((sign * worse).sum(1, keepdim=True) / lengths) * advantages
    clipped = ratio.clamp(1 - config.epsilon, 1 + high) * advantages
    return -torch.minimum(ratio.clamp(max=config.delta or math.inf) * advantages, clipped)
