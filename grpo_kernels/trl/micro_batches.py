"""TRL's micro-batches: which tokens count, and which gradient to expect.

The expected gradient follows from the trainer's options and the micro-batch. It is TRL's own loss
that runs: an expectation that is off costs time and changes no result, and a gradient that arrives
where none was expected raises.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.loss import policy_expectation
from grpo_kernels.objective.config import LossConfig, config_of_trainer
from grpo_kernels.objective.losses import averaged_over, loss_of
from grpo_kernels.patching import KnownRows


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """Mask (B, T) of TRL's batch, 0 where a token is padding or a tool's."""
    mask, tool_mask = inputs["completion_mask"], inputs.get("tool_mask")
    return mask if tool_mask is None else mask * tool_mask


def metrics_of(trainer: Any) -> dict[str, list[float]]:
    """TRL's metrics of the mode that the trainer is in."""
    found: dict[str, list[float]] = trainer._metrics["train" if trainer.model.training else "eval"]
    return found


def is_corrected(trainer: Any) -> bool:
    """True if `trainer` corrects for its sampler."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def correction_options(trainer: Any) -> dict[str, Any]:
    """The `LossConfig` fields of the trainer's correction for its sampler."""
    names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    found = {name: getattr(trainer, name) for name in names}
    return {"vllm_importance_sampling_correction": True, **found}


def config_of(trainer: Any) -> LossConfig:
    """The loss that the trainer's options name, with what TRL's loss reads off the trainer."""
    config = config_of_trainer(trainer.args)
    return dataclasses.replace(config, loss_type=trainer.loss_type, beta=trainer.beta)


def loss_config(trainer: Any, *, is_unscored: bool = False) -> LossConfig | None:
    """Configuration of the trainer's loss; None if it has no gradient, or we do not know it."""
    if not torch.is_grad_enabled():
        return None
    owner = trainer.loss_owner
    overrides: dict[str, Any] = {"kl_estimator": trainer.kl_estimator}
    if trainer.use_adaptive_entropy:  # TRL keeps the weight on the trainer
        too_low = trainer._last_world_entropy <= trainer.args.entropy_target
        overrides["entropy_coef"] = trainer.entropy_coef if too_low else 0.0
    if owner.__name__ == "GMPOTrainer" and owner.__module__.startswith("trl."):
        # it overrides the loss and reads none of these options
        overrides = {"loss_type": "gmpo", "entropy_coef": 0.0, "delta": None}
        overrides["off_policy_mask_threshold"] = None
    elif owner is not GRPOTrainer:
        return None
    elif is_unscored and is_corrected(trainer):  # the loss makes the ratio to the sampler
        overrides |= correction_options(trainer)
    try:
        return dataclasses.replace(config_of(trainer), **overrides)
    except (TypeError, ValueError) as error:
        _warn(error)
        return None


def rows_of_loss(
    trainer: Any, inputs: dict[str, Any], config: LossConfig | None
) -> KnownRows | None:
    """The rows (B, T) that the loss `config` reads, and the gradient that it will send."""
    if config is None:
        return None
    counted, fill = counted_tokens(inputs), None
    if counted is not inputs["completion_mask"]:
        # Tools' tokens are labelled and not read. With these log-probabilities a ratio is finite.
        scored = (inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps"))
        fill = next((logps for logps in scored if logps is not None), None)
    try:
        given = _policy_inputs(trainer, inputs, config)
        expected = policy_expectation(config, completion_mask=counted, **given)
    except (TypeError, ValueError) as error:  # TRL takes some shapes that we do not
        _warn(error)
        expected = None
    return KnownRows(counted, fill, expected)


def _policy_inputs(trainer: Any, inputs: dict[str, Any], config: LossConfig) -> dict[str, Any]:
    """The batch as `policy_expectation` takes it, on one scale for policy term and entropy bonus.

    TRL divides the bonus and most losses by the accumulation steps G. dapo, cispo and vespo divide
    by num_items / world_size * G / steps_per_generation instead. G is left out of both here, so
    that these three divide by num_items / (world_size * steps_per_generation).
    """
    found = {
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs.get("old_per_token_logps"),
    }
    if config.estimates_kl:  # where it is not scored yet, any values grade the same rows
        reference = inputs.get("ref_per_token_logps")
        zeros = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
        found["ref_per_token_logps"] = zeros if reference is None else reference
    if config.masks_off_policy or config.corrects_sampling:
        found["sampling_per_token_logps"] = inputs.get("sampling_per_token_logps")
    enters = loss_of(config).importance_ratio
    if enters == "argument" or (enters == "factor" and is_corrected(trainer)):
        found["importance_sampling_ratio"] = inputs.get("importance_sampling_ratio")
    items = inputs.get("num_items_in_batch")
    if items is not None:
        items = torch.as_tensor(items).clamp(min=1.0) / trainer.accelerator.num_processes
        found["num_items_in_batch"] = items / trainer.args.steps_per_generation
    return found


def _warn(error: Exception) -> None:
    warnings.warn(f"grpo_kernels: the gradient of this loss is not foreseen: {error}", stacklevel=3)


def live_of_loss(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """`live_sequences` of the loss of `inputs`."""
    return live_sequences(trainer, rows_of_loss(trainer, inputs, loss_config(trainer)))


def live_sequences(trainer: Any, rows: KnownRows | None) -> Tensor | None:
    """(B,) bool: sequences that may get a gradient from the loss of `rows`; None: not known."""
    graded = None if rows is None or rows.expected is None else rows.expected.graded
    return None if graded is None or trainer.aux_loss_enabled else graded.any(dim=1)


def without_dead(
    inputs: dict[str, Any], live: Tensor, config: LossConfig | None
) -> tuple[dict[str, Any], Tensor | float]:
    """Inputs of TRL's loss with the sequences that are not `live` masked; a factor for the loss."""
    mask = inputs["completion_mask"]
    keep = live.to(mask.device)[:, None]
    found = {**inputs, "completion_mask": mask * keep}
    for name, x in inputs.items():
        if name.endswith("_per_token_logps") and isinstance(x, Tensor):
            found[name] = x.masked_fill(~keep, 0.0)  # so that no ratio overflows
    if config is None or averaged_over(config, num_items=True) != "tokens":
        return found, 1.0
    counted = counted_tokens(inputs)  # bnpo: a mean over all tokens of the micro-batch
    return found, (counted * keep).sum() / counted.sum().clamp(min=1)
