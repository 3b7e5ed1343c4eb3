"""Deliberately wrong candidates. Each says on which cases it is wrong; the tolerance must reject it
there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.plain import Edit, Hooks
from tests.support.reference import reference_loss
from tests.support.reference_terms import CLIPPED, TERMS, settings


@dataclass(frozen=True)
class Fault:
    """A wrong candidate, the cases it is wrong on, and the share of them on which the tolerance
    must notice."""

    name: str
    hooks: Hooks
    applies: Callable[[Case], bool]
    share: float = 1.0


Applies = Callable[[Case], bool]


def f32(case: Case) -> bool:
    """A float32 case whose policy differs from the old one, so that nothing is trivially 0."""
    return case.hidden.dtype == torch.float32 and case.group in ("A", "B")


def has(**wanted: Any) -> Applies:
    """float32 cases whose settings are among these."""

    def applies(case: Case) -> bool:
        o = settings(case)
        return f32(case) and all(getattr(o, name) in x for name, x in wanted.items())

    return applies


@dataclass(frozen=True)
class Not:
    """Any value but this one."""

    value: Any

    def __contains__(self, x: Any) -> bool:
        return x != self.value


def off_policy(case: Case) -> bool:
    """float32, with old logps."""
    return f32(case) and case.old_per_token_logps is not None


def old_and(**wanted: Any) -> Applies:
    return lambda case: off_policy(case) and has(**wanted)(case)


def given(name: str) -> Applies:
    """float32 cases that have this tensor."""
    return lambda case: f32(case) and getattr(case, name) is not None


def full_kl(case: Case) -> bool:
    """A float32 case whose KL term is over the vocabulary, from a head that is not the policy's
    own."""
    full = case.hidden.dtype == torch.float32 and case.group == "H" and settings(case).beta != 0
    return full and case.name not in ("H/same", "H/none")


def drops_a_token(case: Case) -> bool:
    """float32, with old logps, and the off-policy mask drops a counted token whose advantage is not
    0."""
    if not old_and(off_policy_mask_threshold=Not(None))(case):
        return False
    advantages = case.advantages if case.advantages.dim() == 2 else case.advantages[:, None]
    dropped = ~reference_loss(case).evaluation.keeps[-1]
    return bool((dropped & (case.completion_mask != 0) & (advantages != 0)).any())


def clipping(case: Case) -> bool:
    """A clip range that is not symmetric, for a loss that clips at the token."""
    o = settings(case)
    return off_policy(case) and o.loss_type in CLIPPED and o.epsilon != o.epsilon_high


def reads_sampler(case: Case) -> bool:
    wanted = old_and(off_policy_mask_threshold=Not(None))
    return wanted(case) and case.sampling_per_token_logps is not None


def told(**changes: Any) -> Hooks:
    """The loss is computed with other arguments than it was given."""
    return Hooks(case=lambda case: case.but(**changes))


def config(**changes: Any) -> Hooks:
    """The loss is computed with other options than it was given."""
    return told(config=changes)


def grads(edit: Edit, *names: str) -> Hooks:
    """The same edit on these gradients, else on every one."""
    return Hooks(grads=dict.fromkeys(names or ("hidden", "weight", "bias"), edit))


def through(dtype: torch.dtype) -> Edit:
    """A stop at another dtype on the way."""
    return lambda x: x.to(dtype).to(x.dtype)


def lane_lost(raw: Tensor) -> Tensor:
    """The last column is never looked at."""
    return raw.masked_fill(torch.arange(raw.shape[1]) == raw.shape[1] - 1, -1e4)


def last_row_lost(d_raw: Tensor) -> Tensor:
    """The last counted position gets no gradient."""
    return d_raw * (torch.arange(len(d_raw)) < len(d_raw) - 1)[:, None]


def swapped(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Low and high clip shares the wrong way round."""
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean")
    other = dict(zip(names, reversed(names), strict=True))
    return {other.get(name, name): x for name, x in metrics.items()}


def swap_epsilons(case: Case) -> Case:
    o = settings(case)
    return case.but(config={"epsilon": o.epsilon_high, "epsilon_high": o.epsilon})


def padded_mean(case: Case) -> Case:
    """Each sequence divided by the padded length."""
    width = case.completion_mask.shape[1]
    return case.but(config={"loss_type": "dr_grpo", "max_completion_length": width})


BF16 = torch.bfloat16
has_bonus = has(entropy_coef=Not(0))
corrected: dict[str, Any] = {
    "beta": Not(0),
    "use_bias_correction_kl": (True,),
    "loss_type": Not("gmpo"),
}
by_token: dict[str, Any] = {"importance_sampling_level": ("token",)}
by_token["loss_type"] = tuple(x for x in TERMS if not TERMS[x].per_sequence)
FAULTS = [
    Fault("gradients x 1.001", grads(lambda x: 1.001 * x), f32),
    Fault("weight gradient x 1.001", grads(lambda x: 1.001 * x, "weight"), f32),
    Fault("hidden gradient x 0.9995", grads(lambda x: 0.9995 * x, "hidden"), f32),
    Fault("gradients through bfloat16", grads(through(BF16)), f32),
    Fault("bias gradient lost", grads(torch.zeros_like, "bias"), given("bias")),
    Fault("float32 for float64", grads(through(torch.float32)),
          lambda case: case.hidden.dtype == torch.float64),
    Fault("logits in bfloat16", Hooks(raw=through(BF16)), has(logits_dtype=("float32",))),
    Fault("logits in float16", Hooks(raw=through(torch.float16)), f32),
    Fault("logits off by 2^-12 (TF32)",
          Hooks(raw=lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))), f32),
    Fault("last vocabulary lane lost", Hooks(raw=lane_lost), f32),
    Fault("temperature 1 % off", Hooks(raw=lambda x: 1.01 * x), f32),
    Fault("d logits not divided by the temperature", Hooks(d_raw=lambda x: 1.25 * x), f32),
    Fault("soft-cap's derivative dropped", Hooks(chain_cap=False),
          has(final_logit_softcapping=Not(None))),
    Fault("entropy gradient dropped", Hooks(slopes=lambda c, a, b: (a, 0 * b)), has_bonus),
    Fault("entropy gradient doubled", Hooks(slopes=lambda c, a, b: (a, 2 * b)), has_bonus),
    Fault("last row's gradient lost", Hooks(d_raw=last_row_lost),
          has(entropy_coef=Not(0), top_entropy_quantile=(1,))),
    Fault("weight gradient summed in bfloat16", Hooks(accumulate=BF16),
          lambda case: case.name == "C/long/bf16"),
    Fault("epsilons swapped", Hooks(case=swap_epsilons), clipping, 0.9),
    Fault("nothing clipped", config(epsilon=50.0, epsilon_high=50.0), clipping, 0.8),
    Fault("delta ignored", config(delta=None),
          lambda case: clipping(case) and settings(case).delta is not None, 0.5),
    Fault("old logps ignored", told(old_per_token_logps=None), off_policy),
    Fault("old logps in bfloat16",
          Hooks(case=lambda c: c.but(old_per_token_logps=c.old_per_token_logps.bfloat16())),
          off_policy),
    Fault("mean over the padded length", Hooks(case=padded_mean),
          has(loss_type=("grpo",), beta=(0,))),
    Fault("luspo as grpo", config(loss_type="grpo"), has(loss_type=("luspo",))),
    Fault("dapo as bnpo", config(loss_type="bnpo"),
          lambda c: c.name.startswith("D/items") and settings(c).loss_type == "dapo"),
    Fault("KL without bias correction", config(use_bias_correction_kl=False),
          old_and(**corrected)),
    Fault("full KL: the mean not taken off", Hooks(pull=lambda p, d, kl: p * d), full_kl, 0.9),
    Fault("full KL: the gradient of the other direction",
          Hooks(pull=lambda p, d, kl: p - p * (-d).exp()), full_kl, 0.9),
    Fault("full KL without a soft-cap of the reference",
          told(others={"teacher_final_logit_softcapping": None}),
          lambda c: full_kl(c) and settings(c).teacher_final_logit_softcapping is not None),
    Fault("KL dropped", config(beta=0.0), old_and(beta=Not(0))),
    Fault("k2 for k3", config(kl_estimator="k2"), has(beta=Not(0), kl_estimator=("k3",))),
    Fault("sequence ratio for token ratio", config(importance_sampling_level="sequence"),
          old_and(**by_token)),
    Fault("importance ratio ignored", told(importance_sampling_ratio=None),
          given("importance_sampling_ratio")),
    Fault("sampling logps ignored", told(sampling_per_token_logps=None), reads_sampler, 0.5),
    Fault("off-policy mask ignored", config(off_policy_mask_threshold=None), drops_a_token),
    Fault("top-entropy mask ignored", config(top_entropy_quantile=1.0),
          has(top_entropy_quantile=Not(1))),
    Fault("masked positions read",
          Hooks(case=lambda c: c.but(completion_mask=torch.ones_like(c.completion_mask))),
          lambda case: case.group == "E"),
    Fault("masked logps not 0", Hooks(logps=lambda x: torch.where(x == 0, 1e-12, x)),
          lambda case: f32(case) and bool((case.completion_mask == 0).any())),
    Fault("loss in bfloat16", Hooks(loss=through(BF16)), f32, 0.9),
    Fault("entropies in bfloat16", Hooks(entropies=through(BF16)), f32),
    Fault("clip shares swapped", Hooks(metrics=swapped), clipping, 0.8),
]  # fmt: skip
