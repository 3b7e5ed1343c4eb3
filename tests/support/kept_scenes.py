"""Positions with kept sets, our results for them, and the same in float64 from all logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import linear_logprob
from tests.support.flat import flat

BIG = 10**6  # an id that does not exist
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "all": {"temperature": 1.3, "final_logit_softcapping": 4.0, "logit_scale": 1.6, "bias": True},
    "negative scale": {"logit_scale": -0.8, "bias": True},
    "temperature a token": {"temperature": "a token", "final_logit_softcapping": 6.0},
}


@dataclass(frozen=True)
class Scene:
    """A head, some positions, and what a sampler kept at each; the sampled id is one of those."""

    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None
    ids: Tensor  # (B, T)
    kept: Tensor  # (B, T, K), ragged
    mask: Tensor  # (B, T)
    up: tuple[Tensor, Tensor]  # (B, T) each, d loss / d logps and d loss / d entropies
    options: dict[str, Any]

    def leaves(self) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: x.detach().clone().requires_grad_() for name, x in named.items() if x is not None}

    def but(self, **changes: Any) -> Scene:
        return replace(self, **changes)


def scene(name: str = "plain", dtype: torch.dtype = torch.float32, *, sets: str = "ragged", seed: int = 0) -> Scene:
    b, t, h, v, k = 2, 9, 12, 60, 14
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    options = dict(HEADS[name])
    if options.get("temperature") == "a token":
        options["temperature"] = 0.5 + torch.rand(b, t, generator=g)
    kept = torch.rand(b, t, v, generator=g).argsort(-1)[..., :k]
    sizes = torch.randint(1, k + 1, (b, t, 1), generator=g)
    sizes[0, 0], sizes[0, 1] = 1, k
    ids = kept[..., 0]
    if sets == "ragged":
        kept = torch.where(torch.arange(k) < sizes, kept, -1)
    kept = kept.gather(-1, torch.rand(b, t, k, generator=g).argsort(-1))  # in any order, padding among the ids
    mask = (torch.rand(b, t, generator=g) > 0.25).long()
    mask[0, :2] = 1
    bias = normal(v).to(dtype) if options.pop("bias", False) else None
    hidden, weight = normal(b, t, h).to(dtype), (normal(v, h) * 0.6).to(dtype)
    return Scene(hidden, weight, bias, ids, kept, mask, (normal(b, t), normal(b, t)), options)


def compute(s: Scene, **options: Any) -> dict[str, Tensor]:
    """Results and the gradients of sum(up * results)."""
    leaves = s.leaves()
    found = flat(linear_logprob)(**leaves, ids=s.ids, kept_ids=s.kept, mask=s.mask, **s.options, **options)
    logps, entropies = found.logps, found.entropies
    torch.autograd.backward((logps, entropies), tuple(x.to(logps.dtype) for x in s.up))
    grads = {f"d_{name}": x.grad for name, x in leaves.items()}
    assert all(grads[f"d_{name}"].dtype == x.dtype for name, x in leaves.items())
    return {"logps": logps.detach(), "entropies": entropies.detach(), **grads}


def by_full_logits(s: Scene, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same from all logits, those outside the set at -inf, by autograd, in float64."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in s.leaves().items()}
    z = leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", 0.0)
    z = z * s.options.get("logit_scale", 1.0)
    cap, temperature = s.options.get("final_logit_softcapping"), s.options.get("temperature", 1.0)
    z = z if cap is None else cap * torch.tanh(z / cap)
    z = z / (temperature.to(dtype)[..., None] if isinstance(temperature, Tensor) else temperature)
    vocab = s.weight.shape[0]
    inside = torch.zeros(*s.ids.shape, vocab + 1, dtype=torch.bool)
    inside = inside.scatter(-1, torch.where(s.kept < 0, vocab, s.kept).long(), True)[..., :vocab]
    counted = s.mask != 0
    log_probs = z.masked_fill(~inside, -math.inf)[counted].log_softmax(-1)
    rows = log_probs.masked_fill(~inside[counted], 0.0)
    found = {
        "logps": log_probs.gather(-1, s.ids.long()[counted][:, None])[:, 0],
        "entropies": -(log_probs.exp() * rows).sum(-1),
    }
    grid = {name: torch.zeros(s.ids.shape, dtype=dtype).index_put((counted,), x) for name, x in found.items()}
    torch.autograd.backward(tuple(grid.values()), tuple(x.to(dtype) for x in s.up))
    return {**{k: x.detach() for k, x in grid.items()}, **{f"d_{k}": x.grad for k, x in leaves.items()}}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype, error: float) -> None:
    """Each within `error` times its largest, and half a unit in the last place of a 16-bit gradient."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        bound = error * (1.0 + x.abs().amax()) + (torch.finfo(dtype).eps * x.abs() if dtype.itemsize == 2 else 0.0)
        worst = (got[name].double() - x).abs() - bound
        assert bool((worst <= 0).all()), f"{name}: beyond its bound by {worst.max():.2e}"
