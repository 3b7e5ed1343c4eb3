"""The cases to measure, in order of importance, and their inputs: a batch of one step, drawn from its policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SEED = 20240203
SPREAD = 2.5  # standard deviation of the logits: a flat softmax would flatter whoever skips small probabilities
DRIFT = 0.25  # of the policy since it generated, a token: at epsilon 0.2 about a third of the ratios is clipped
EPSILON = 0.2
SLICE_ROWS = 1024
OURS_TRAINABLE = ("ours", "products", "trl", "liger", "ours/two_pass", "ours/lean", "ours/expected")
PEERS = ("eager", "liger_torch", "verl_triton", "verl_torch", "liger_grpo", "ours/torch", "ours/no_mask")


@dataclass(frozen=True)
class BenchCase:
    """N tokens in sequences of T, half of them with advantage 0 where `zero_share` is 0.5; dapo, bf16."""

    name: str
    n: int = 8192
    h: int = 4096
    v: int = 151936
    t: int = 512
    frozen: bool = False
    zero_share: float = 0.0
    score: bool = False  # log-probabilities only, no gradient
    off_policy: bool = False
    providers: tuple[str, ...] = OURS_TRAINABLE + PEERS

    @property
    def products_nvh(self) -> float:
        """Floating point operations of the products that cannot be avoided, in NVH."""
        if self.score:
            return 2.0
        return 2.0 + (2.0 if self.frozen else 4.0) * (1.0 - self.zero_share)

    @property
    def flops(self) -> float:
        """`products_nvh` times NVH."""
        return self.products_nvh * self.n * self.v * self.h

    def toy(self) -> BenchCase:
        """The same at a size for a CPU and Triton's interpreter."""
        return replace(self, n=16, h=32, v=70, t=4)


CASES = (
    BenchCase("trainable"),
    BenchCase(
        "frozen",
        frozen=True,
        providers=("ours", "products", "trl", "liger", "ours/one_pass", "eager", "verl_triton", "liger_grpo"),
    ),
    BenchCase("half_zero", zero_share=0.5, providers=("ours", "products", "trl", "liger", "ours/two_pass", "eager")),
    BenchCase(
        "score",
        score=True,
        providers=("ours", "ours/score_dot", "products", "trl", "liger", "eager", "verl_triton", "liger_torch"),
    ),
    BenchCase(
        "off_policy", off_policy=True, providers=("ours", "products", "trl", "liger", "ours/two_pass", "ours/lean")
    ),
    BenchCase("small_hidden", h=1024, providers=(*OURS_TRAINABLE, "eager", "verl_triton")),
    BenchCase("medium", n=4096, h=2048, v=128256, providers=(*OURS_TRAINABLE, "eager", "verl_triton")),
)


@dataclass(frozen=True)
class Inputs:
    """What every provider is given; hidden states, and the weight unless frozen, are leaves that want a gradient."""

    case: BenchCase
    hidden: Tensor  # (B, T, H) bf16
    weight: Tensor  # (V, H) bf16
    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T), all 1: every provider does the same work
    advantages: Tensor  # (B,) fp32
    old: Tensor | None  # (B, T) fp32

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients are compared."""
        return tuple(x for x in (self.hidden, self.weight) if x.requires_grad)

    def clear_gradients(self) -> None:
        """As an optimiser's ``zero_grad(set_to_none=True)``."""
        self.hidden.grad = self.weight.grad = None


def make_inputs(case: BenchCase, device: torch.device) -> Inputs:
    """Seeded inputs of `case`: logits of standard deviation `SPREAD`, ids sampled from the policy itself."""
    g = torch.Generator(device).manual_seed(SEED)
    batch = case.n // case.t

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    hidden = normal(batch, case.t, case.h).to(torch.bfloat16)
    weight = torch.cat([normal(x, case.h).mul_(SPREAD / case.h**0.5).bfloat16() for x in _sizes(case.v, 16384)])
    advantages = normal(batch)
    advantages[: round(batch * case.zero_share)] = 0.0
    ids, logps = _sample(hidden.view(-1, case.h), weight, g)
    old = (logps + DRIFT * normal(case.n)).view(batch, case.t) if case.off_policy else None
    trains = not case.score
    return Inputs(
        case,
        hidden.requires_grad_(trains),
        weight.requires_grad_(trains and not case.frozen),
        ids.view(batch, case.t),
        torch.ones(batch, case.t, device=device),
        advantages,
        old,
    )


def policy_loss(inputs: Inputs, logps: Tensor) -> Tensor:
    """The dapo loss of per-token `logps` (B, T) in plain torch: what a trainer puts behind a fused log-probability."""
    old = logps.detach() if inputs.old is None else inputs.old.to(logps.dtype)
    advantages, mask = inputs.advantages[:, None].to(logps.dtype), inputs.mask.to(logps.dtype)
    ratio = torch.exp(logps - old)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def _sizes(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def _sample(hidden: Tensor, weight: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids (N,) drawn from the softmax, by Gumbel noise, and their log-probabilities (N,)."""
    ids, logps = [], []
    for rows in hidden.split(SLICE_ROWS):
        logits = (rows @ weight.t()).float()
        noise = torch.empty_like(logits).exponential_(generator=g).log_()
        drawn = (logits - noise).argmax(dim=1)
        ids.append(drawn)
        logps.append(logits.gather(1, drawn[:, None])[:, 0] - logits.logsumexp(dim=1))
    return torch.cat(ids), torch.cat(logps)
