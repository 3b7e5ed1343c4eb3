"""TRL's trainers with their language-model head computed by `grpo_kernels`."""

from grpo_kernels.patching import needed

with needed("'trl>=1.16'", "trl", "transformers"):
    from grpo_kernels.trl.supported import IS_KNOWN

    if IS_KNOWN:
        from grpo_kernels.trl.distillation import FusedDistillationTrainer
        from grpo_kernels.trl.patch import patch_trl, unpatch_trl
        from grpo_kernels.trl.trainer import FusedGRPOTrainer, FusedLossMixin
    else:
        from grpo_kernels.trl.supported import (  # type: ignore[assignment]
            FusedDistillationTrainer,
            FusedGRPOTrainer,
            FusedLossMixin,
            patch_trl,
            unpatch_trl,
        )

__all__ = [
    "FusedDistillationTrainer",
    "FusedGRPOTrainer",
    "FusedLossMixin",
    "patch_trl",
    "unpatch_trl",
]
