"""The loss and log-probabilities of any causal language model of transformers."""

from grpo_kernels.host import needed

with needed("transformers", "transformers"):
    from grpo_kernels.transformers.causal_lm import causal_lm_loss
    from grpo_kernels.transformers.completion import completion_logprobs
    from grpo_kernels.transformers.head import describe_head
    from grpo_kernels.transformers.hidden_states import HeadInputs, head_inputs

__all__ = ["HeadInputs", "causal_lm_loss", "completion_logprobs", "describe_head", "head_inputs"]
