"""slime without logits: `--custom-model-provider-path my_slime.model_provider`.

It needs `my_megatron.py` of this folder beside it. docs/start/other-trainers.md says what is
refused.
"""

import sys
from copy import copy

import torch
from megatron.training import get_args
from my_megatron import fuse
from slime.backends.megatron_utils import actor, loss
from slime.backends.megatron_utils.model_provider import get_model_provider_func

scores = []  # of the one model of this process


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    """slime's own model, whose output layer returns hidden states."""
    args = copy(get_args())
    args.custom_model_provider_path = None
    if args.allgather_cp or "slime.backends.megatron_utils.server.logprob_utils" in sys.modules:
        raise NotImplementedError("allgather_cp, or slime's server of log-probabilities")
    stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model = get_model_provider_func(args)(**stage)
    if post_process:
        scores[:] = [fuse(model, args.vocab_size)]
    return model


def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, **others
):
    """As slime's function; `logits` are the hidden states (1, T, H) that the model returned."""
    if any(x is not None for name, x in others.items() if name != "non_loss_data"):
        raise NotImplementedError(f"rollout_top_p: {', '.join(others)}")
    (score,), (hidden,) = scores, logits
    lengths = total_lengths, response_lengths
    ids = loss._build_shifted_tokens(len(hidden), hidden.device, unconcat_tokens, *lengths, False)
    every = torch.arange(len(hidden), device=hidden.device)
    rows = loss._extract_per_sample(every, None, *lengths, False)[0]  # of each sample's response
    chosen, sizes = torch.cat(rows), [len(x) for x in rows]
    options = {"temperature": args.rollout_temperature, "entropy": with_entropy}
    logps, entropies = score(hidden[chosen], ids[chosen], **options)
    found = {"log_probs": list(logps.split(sizes))}
    if with_entropy:
        found["entropy"] = list(entropies.split(sizes))
    return hidden.new_empty(0), found


loss.get_log_probs_and_entropy = actor.get_log_probs_and_entropy = get_log_probs_and_entropy
