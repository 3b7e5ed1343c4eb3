"""Rewards of a batch of completions, from functions (sync or async) and from reward models."""

from grpo_kernels.rewards.compute import compute_rewards, reward_names

__all__ = ["compute_rewards", "reward_names"]
