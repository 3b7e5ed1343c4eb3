"""The commands of `python -m grpo_kernels`."""
