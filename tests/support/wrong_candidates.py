"""Deliberately wrong candidates. Each says on which cases it is wrong; the tolerance must reject it
there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.plain import Hooks
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


def f32(case: Case) -> bool:
    """A float32 case whose policy differs from the old one, so that nothing is trivially 0."""
    return case.hidden.dtype == torch.float32 and case.group in ("A", "B")


def told(**changes) -> Hooks:
    """The loss is computed with other arguments (`config=` for options) than it was given."""
    return Hooks(case=lambda case: case.but(**changes))


def has(**wanted) -> Callable[[Case], bool]:
    """float32 cases with these settings; None means: any that is not the default."""
    return lambda case: (
        f32(case) and all(getattr(settings(case), k) in v for k, v in wanted.items())
    )


def full_kl(case: Case) -> bool:
    """A float32 case whose KL term is over the vocabulary, from a head that is not the policy's
    own."""
    full = case.hidden.dtype == torch.float32 and case.group == "H" and settings(case).beta != 0
    return full and case.name not in ("H/same", "H/none")


def lane_lost(raw: Tensor) -> Tensor:
    """The last column is never looked at."""
    lost = torch.arange(raw.shape[1]) == raw.shape[1] - 1
    return raw.masked_fill(lost, -1e4)


def last_row_lost(d_raw: Tensor) -> Tensor:
    """The last counted position gets no gradient."""
    return d_raw * (torch.arange(len(d_raw)) < len(d_raw) - 1)[:, None]


def swapped(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Low and high clip shares the wrong way round."""
    return {
        k.replace("low_mean", "?").replace("high_mean", "low_mean").replace("?", "high_mean"): v
        for k, v in metrics.items()
    }


def swap_epsilons(case: Case) -> Case:
    """epsilon for epsilon_high and the other way round."""
    o = settings(case)
    return case.but(config={"epsilon": o.epsilon_high, "epsilon_high": o.epsilon})


def padded_mean(case: Case) -> Case:
    """Each sequence divided by the padded length."""
    return case.but(
        config={"loss_type": "dr_grpo", "max_completion_length": case.completion_mask.shape[1]}
    )


def shrink(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A stop at another dtype on the way."""
    return lambda x: x.to(dtype).to(x.dtype)


def all_grads(edit: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The same edit on every gradient."""
    return dict.fromkeys(("hidden", "weight", "bias"), edit)


def off_policy(case: Case) -> bool:
    """float32, with old logps."""
    return f32(case) and case.old_per_token_logps is not None


def drops_a_token(case: Case) -> bool:
    """float32, with old logps, and the off-policy mask drops a counted token whose advantage is not
    0."""
    if not off_policy(case) or settings(case).off_policy_mask_threshold is None:
        return False
    advantages = case.advantages if case.advantages.dim() == 2 else case.advantages[:, None]
    dropped = ~reference_loss(case).evaluation.keeps[-1]
    return bool((dropped & (case.completion_mask != 0) & (advantages != 0)).any())


def clipping(case: Case) -> bool:
    """A clip range that is not symmetric, for a loss that clips at the token."""
    o = settings(case)
    return off_policy(case) and o.loss_type in CLIPPED and o.epsilon != o.epsilon_high


FAULTS = [
    Fault("gradients x 1.001", Hooks(grads=all_grads(lambda x: 1.001 * x)), f32),
    Fault("weight gradient x 1.001", Hooks(grads={"weight": lambda x: 1.001 * x}), f32),
    Fault("hidden gradient x 0.9995", Hooks(grads={"hidden": lambda x: 0.9995 * x}), f32),
    Fault("gradients through bfloat16", Hooks(grads=all_grads(shrink(torch.bfloat16))), f32),
    Fault(
        "logits in bfloat16",
        Hooks(raw=shrink(torch.bfloat16)),
        lambda c: (
            c.group in ("A", "B")
            and c.hidden.dtype != torch.float16
            and settings(c).logits_dtype == "float32"
        ),
    ),
    Fault("logits in float16", Hooks(raw=shrink(torch.float16)), f32),
    Fault(
        "logits off by 2^-12 (TF32)",
        Hooks(raw=lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))),
        f32,
    ),
    Fault("last vocabulary lane lost", Hooks(raw=lane_lost), f32),
    Fault("temperature 1 % off", Hooks(raw=lambda x: 1.01 * x), f32),
    Fault("d logits not divided by the temperature", Hooks(d_raw=lambda x: 1.25 * x), f32),
    Fault(
        "soft-cap's derivative dropped",
        Hooks(chain_cap=False),
        lambda c: f32(c) and settings(c).final_logit_softcapping is not None,
    ),
    Fault(
        "entropy gradient dropped",
        Hooks(slopes=lambda c, a, b: (a, 0 * b)),
        lambda c: f32(c) and settings(c).entropy_coef != 0,
    ),
    Fault(
        "entropy gradient doubled",
        Hooks(slopes=lambda c, a, b: (a, 2 * b)),
        lambda c: f32(c) and settings(c).entropy_coef != 0,
    ),
    Fault(
        "last row's gradient lost",
        Hooks(d_raw=last_row_lost),
        lambda c: (
            f32(c) and settings(c).entropy_coef != 0 and settings(c).top_entropy_quantile == 1
        ),
    ),
    Fault(
        "weight gradient summed in bfloat16",
        Hooks(accumulate=torch.bfloat16),
        lambda c: c.name == "C/long/bf16",
    ),
    Fault(
        "bias gradient lost",
        Hooks(grads={"bias": torch.zeros_like}),
        lambda c: f32(c) and c.bias is not None,
    ),
    Fault("epsilons swapped", Hooks(case=swap_epsilons), clipping, 0.9),
    Fault("nothing clipped", told(config={"epsilon": 50.0, "epsilon_high": 50.0}), clipping, 0.8),
    Fault(
        "delta ignored",
        told(config={"delta": None}),
        lambda c: clipping(c) and settings(c).delta is not None,
        0.5,
    ),
    Fault("old logps ignored", told(old_per_token_logps=None), off_policy),
    Fault(
        "old logps in bfloat16",
        Hooks(case=lambda c: c.but(old_per_token_logps=c.old_per_token_logps.bfloat16())),
        off_policy,
    ),
    Fault(
        "mean over the padded length",
        Hooks(case=padded_mean),
        lambda c: has(loss_type=("grpo",))(c) and settings(c).beta == 0,
    ),
    Fault("luspo as grpo", told(config={"loss_type": "grpo"}), has(loss_type=("luspo",))),
    Fault(
        "dapo as bnpo",
        told(config={"loss_type": "bnpo"}),
        lambda c: c.name.startswith("D/items") and settings(c).loss_type == "dapo",
    ),
    Fault(
        "KL without bias correction",
        told(config={"use_bias_correction_kl": False}),
        lambda c: (
            off_policy(c)
            and settings(c).beta != 0
            and settings(c).use_bias_correction_kl
            and settings(c).loss_type != "gmpo"
        ),
    ),
    Fault("full KL: the mean not taken off", Hooks(pull=lambda p, d, kl: p * d), full_kl, 0.9),
    Fault(
        "full KL: the gradient of the other direction",
        Hooks(pull=lambda p, d, kl: p - p * (-d).exp()),
        full_kl,
        0.9,
    ),
    Fault(
        "full KL without a soft-cap of the reference",
        told(others={"teacher_final_logit_softcapping": None}),
        lambda c: full_kl(c) and settings(c).teacher_final_logit_softcapping is not None,
    ),
    Fault(
        "KL dropped", told(config={"beta": 0.0}), lambda c: off_policy(c) and settings(c).beta != 0
    ),
    Fault(
        "k2 for k3",
        told(config={"kl_estimator": "k2"}),
        lambda c: f32(c) and settings(c).beta != 0 and settings(c).kl_estimator == "k3",
    ),
    Fault(
        "sequence ratio for token ratio",
        told(config={"importance_sampling_level": "sequence"}),
        lambda c: (
            off_policy(c)
            and settings(c).importance_sampling_level == "token"
            and not TERMS[settings(c).loss_type].per_sequence
        ),
    ),
    Fault(
        "importance ratio ignored",
        told(importance_sampling_ratio=None),
        lambda c: f32(c) and c.importance_sampling_ratio is not None,
    ),
    Fault(
        "sampling logps ignored",
        told(sampling_per_token_logps=None),
        lambda c: (
            off_policy(c)
            and c.sampling_per_token_logps is not None
            and settings(c).off_policy_mask_threshold is not None
        ),
        0.5,
    ),
    Fault(
        "off-policy mask ignored", told(config={"off_policy_mask_threshold": None}), drops_a_token
    ),
    Fault(
        "top-entropy mask ignored",
        told(config={"top_entropy_quantile": 1.0}),
        lambda c: f32(c) and settings(c).top_entropy_quantile < 1,
    ),
    Fault(
        "masked positions read",
        Hooks(case=lambda c: c.but(completion_mask=torch.ones_like(c.completion_mask))),
        lambda c: c.group == "E",
    ),
    Fault(
        "masked logps not 0",
        Hooks(logps=lambda x: torch.where(x == 0, 1e-12, x)),
        lambda c: f32(c) and bool((c.completion_mask == 0).any()),
    ),
    Fault("loss in bfloat16", Hooks(loss=shrink(torch.bfloat16)), f32, 0.9),
    Fault("entropies in bfloat16", Hooks(entropies=shrink(torch.bfloat16)), f32),
    Fault("clip shares swapped", Hooks(metrics=swapped), clipping, 0.8),
    Fault(
        "float32 for float64",
        Hooks(grads=all_grads(shrink(torch.float32))),
        lambda c: c.hidden.dtype == torch.float64,
    ),
]
