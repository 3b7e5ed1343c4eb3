"""Rollout correction: weights and a mask for samples of another engine, or of an older policy, than is trained.

``correct`` takes the trainer's and the sampler's log-probabilities of the same tokens and returns importance weights,
the mask without what is rejected, and verl's metrics of how far the two are apart. It is all arithmetic on (B, T)
numbers, in float64 (float32 where the device has none) and without gradient.
"""

from __future__ import annotations

from grpo_kernels.rollouts.correction import Correction, correct

__all__ = ["Correction", "correct"]
