"""Open-Instruct's `grpo_fast.py` without logits.

Import this file before training. docs/start/other-trainers.md says what is refused.
"""

from open_instruct import grpo_utils

from grpo_kernels.transformers import causal_lm_logps


def forward_for_logprobs(
    model, query_responses, attention_mask, position_ids, pad_token_id, temperature,
    return_entropy=False, **others,
):  # fmt: skip
    if any(others.values()):
        raise NotImplementedError(f"models of OLMo-core: {', '.join(others)}")
    mask = query_responses != pad_token_id
    options = {"temperature": temperature, "entropy": return_entropy, "position_ids": position_ids}
    scores = causal_lm_logps(model, query_responses, attention_mask, mask, **options)
    entropies = scores.entropies[:, 1:].detach() if return_entropy else None
    return scores.logps[:, 1:], entropies  # (B, T - 1): from the second token on


grpo_utils.forward_for_logprobs = forward_for_logprobs
