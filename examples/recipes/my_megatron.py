"""Megatron-Core's GPTModel without logits: call `fuse` once on the stage that has the output layer.

docs/start/other-trainers.md shows the calls, and says what is refused.
"""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from grpo_kernels import Head, linear_logps


def fuse(model, vocab_size=None):
    """Make `model` return hidden states (B, S, H), and return a function that scores them.

    The function takes hidden states and ids, and returns log-probabilities and entropies.
    `vocab_size` is the number of tokens, without the rows that Megatron adds as padding.
    """
    if model.config.mtp_num_layers is not None:
        raise NotImplementedError("multi-token prediction")
    layer = model.output_layer
    tied = model.share_embeddings_and_output_weights
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = parallel_state.get_tensor_model_parallel_world_size()

    def hand_over(hidden, weight=None, runtime_gather_output=None):
        if layer.sequence_parallel:  # every rank has all of d hidden, and takes its part
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=group
            )
        return hidden, None

    def score(hidden, ids, **options):
        weight = model.shared_embedding_or_output_weight() if tied else layer.weight
        has_padding = vocab_size != ranks * len(weight)
        head = Head(
            weight,
            process_group=group if ranks > 1 else None,
            vocab_size=vocab_size if has_padding else None,
        )
        states = hidden.to(weight.dtype)  # Megatron's wrapper for 16 bits has made them fp32
        scores = linear_logps(states, head, ids, **options)
        return scores.logps, scores.entropies

    def compute_language_model_loss(labels, hidden):  # (B, S), (S, B, H)
        return -score(hidden.transpose(0, 1), labels, entropy=False)[0]

    layer.forward = hand_over
    model.compute_language_model_loss = compute_language_model_loss
    return score
