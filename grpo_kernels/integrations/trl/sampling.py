"""TRL's correction for the sampler (``vllm_importance_sampling_correction``) without a forward of its own.

If the samples are the current policy's, TRL scores them before the loss only for the ratio to the sampler, and the loss
computes the same log-probabilities again. Here TRL prepares the batch as if there were no correction, and the ratio is
computed in the middle of TRL's loss: after its log-probabilities, and before it reads the ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.importance import scored_difference
from grpo_kernels.config import LossConfig
from grpo_kernels.integrations.trl.step import counted_tokens
from grpo_kernels.objective.sampler_correction import bounded_ratio

TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def is_corrected(trainer: Any) -> bool:
    """Return True if `trainer` corrects for its sampler."""
    return bool(getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False))


def check_correction(trainer: Any) -> None:
    """Raise ValueError if `fused_sampling_correction` is on and `trainer` makes no correction, or none of TRL's."""
    if trainer.fused_sampling_correction and not is_corrected(trainer):
        raise ValueError(
            "fused_sampling_correction: expected False without a sampler to correct for (use_vllm=True and "
            "vllm_importance_sampling_correction=True), got True"
        )
    if trainer.fused_sampling_correction and trainer.vllm_importance_sampling_mode not in TRL_MODES:
        raise ValueError(
            f"vllm_importance_sampling_mode: expected one of {', '.join(map(repr, TRL_MODES))}, got "
            f"{trainer.vllm_importance_sampling_mode!r}"
        )


def is_aligned(trainer: Any) -> bool:
    """Return True if every completion is trained on before the policy changes: it is then the current policy's own."""
    generate_every = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer.args.gradient_accumulation_steps % generate_every == 0)


def options(trainer: Any) -> dict[str, Any]:
    """The `LossConfig` fields of the trainer's correction."""
    names = ("mode", "clip_max", "clip_min")
    found = {f"vllm_importance_sampling_{name}": getattr(trainer, f"vllm_importance_sampling_{name}") for name in names}
    return {"vllm_importance_sampling_correction": True, **found}


@contextmanager
def uncorrected(trainer: Any) -> Iterator[None]:
    """Inside, TRL prepares a batch without the ratio, its metrics, and the scoring that only they need."""
    trainer.vllm_importance_sampling_correction = False
    try:
        yield
    finally:
        trainer.vllm_importance_sampling_correction = True


class SamplingFigures:
    """TRL's ``sampling/*`` metrics of one generated batch, collected from its micro-batches one by one."""

    def __init__(self, micro_batches: int) -> None:
        self._due = micro_batches
        self._gaps: list[Tensor] = []
        self._ratios: list[Tensor] = []

    def add(self, gaps: Tensor, ratios: Tensor) -> bool:
        """Add the figures of a micro-batch; return True if it was the last one, so that `log` is due."""
        if self._due == 0:  # a later pass over the same batch
            return False
        self._gaps.append(gaps)
        self._ratios.append(ratios)
        self._due -= 1
        return self._due == 0

    def log(self, metrics: dict[str, list[float]], accelerator: Any) -> None:
        """Append the metrics, as TRL does: each reduced on every rank (0 if it has no numbers), then over ranks."""
        gaps, ratios = torch.cat(self._gaps), torch.cat(self._ratios)
        for name, x, own, all_ranks in (
            ("sampling_logp_difference/mean", gaps, torch.mean, torch.mean),
            ("sampling_logp_difference/max", gaps, torch.max, torch.max),
            ("importance_sampling_ratio/min", ratios, torch.min, torch.min),
            ("importance_sampling_ratio/mean", ratios, torch.mean, torch.mean),
            ("importance_sampling_ratio/max", ratios, torch.max, torch.max),
        ):
            here = own(x) if x.numel() > 0 else x.new_zeros(())
            metrics[f"sampling/{name}"].append(all_ranks(accelerator.gather(here)).item())


def fill_ratio(trainer: Any, inputs: dict[str, Any], logps: Tensor) -> tuple[Tensor, Tensor]:
    """Put the ratio of `logps` (B, T) into `inputs`, (B, T) or (B, 1) as TRL has it.

    Returns:
        for the metrics: |logp - sampling logp| of the counted tokens that the sampler could score, and the ratios.
    """
    sampling, config = inputs["sampling_per_token_logps"], LossConfig(**options(trainer))
    mask = counted_tokens(inputs).bool()
    log_ratio = torch.where(mask, scored_difference(logps, sampling), 0.0)
    per_sequence = config.sampling_ratio_is_per_sequence
    ratio = bounded_ratio(config, log_ratio.sum(dim=-1, keepdim=True) if per_sequence else log_ratio)
    inputs["importance_sampling_ratio"] = ratio
    gaps = (logps.detach() - sampling).abs()[mask & ~torch.isnan(sampling)]
    return gaps, ratio.flatten() if per_sequence else ratio[mask]
