"""TRL's own loss as an oracle: `GRPOTrainer._compute_loss`, unmodified, behind a stub of a trainer.

Only the model is replaced: per-token logps and entropies come from full logits in float64, so that
the loss, its gradients and the logged metrics are TRL's formulas and nothing else.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.reference_terms import TERMS, settings


@dataclass
class OracleResult:
    """What TRL returned, and the gradients that autograd makes of it."""

    loss: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    d_bias: Tensor | None
    metrics: dict[str, float]


def in_domain(case: Case) -> bool:
    """True if TRL defines this case: not NaN, overflow, empty batches and what is ours."""
    o = settings(case)
    b, t = case.completion_mask.shape
    counted = case.completion_mask != 0
    tensors = (case.hidden, case.weight, case.bias, case.advantages)
    logps = (case.old_per_token_logps, case.ref_per_token_logps)
    finite = all(x is None or bool(torch.isfinite(x).all()) for x in (*tensors, *logps))
    ids = case.completion_ids
    rolled_out = bool(((ids >= 0) & (ids < case.weight.shape[0])).all())
    # With one column TRL takes every metric for one value per sequence, and counts masked ones too.
    one_column = t == 1 and not bool(counted.all())
    ours = o.kl_estimator != "k3" or o.logits_dtype != "float32" or not TERMS[o.loss_type].in_trl
    # An empty sequence: TRL's GMPO counts -advantage for it, its CISPO takes the ratio, 1, for
    # capped, and its VESPO takes an importance ratio given for the whole sequence.
    differs = o.loss_type in ("gmpo", "cispo", "vespo") and not bool(counted.any(1).all())
    differs |= o.loss_type == "gmpo" and case.advantages.dim() == 2
    ordinary = case.group not in ("E", "F") and b * t > 0 and finite and rolled_out
    return ordinary and not (one_column or ours or differs)


@contextmanager
def default_float64() -> Iterator[None]:
    """TRL builds some tensors from Python numbers: let those be float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trainers() -> tuple[type, type]:
    """TRL's GRPO and GMPO trainers; the test is skipped where TRL is not installed."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # read when the next import runs
    gmpo = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    return grpo.GRPOTrainer, gmpo.GMPOTrainer


def stub_trainer(case, o, logps, entropies, grpo):
    """What `_compute_loss` reads, for one process and one gradient accumulation step."""
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, dim, pad_index: x, reduce=lambda x, reduction: x,
    )  # fmt: skip
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(**vars(o), steps_per_generation=1),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=o.entropy_coef != 0.0,
        use_adaptive_entropy=False,
        use_vllm=case.importance_sampling_ratio is not None,
        vllm_importance_sampling_correction=True,
        epsilon_low=o.epsilon,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropies, None),
        get_off_policy_mask=grpo.get_off_policy_mask,
        get_gamma_weights=grpo.get_gamma_weights,
    )
    copied = ("loss_type", "importance_sampling_level", "beta", "epsilon_high", "entropy_coef")
    masks = ("top_entropy_quantile", "off_policy_mask_threshold", "max_completion_length")
    for name in (*copied, *masks):
        setattr(trainer, name, getattr(o, name))
    trainer.get_high_entropy_mask = MethodType(grpo.get_high_entropy_mask, trainer)
    return trainer


def trl_loss(case: Case) -> OracleResult:
    """Loss, gradients and logged metrics of TRL for `case`, in float64 from its rounded inputs."""
    assert in_domain(case), case.name
    grpo, gmpo = trainers()
    o, exact = settings(case), case.to(torch.float64)
    leaves = [x for x in (exact.hidden, exact.weight, exact.bias) if x is not None]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    with default_float64():
        # the order of TRL's fused head: bias, scale, soft-cap, temperature
        logits, cap = torch.nn.functional.linear(*leaves) * o.logit_scale, o.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        log_probs = (logits / o.temperature).log_softmax(-1)
        logps = log_probs.gather(-1, case.completion_ids.long()[..., None]).squeeze(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        mask = (case.completion_mask != 0).long()
        items = mask.sum() if case.num_items_in_batch is None else case.num_items_in_batch
        inputs = {
            "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0],
            "completion_ids": case.completion_ids, "completion_mask": mask,
            "advantages": exact.advantages,
            "num_items_in_batch": torch.as_tensor(items, dtype=torch.float64),
        }  # fmt: skip
        ratio = exact.importance_sampling_ratio
        if ratio is not None:
            ratio = ratio[:, None] if ratio.dim() == 1 else ratio
            if ratio.shape[1] > 1:  # TRL's own is exactly 1 where masked, and vespo relies on it
                ratio = torch.where(mask != 0, ratio, 1.0)
            inputs["importance_sampling_ratio"] = ratio
        for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
            if getattr(exact, name) is not None:
                inputs[name] = getattr(exact, name)
        trainer = stub_trainer(case, o, logps, entropies, grpo)
        loss = (gmpo if o.loss_type == "gmpo" else grpo)._compute_loss(trainer, None, inputs)
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    metrics = {k: x[-1] for k, x in trainer._metrics["train"].items() if not math.isnan(x[-1])}
    metrics.pop("entropy_coef", None)
    d_bias = grads[2] if len(grads) > 2 else None
    return OracleResult(loss.detach(), grads[0], grads[1], d_bias, metrics)
