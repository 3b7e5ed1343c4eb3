"""`python -m grpo_kernels`: the environment, the plans, and a check of the results."""
