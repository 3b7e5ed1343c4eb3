"""The gradient to expect of TRL's loss, from the trainer's options and a micro-batch."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.expectation import policy_expectation
from grpo_kernels.host import KnownRows
from grpo_kernels.objective.config import LossConfig, config_of_trainer
from grpo_kernels.objective.losses import loss_of
from grpo_kernels.trl import sampling
from grpo_kernels.trl.micro_batches import counted_tokens


def loss_config(trainer: Any, owner: type, *, is_unscored: bool) -> LossConfig | None:
    """Return the configuration of the loss of `trainer`, a method of `owner`, or None if we do not know that loss.

    `is_unscored` is True if the micro-batch lacks old log-probabilities: the ratio to the sampler is then computed from
    the loss's own (`sampling`).
    """
    overrides: dict[str, Any] = {
        "entropy_coef": _entropy_coef(trainer),
        "kl_estimator": trainer.kl_estimator,
    }
    if owner.__name__ == "GMPOTrainer" and owner.__module__.startswith("trl."):
        # It overrides the loss and reads none of these options.
        overrides = {
            "loss_type": "gmpo",
            "entropy_coef": 0.0,
            "delta": None,
            "off_policy_mask_threshold": None,
        }
    elif owner is not GRPOTrainer:
        return None
    elif is_unscored and sampling.is_corrected(trainer):
        overrides |= sampling.options(trainer)
    try:
        return dataclasses.replace(config_of_trainer(trainer.args), **overrides)
    except (TypeError, ValueError) as error:
        _warn(error)
        return None


def rows_of_loss(
    trainer: Any, inputs: dict[str, Any], config: LossConfig | None
) -> KnownRows | None:
    """Return the rows (B, T) that the loss `config` of the micro-batch `inputs` reads, and the gradient it will send.

    Without a `config` nothing is known of them: None.

    Tools' tokens are labelled and not read. They get the old or reference log-probability, so that a ratio is finite.
    """
    if config is None:
        return None
    counted, fill = counted_tokens(inputs), None
    if counted is not inputs["completion_mask"]:
        scored = (inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps"))
        fill = next((logps for logps in scored if logps is not None), None)
    try:
        expected = policy_expectation(
            config, completion_mask=counted, **_policy_inputs(trainer, inputs, config)
        )
    except (
        TypeError,
        ValueError,
    ) as error:  # TRL takes some shapes that we do not, and the loss is TRL's
        _warn(error)
        expected = None
    return KnownRows(counted, fill, expected)


def live_sequences(trainer: Any, rows: KnownRows | None) -> Tensor | None:
    """Return (B,) bool: sequences that may get a gradient from the loss that reads `rows`; None: not known."""
    graded = None if rows is None or rows.expected is None else rows.expected.graded
    return None if graded is None or trainer.aux_loss_enabled else graded.any(dim=1)


def _warn(error: Exception) -> None:
    warnings.warn(f"grpo_kernels: the gradient of this loss is not foreseen: {error}", stacklevel=3)


def _entropy_coef(trainer: Any) -> float:
    """Weight of the entropy bonus in this step; under adaptive control TRL keeps it on the trainer."""
    if not getattr(trainer, "use_adaptive_entropy", False):
        return float(trainer.args.entropy_coef)
    too_low = trainer._last_world_entropy <= trainer.args.entropy_target
    return float(trainer.entropy_coef) if too_low else 0.0


def _policy_inputs(trainer: Any, inputs: dict[str, Any], config: LossConfig) -> dict[str, Any]:
    """The batch as `policy_expectation` takes it, on a scale common to the policy term and the entropy bonus.

    TRL divides the bonus and most losses by the accumulation steps G. dapo, cispo and vespo divide by
    num_items / world_size * G / steps_per_generation instead. G is left out of both here, so that these three divide by
    num_items / (world_size * steps_per_generation).
    """
    found = {"old_per_token_logps": inputs.get("old_per_token_logps")}
    if config.estimates_kl:  # where it is not scored yet, any values grade the same rows
        reference = inputs.get("ref_per_token_logps")
        zeros = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
        found["ref_per_token_logps"] = zeros if reference is None else reference
    if config.masks_off_policy or config.corrects_sampling:
        found["sampling_per_token_logps"] = inputs.get("sampling_per_token_logps")
    enters = loss_of(config).importance_ratio
    if enters == "argument" or (enters == "factor" and sampling.is_corrected(trainer)):
        found["importance_sampling_ratio"] = inputs.get("importance_sampling_ratio")
    items = inputs.get("num_items_in_batch")
    if items is not None:
        items = torch.as_tensor(items).clamp(min=1.0) / trainer.accelerator.num_processes
        found["num_items_in_batch"] = items / (
            getattr(trainer.args, "steps_per_generation", None) or 1
        )
    return {"advantages": inputs["advantages"], **found}
