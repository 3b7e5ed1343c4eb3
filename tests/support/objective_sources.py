"""Every objective beside its source: verl's own function, or the paper's formula of log-probabilities.

A new objective is an entry of `SOURCES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LossConfig, objectives
from tests.support.off_policy import FLOAT, B, Given, T
from tests.support.verl_peer import core_algos, verl_module

SEED = 7  # of clip_cov's draw
FACTOR = 13  # loss_scale_factor
# verl's loss_agg_mode: our normaliser
MODES = {
    "token-mean": LossConfig(loss_type="bnpo"),
    "token-sum": LossConfig(loss_type="dapo"),  # with 1 item
    "seq-mean-token-sum": LossConfig(loss_type="luspo"),
    "seq-mean-token-mean": LossConfig(loss_type="grpo"),
    "seq-mean-token-sum-norm": LossConfig(loss_type="dr_grpo", max_completion_length=FACTOR),
}
# verl's losses: parameters under which tokens fall on both sides of every bound
OF_VERL: dict[str, dict[str, Any]] = {
    "gpg": {},
    "dro": {"dro_beta": 0.3},
    "cispo": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5},
    "dppo_kl": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5},
    "clip_cov": {
        "clip_ratio_low": 0.4, "clip_ratio_high": 0.6, "clip_cov_ratio": 0.1, "clip_cov_lb": -0.5, "clip_cov_ub": 1.5
    },
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "gspo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.2},
}  # fmt: skip


def of_verl(name: str) -> Any:
    draw = {"generator": torch.Generator().manual_seed(SEED)} if name == "clip_cov" else {}
    return getattr(objectives, name)(**OF_VERL[name], **draw)


def verl_config(options: dict[str, Any], info: dict[str, Any]) -> Any:
    """verl's ActorConfig with our parameters where verl has them."""
    actor = verl_module("workers.config")
    of_policy_loss = {field.name for field in dataclasses.fields(actor.PolicyLossConfig)}
    return actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=actor.PolicyLossConfig(
            **{key: x for key, x in options.items() if key in of_policy_loss}
        ),
        global_batch_info=info,
        **{key: x for key, x in options.items() if key not in of_policy_loss},
    )


def verl_loss(
    name: str,
    given: Given,
    mode: str = "token-mean",
    *,
    options: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
) -> Tensor:
    """What verl's registered function makes of it; masked positions hold 0, as it would read them."""
    info = {"global_batch_size": B, "loss_scale_factor": FACTOR} if info is None else info
    config = verl_config(OF_VERL[name] if options is None else options, info)
    mask = given["mask"]
    old, logps, advantages = (
        torch.where(mask, given[key], 0.0) for key in ("old", "logps", "advantages")
    )
    torch.manual_seed(SEED)
    function = core_algos().get_policy_loss_fn(name)
    loss, _ = function(
        old, logps, advantages, mask.to(logps.dtype), mode, config, given.get("ratio")
    )
    return loss


def with_gradient(
    source: Callable[..., Tensor], given: Given, *rest: Any, **how: Any
) -> tuple[Tensor, Tensor]:
    """Value of `source(given, ...)` and its gradient at the counted tokens."""
    logps = given["logps"].clone().requires_grad_()
    loss = source(given | {"logps": logps}, *rest, **how)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient[given["mask"]]


def mean_of(formula: Callable[[Given], Tensor], given: Given, mode: str = "token-mean") -> Tensor:
    """The mean of a formula's losses, times the ratio, over tokens, or over each sequence and then over sequences."""
    mask = given["mask"]
    if "sampling" in given:
        unscored = given["sampling"].isnan()
        given = given | {
            "sampling": torch.where(unscored, given["logps"].detach(), given["sampling"])
        }
    per_token = torch.where(mask, formula(given) * given.get("ratio", 1.0), 0.0)
    if mode == "token-mean":
        return per_token.sum() / mask.sum()
    return (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def ratio_to(name: str, x: Given) -> Tensor:
    return torch.exp(x["logps"] - x[name])


def ipo(x: Given, eps: float = 0.3, kl_tau: float = 0.0, cap: float = 1e4) -> Tensor:
    r, moved = ratio_to("sampling", x), (x["logps"].exp() - x["sampling"].exp()).abs()
    surrogate = r.detach().clamp(max=cap) * torch.exp(x["logps"] - x["logps"].detach())
    return -torch.where(moved > eps, 0.0, x["advantages"] * surrogate) + kl_tau * r.log() ** 2


def icepop(x: Given, low: float = 0.2, high: float = 5.0) -> Tensor:
    r = ratio_to("sampling", x)
    return -torch.where((r >= low) & (r <= high), r, 0.0) * x["advantages"]


def kpop(x: Given, threshold: float = 0.1, kl_tau: float = 1e-3) -> Tensor:
    p, q = (x[name].exp().clamp(1e-6, 1 - 1e-6) for name in ("logps", "sampling"))
    forward = p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
    backward = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    r, masked = ratio_to("sampling", x), (forward > threshold) | (backward > threshold)
    return -torch.where(masked, 0.0, x["advantages"] * r) + kl_tau * r.log() ** 2


def rollout_is(x: Given, low: float = 0.2, high: float = 0.2) -> Tensor:
    r = ratio_to("sampling", x)
    kept = torch.where((r > 1 - low) & (r < 1 + high), r, 0.0)
    return -kept.detach() * x["advantages"] * x["logps"]


def topr(x: Given, positive: float = 1.0, negative: float = 1.0) -> Tensor:
    good = x.get("scores", x["advantages"]) > 0
    tapered = ratio_to("old", x).clamp(0.0, 1.0).detach()
    return torch.where(good, positive, negative * tapered) * -x["advantages"] * x["logps"]


def ppo(x: Given, low: float = 0.2, high: float = 0.2) -> Tensor:
    r = ratio_to("old", x)
    return -torch.min(r * x["advantages"], r.clamp(1 - low, 1 + high) * x["advantages"])


def fipo(
    x: Given,
    decay_rate: float = 32.0,
    low: float = 0.0,
    high: float = 0.2,
    safety: float = 4.0,
    ranged: float = 0.2,
) -> Tensor:
    log_ratio = torch.where(x["mask"], x["logps"] - x["old"], 0.0).detach()
    place = torch.arange(T, dtype=FLOAT)
    distance = place[:, None] - place[None, :]  # of the k-th row's token from the t-th column's
    future = log_ratio @ torch.where(distance >= 0, 2 ** (-distance / decay_rate), 0.0)
    f = future.exp().clamp(1 - low, 1 + high)
    unsafe = (x["advantages"] < 0) & (log_ratio.exp() > safety)
    return ppo(x, ranged, ranged) * torch.where(unsafe, f.clamp(0.8, 1.0), f)


@dataclass(frozen=True)
class Source:
    """An objective, and what its source makes of the same."""

    make: Callable[[], Any]
    loss: Callable[..., Tensor]  # (given, mode)
    modes: tuple[str, ...] = ("token-mean",)
    per_token: bool = True  # advantages may differ within a sequence
    rtol: float = 1e-11

    @property
    def name(self) -> str:
        return type(self.make()).__name__


def written_out(objective: Any, formula: Callable[..., Tensor], *parameters: float) -> Source:
    return Source(
        lambda: objective,
        lambda given, mode: mean_of(lambda x: formula(x, *parameters), given, mode),
    )


def by_verl(name: str) -> Source:
    """Its `geo_mean` means over sequences, whatever it is asked for, and divides by their lengths plus 1e-8."""
    make, loss = (lambda: of_verl(name)), (lambda given, mode: verl_loss(name, given, mode))
    if name == "geo_mean":
        return Source(make, loss, ("seq-mean-token-mean",), per_token=False, rtol=1e-6)
    return Source(make, loss, tuple(MODES), rtol=1e-12)


fast_fipo = objectives.fipo(
    0.1, 0.1, decay_rate=3.0, influence_low=0.3, influence_high=0.4, safety_threshold=1.2
)
SOURCES = {
    **{name: by_verl(name) for name in OF_VERL},
    "ipo": written_out(objectives.ipo(), ipo),
    "ipo, near": written_out(objectives.ipo(eps=0.1, kl_tau=1e-3), ipo, 0.1, 1e-3),
    "ipo, capped": written_out(objectives.ipo(ratio_max=1.1), ipo, 0.3, 0.0, 1.1),
    "icepop": written_out(objectives.icepop(), icepop),
    "icepop, near": written_out(objectives.icepop(ratio_low=0.8, ratio_high=1.5), icepop, 0.8, 1.5),
    "kpop": written_out(objectives.kpop(), kpop),
    "kpop, near": written_out(objectives.kpop(threshold=0.01, kl_tau=0.0), kpop, 0.01, 0.0),
    "rollout_is": written_out(objectives.rollout_is(), rollout_is),
    "rollout_is, far": written_out(
        objectives.rollout_is(eps_clip_low=0.5, eps_clip_high=1.0), rollout_is, 0.5, 1.0
    ),
    "topr": written_out(objectives.topr(), topr),
    "topr, weighted": written_out(
        objectives.topr(positive_weight=0.5, negative_weight=2.0), topr, 0.5, 2.0
    ),
    "fipo": written_out(objectives.fipo(), fipo),
    "fipo, fast": written_out(fast_fipo, fipo, 3.0, 0.3, 0.4, 1.2, 0.1),
}
TOKEN_LEVEL = {
    "gpg",
    "dro",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "icepop",
    "ipo",
    "kpop",
    "rollout_is",
    "topr",
}
