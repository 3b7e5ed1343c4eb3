"""Adapters to trainers. Nothing is imported here: each module needs the package it is named after.

`grpo_kernels.integrations.trl`: `FusedGRPOTrainer`, `patch_trl`, `unpatch_trl` (``pip install grpo_kernels[trl]``).
"""
