"""The float64 reference against TRL's own loss, and the tolerance against right and deliberately
wrong candidates."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import MethodType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from benchmarks.parity import LOSS_TYPES
from grpo_kernels import LossConfig
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import Case, make_case
from tests.support.cases import LOSSES, random_case
from tests.support.reference import DEFAULTS, TERMS, Exact, reference_loss, settings
from tests.support.tolerance import assert_matches, computed_in

OF_TRL = (*LOSS_TYPES, "gmpo")  # the loss types that TRL has


def in_domain(case: Case) -> bool:
    """True if TRL defines this case: not empty batches and what is ours."""
    o, counted = settings(case), case.completion_mask != 0
    # With one column TRL takes every metric for one value per sequence, and counts masked ones too.
    one_column = counted.shape[1] == 1 and not bool(counted.all())
    ours = (o.beta != 0 and o.kl_estimator != "k3") or o.logits_dtype != "float32"
    ours |= o.loss_type not in OF_TRL
    # An empty sequence: TRL's GMPO counts -advantage for it, its CISPO takes the ratio, 1, for
    # capped, and its VESPO takes an importance ratio given for the whole sequence.
    differs = o.loss_type in ("gmpo", "cispo", "vespo") and not bool(counted.any(1).all())
    return counted.numel() > 0 and not (one_column or ours or differs)


@contextmanager
def default_float64() -> Iterator[None]:
    """TRL builds some tensors from Python numbers: let those be float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stub_trainer(case, o, logps, entropies, grpo):
    """What `_compute_loss` reads, for one process and one gradient accumulation step."""
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, dim, pad_index: x, reduce=lambda x, reduction: x,
    )  # fmt: skip
    trainer = SimpleNamespace(
        **vars(o),
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
    trainer.get_high_entropy_mask = MethodType(grpo.get_high_entropy_mask, trainer)
    return trainer


def trl_loss(case: Case) -> SimpleNamespace:
    """Loss, gradients and logged metrics of TRL for `case`, in float64 from its rounded inputs.

    `_compute_loss` is TRL's own; per-token logps and entropies come from full logits.
    """
    assert in_domain(case), case.name
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # read when the next import runs
    gmpo = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    grpo = pytest.importorskip("trl").GRPOTrainer
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
    named = dict(zip(("d_hidden", "d_weight", "d_bias"), grads, strict=False))
    return SimpleNamespace(loss=loss.detach(), **named, metrics=metrics)


def test_reference_equals_trl() -> None:
    tried: Counter[tuple[str, str]] = Counter()
    for seed in range(500):
        case = random_case(seed, plain=True)
        o = settings(case)
        if not in_domain(case) or tried[o.loss_type, o.importance_sampling_level] == 5:
            continue
        tried[o.loss_type, o.importance_sampling_level] += 1
        ours, trl = reference_loss(case), vars(trl_loss(case))
        for name, value in trl.pop("metrics").items():  # TRL puts its 0 / 1 shares in float32
            assert abs(float(ours.metrics[name]) - value) < 1e-6, (case.name, name)
        for name, x in trl.items():
            error = (getattr(ours, name) - x).abs().max()
            assert error <= 1e-10 * x.abs().max(), (case.name, name)
    assert {*tried} == {x for x in LOSSES if x[0] in OF_TRL} and min(tried.values()) >= 4, tried


def accepted(case, told=None, raw=None, edits=None):
    """True if the tolerance takes the reference's results, each rounded once, for the case's: of
    the case as it was `told`, with another result of the products, and edited results."""
    reference, does = reference_loss(case), Exact()
    does.raw = raw or does.raw
    want = vars(reference_loss(case.but(**(told or {})), does))
    want |= {field: edit(want[field]) for field, edit in (edits or {}).items()}
    rounded = {x: want[x].to(computed_in(case)) for x in ("loss", "logps", "entropies")}
    grads: dict[str, Tensor | None] = {
        x: None if x in case.frozen else want[f"d_{x}"].to(getattr(case, x).dtype)
        for x in want["head"].leaves
    }
    output = SimpleNamespace(**rounded, metrics=want["metrics"])
    try:
        assert_matches(output, grads, reference, case)
    except AssertionError:
        return False
    return True


CASE = make_case(
    "faults", b=5, noise=0.4, epsilon_high=0.28, bias=True, beta=0.3, ratio="token", delta=1.1,
    off_policy_mask_threshold=0.03, top_entropy_quantile=0.6, temperature=0.8,
)  # fmt: skip
# what is wrong: of what is told, of the products, or of a result
FAULTS: dict[str, dict[str, Any]] = {
    "weight gradient x 1.001": {"edits": {"d_weight": lambda x: 1.001 * x}},
    "hidden gradient x 0.9995": {"edits": {"d_hidden": lambda x: 0.9995 * x}},
    "bias gradient lost": {"edits": {"d_bias": torch.zeros_like}},
    "masked logps not 0": {"edits": {"logps": lambda x: torch.where(x == 0, 1e-12, x)}},
    "loss x 1.0001": {"edits": {"loss": lambda x: 1.0001 * x}},
    "a metric": {"edits": {"metrics": lambda x: x | {"ratio": 1.001 * x["ratio"]}}},
    "logits in bfloat16": {"raw": lambda x: x.bfloat16().to(x.dtype)},
    "logits off by 2^-12 (TF32)": {"raw": lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))},
    "last vocabulary lane lost": {
        "raw": lambda x: x.masked_fill(torch.arange(x.shape[1]) == x.shape[1] - 1, -1e4)
    },
    "importance ratio ignored": {"told": {"importance_sampling_ratio": None}},
    **{f"{option} ignored": {"told": {"config": {option: value}}} for option, value in (
        ("epsilon", 0.1), ("delta", None), ("use_bias_correction_kl", False),
        ("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0),
    )},
}  # fmt: skip


def test_the_tolerance_accepts_what_is_right_and_no_more() -> None:
    assert all(accepted(case) for case in (CASE, *map(random_case, range(30))))
    assert [name for name, wrong in FAULTS.items() if accepted(CASE, **wrong)] == []


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert {*get_args(LossTypeName)} == TERMS.keys()
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            default = option.default
            if option.name == "max_completion_length":  # ours has none
                default = 512
            assert DEFAULTS[option.name] == default, option.name
