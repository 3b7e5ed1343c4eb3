"""TRL's correction for the sampler (``vllm_importance_sampling_correction``), for batches that TRL has not scored.

TRL prepares such a batch as if there were no correction (`old_scoring`). The ratio to the sampler is computed in the
middle of TRL's loss: after its log-probabilities, and before it reads the ratio.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.importance import scored_difference
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.sampler_correction import bounded_ratio
from grpo_kernels.trl.micro_batches import counted_tokens

TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def is_corrected(trainer: Any) -> bool:
    """Return True if `trainer` corrects for its sampler."""
    return bool(
        getattr(trainer, "use_vllm", False)
        and getattr(trainer, "vllm_importance_sampling_correction", False)
    )


def check_correction(trainer: Any) -> None:
    """Raise ValueError unless `trainer`, whose `fused_sampling_correction` is True, makes a correction of TRL's."""
    if not is_corrected(trainer):
        raise ValueError(
            "fused_sampling_correction: expected False without a sampler to correct for (use_vllm=True and "
            "vllm_importance_sampling_correction=True), got True"
        )
    if trainer.vllm_importance_sampling_mode not in TRL_MODES:
        raise ValueError(
            f"vllm_importance_sampling_mode: expected one of {', '.join(map(repr, TRL_MODES))}, got "
            f"{trainer.vllm_importance_sampling_mode!r}"
        )


def options(trainer: Any) -> dict[str, Any]:
    """The `LossConfig` fields of the trainer's correction."""
    names = ("mode", "clip_max", "clip_min")
    found = {
        f"vllm_importance_sampling_{name}": getattr(trainer, f"vllm_importance_sampling_{name}")
        for name in names
    }
    return {"vllm_importance_sampling_correction": True, **found}


class SamplingFigures:
    """TRL's ``sampling/*`` metrics of one generated batch, collected from its micro-batches one by one."""

    def __init__(self, micro_batches: int) -> None:
        self._due = micro_batches
        self._gaps: list[Tensor] = []
        self._ratios: list[Tensor] = []

    def add(self, gaps: Tensor, ratios: Tensor) -> bool:
        """Add the figures of a micro-batch; return True if it was the last one, so that `log` is due."""
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


def ratio_and_figures(
    trainer: Any, inputs: dict[str, Any], logps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ratio of `logps` (B, T) to the sampler of `inputs`, (B, T) or (B, 1) as TRL has it, and its figures.

    The figures are |logp - sampling logp| of the counted tokens that the sampler could score, and the ratios.
    """
    sampling, config = inputs["sampling_per_token_logps"], LossConfig(**options(trainer))
    mask = counted_tokens(inputs).bool()
    log_ratio = torch.where(mask, scored_difference(logps, sampling), 0.0)
    per_sequence = config.sampling_ratio_is_per_sequence
    ratio = bounded_ratio(
        config, log_ratio.sum(dim=-1, keepdim=True) if per_sequence else log_ratio
    )
    gaps = (logps.detach() - sampling).abs()[mask & ~torch.isnan(sampling)]
    return ratio, gaps, ratio.flatten() if per_sequence else ratio[mask]
