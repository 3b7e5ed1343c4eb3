"""Losses, log-probabilities and divergences of any causal language model of transformers."""

from grpo_kernels.base.checks import only_public
from grpo_kernels.patching import needed

with needed("transformers", "transformers"):
    from grpo_kernels.transformers.causal_lm import (
        causal_lm_divergence,
        causal_lm_logps,
        causal_lm_loss,
    )
    from grpo_kernels.transformers.head import HeadInputs, describe_head, head_inputs

__all__ = [
    "HeadInputs",
    "causal_lm_divergence",
    "causal_lm_loss",
    "causal_lm_logps",
    "describe_head",
    "head_inputs",
]

only_public(__name__)
