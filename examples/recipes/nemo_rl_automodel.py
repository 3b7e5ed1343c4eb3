"""NeMo-RL's Automodel workers without logits: import this file in each of them.

It replaces `forward_with_post_processing_fn` for losses that take log-probabilities, and for the
old and reference log-probabilities. docs/start/other-trainers.md says what is refused.
"""

import torch
from nemo_rl.models.automodel import train
from nemo_rl.models.policy.workers import dtensor_policy_worker_v2

from grpo_kernels.transformers import causal_lm_logps

theirs = train.forward_with_post_processing_fn


def forward_with_post_processing_fn(
    model, post_processing_fn, processed_mb, sampling_params=None, **others
):
    """As NeMo-RL's function; top-k logits, scores and distillation go to NeMo-RL's own."""
    process, inputs = post_processing_fn, processed_mb.processed_inputs
    data = processed_mb.data_dict
    is_loss = isinstance(process, train.LossPostProcessor)
    is_loss = is_loss and hasattr(process.loss_fn, "use_fused_linear_logprobs")
    if not is_loss and not isinstance(process, train.LogprobsPostProcessor):
        return theirs(model, process, processed_mb, sampling_params=sampling_params, **others)
    is_parallel = process.cp_size > 1 or process.tp_mesh.size() > 1
    if is_parallel or process.enable_seq_packing or inputs.is_multimodal:
        raise NotImplementedError(
            "context parallelism, sequence packing, tensor parallelism or images"
        )
    if train.need_top_k_or_top_p_filtering(sampling_params):
        raise NotImplementedError("top-k or top-p")
    ids = inputs.input_ids
    if is_loss:
        mask = data["token_mask"] * data["sample_mask"][:, None]
    else:
        columns = torch.arange(ids.shape[1], device=ids.device)
        mask = columns < data["input_lengths"].to(ids.device)[:, None]
    options = {"temperature": 1.0 if sampling_params is None else sampling_params.temperature}
    options |= {"entropy": False, "position_ids": inputs.position_ids}
    scores = causal_lm_logps(model, ids, inputs.attention_mask, mask, **options)
    passed = {"logits": scores.logps[:, 1:], "data_dict": data, "processed_inputs": inputs}
    passed["sequence_dim"] = others.get("sequence_dim", 1)
    if is_loss:
        process.loss_fn.use_fused_linear_logprobs = True  # these are no logits
        valid = {name: others[name] for name in ("global_valid_seqs", "global_valid_toks")}
        return *process(**passed, **valid), processed_mb
    process._compute_local_logprobs = lambda logps, input_ids: logps
    names = "original_batch_size", "original_seq_len"
    found = process(**passed, **{name: getattr(processed_mb, name) for name in names})
    return found, {"logprobs": found}, processed_mb


train.forward_with_post_processing_fn = forward_with_post_processing_fn
dtensor_policy_worker_v2.forward_with_post_processing_fn = forward_with_post_processing_fn
