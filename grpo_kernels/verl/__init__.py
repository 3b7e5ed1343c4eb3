"""verl with `impl_backend=grpo_kernels` among its fused heads."""

from grpo_kernels.verl.plugin import patch_verl, unpatch_verl

__all__ = ["patch_verl", "unpatch_verl"]
