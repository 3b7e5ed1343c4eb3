"""Adapters to trainers. Nothing is imported here: each module needs the package it is named after.

`grpo_kernels.integrations.trl`: `FusedGRPOTrainer`, `patch_trl`, `unpatch_trl` (``pip install grpo_kernels[trl]``).
`grpo_kernels.integrations.verl`: `patch_verl`, `unpatch_verl`; ``import verl`` patches by itself.
`grpo_kernels.integrations.liger`: `LigerFusedLinearGRPOLoss`, which needs no Liger; `patch_liger`, `unpatch_liger`.
`grpo_kernels.integrations.transformers`: `causal_lm_loss`, `completion_logprobs`, for any causal language model.
"""
