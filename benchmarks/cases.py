"""What is measured: the head of a real model, a workload, and a batch drawn from its own policy."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.commands.memory import MODELS

SEED = 20240203
SOFTCAPS = {"Gemma-2-2B": 30.0}
SCALE = 11.0  # deviation of logits 2.5: a flat softmax would flatter who skips small probabilities
DRIFT = 0.25  # at epsilon 0.2 two ratios in five are outside, half of them stopped
EPSILON = 0.2
BETA = 0.04
SLICE_ROWS = 1024
TOY_V = 70


class Absence(Exception):
    """Something that cannot run here; the text says why."""


HEADS = {
    name: {"model": name, "h": h, "v": v, "softcap": SOFTCAPS.get(name)}
    for name, (v, h) in MODELS.items()
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "all tokens": {}, "padding": {"padding": 0.5}, "half zero": {"zero_share": 0.5},
    "off-policy": {"drift": DRIFT}, "top entropy": {"top_entropy": 0.2},
    "gspo": {"sequence": True, "drift": DRIFT}, "kl": {"beta": BETA},
}  # fmt: skip


@dataclass(frozen=True)
class BenchCase:
    """N tokens in sequences of T, loss dapo; the rest says what differs from all tokens."""

    name: str
    part: str = "main"
    model: str = "Qwen3-0.6B"
    n: int = 256
    h: int = 1024
    v: int = 151936
    t: int = 32
    softcap: float | None = None
    dtype: str = "float32"  # of hidden states and weight; their values are bfloat16's in any
    weight_dtype: str | None = None  # of the weight, if not the hidden states'
    autocast: bool = False  # called under torch.autocast to bfloat16
    frozen: bool = False  # the weight wants no gradient
    score: bool = False  # log-probabilities only, no gradient
    padding: float = 0.0  # share of positions that are masked: lengths go from short to full
    zero_share: float = 0.0  # of the sequences whose advantage is 0
    drift: float = 0.0  # standard deviation of logp - old logp; 0: on-policy, no old ones
    top_entropy: float = 1.0  # share of the tokens, those of highest entropy, that carry the loss
    sequence: bool = False  # one ratio a sequence (GSPO)
    beta: float = 0.0  # KL to a reference policy, estimator k3
    scale: float = SCALE  # about the largest logit of a row
    peaked: bool = False  # most tokens nearly certain, as in a trained policy
    rounds: int = 2  # how often it is timed on a CPU
    providers: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        """Tokens that the mask counts: the N of NVH."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of the sequences; their mean is (1 - padding) T where padding is 0 or 1/2."""
        batch = self.n // self.t
        if not self.padding:
            return [self.t] * batch
        most = 2 * (1.0 - self.padding) * self.t
        return [min(self.t, max(1, round(most * (i + 0.5) / batch))) for i in range(batch)]

    @property
    def products_nvh(self) -> float:
        """Operations of the products of all rows that may carry gradient, in NVH."""
        if self.score:
            return 2.0
        graded = self.top_entropy if self.top_entropy < 1 else self.graded / self.counted
        return 2.0 + (2.0 if self.frozen else 4.0) * graded

    @property
    def graded(self) -> int:
        """Counted tokens whose advantage is not 0, or that have a KL term."""
        skipped = 0 if self.beta else round(len(self.lengths) * self.zero_share)
        return sum(self.lengths[skipped:])

    @property
    def nvh(self) -> float:
        return float(self.counted) * self.v * self.h

    @property
    def wants_entropy(self) -> bool:
        """True if a provider that is no trainer's head should give entropies, if it can."""
        return self.top_entropy < 1 or self.part == "accuracy"

    def toy(self) -> BenchCase:
        return replace(self, n=16, h=32, v=TOY_V, t=4)

    def about(self) -> dict[str, Any]:
        found = {k: x for k, x in asdict(self).items() if k not in ("name", "providers")}
        return {**found, "products_nvh": round(self.products_nvh, 3), "counted": self.counted}


def case(
    name: str, model: str = "Qwen3-0.6B", workload: str = "all tokens", **fields: Any
) -> BenchCase:
    return BenchCase(name, **{**HEADS[model], **WORKLOADS[workload], **fields})


@dataclass(frozen=True)
class Inputs:
    """What every provider is given; hidden states and a trained weight are leaves."""

    case: BenchCase
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) fp32, 1: counts
    advantages: Tensor  # (B,) fp32
    old: Tensor | None  # (B, T) fp32
    ref: Tensor | None  # (B, T) fp32

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.hidden, self.weight) if x.requires_grad)

    def clear_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def make_inputs(case: BenchCase, device: torch.device) -> Inputs:
    """Seeded inputs: ids sampled from the policy, `case.scale` the largest logit of a row."""
    g = torch.Generator(device).manual_seed(SEED)
    batch, dtype = case.n // case.t, getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    weight_dtype = getattr(torch, case.weight_dtype or case.dtype)
    # the largest of some 10^5 normal numbers is about 4.4 standard deviations
    spread = case.scale / 4.4
    weight = _weight(case.h, case.v, spread, weight_dtype, device)
    hidden = normal(case.n, case.h)
    if case.peaked:
        hidden += _favorites(case, weight, spread, normal(case.n), g)
    hidden = hidden.to(torch.bfloat16).to(dtype)
    ids, logps = _sample(case, hidden, weight.to(dtype), g)
    advantages = normal(batch)
    advantages[: round(batch * case.zero_share)] = 0.0
    shape = (batch, case.t)
    old = (logps + case.drift * normal(case.n)).view(shape) if case.drift else None
    ref = (logps + DRIFT * normal(case.n)).view(shape) if case.beta else None
    trains = not case.score
    return Inputs(
        case, hidden.view(batch, case.t, case.h).requires_grad_(trains),
        weight.detach().requires_grad_(trains and not case.frozen), ids.view(shape),
        (torch.arange(case.t) < torch.tensor(case.lengths)[:, None]).float().to(device), advantages,
        old, ref,
    )  # fmt: skip


def policy_loss(inputs: Inputs, logps: Tensor, entropies: Tensor | None = None) -> Tensor:
    """The loss of per-token `logps` (B, T) in plain torch, behind a fused log-probability."""
    case, mask = inputs.case, inputs.mask.to(logps.dtype)
    old = logps.detach() if inputs.old is None else inputs.old.to(logps.dtype)
    advantages = inputs.advantages[:, None].to(logps.dtype)
    log_ratio = logps - old
    if case.sequence:
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1.0))[:, None]
    ratio = torch.exp(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    if case.top_entropy < 1:
        if entropies is None:
            raise Absence("gives no entropy")
        entropies = entropies.detach().to(logps.dtype)
        threshold = torch.quantile(entropies[inputs.mask.bool()], 1 - case.top_entropy)
        loss = loss * (entropies >= threshold)
    if inputs.ref is not None:
        d = inputs.ref.to(logps.dtype) - logps
        loss = loss + case.beta * (torch.exp(d) - d - 1)
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@functools.lru_cache(maxsize=1)
def _weight(h: int, v: int, spread: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(V, H), in memory once: every block of rows is the first with its columns moved on, since
    drawing so many numbers takes longer than a step."""
    g = torch.Generator(device).manual_seed(SEED + 1)
    block = torch.randn(min(v, 8192), h, generator=g, device=device).mul_(spread / h**0.5)
    block = block.to(torch.bfloat16).to(dtype)
    weight = torch.empty(v, h, dtype=dtype, device=device)
    for i, part in enumerate(weight.split(len(block))):
        at = i * 37 % h
        part[:, :at], part[:, at:] = block[: len(part), h - at :], block[: len(part), : h - at]
    return weight


def _favorites(
    case: BenchCase, weight: Tensor, spread: float, noise: Tensor, g: torch.Generator
) -> Tensor:
    """(N, H), added to hidden states: it lifts the logit of one token a row above the log-sum-exp
    of all others, by 8 +- 5. Entropies then have a median of some 0.005 nats and an 80th percentile
    of some 0.4: those of trained models."""
    favorite = torch.randint(case.v, (case.n,), generator=g, device=weight.device)
    rows = weight[favorite].float()
    lift = math.log(case.v) + spread**2 / 2 + 8.0 + 5.0 * noise
    return lift[:, None] * rows / rows.square().sum(dim=1, keepdim=True)


def _sample(
    case: BenchCase, hidden: Tensor, weight: Tensor, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids (N,) drawn from the softmax, by Gumbel noise, and their log-probabilities (N,)."""
    ids, logps = [], []
    for rows in hidden.split(SLICE_ROWS):
        logits = capped((rows @ weight.t()).float(), case.softcap)
        noise = torch.empty_like(logits).exponential_(generator=g).log_()
        drawn = noise.neg_().add_(logits).argmax(dim=1)
        ids.append(drawn)
        logps.append(logits.gather(1, drawn[:, None])[:, 0] - logits.logsumexp(dim=1))
    return torch.cat(ids), torch.cat(logps)
