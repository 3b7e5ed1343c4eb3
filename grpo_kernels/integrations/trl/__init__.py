"""TRL's trainer with its language-model head computed by `grpo_kernels`."""

from grpo_kernels.integrations.trl.hook import patch_trl, unpatch_trl
from grpo_kernels.integrations.trl.trainer import FusedGRPOTrainer, FusedLossMixin

__all__ = ["FusedGRPOTrainer", "FusedLossMixin", "patch_trl", "unpatch_trl"]
