"""What `python -m grpo_kernels` says: the environment, the plans, and whether results are right."""
