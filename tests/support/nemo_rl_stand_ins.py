"""NeMo-RL's names and signatures for docs/recipes.md, 0.6.0 (7ea279a), in plain torch of our own, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.trainer_stand_ins import scores_of


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    """NeMo-RL 0.6.0's (7ea279a), on one rank: hidden states (S, B, H), weight (V, H), target (B, S)."""
    logits = tensor_parallel_hidden_states @ output_weight_layer.T
    return scores_of(logits.transpose(0, 1)[:, :-1], target[:, 1:])[0]


class LossPostProcessor:
    """NeMo-RL 0.6.0's (7ea279a), on one rank, for losses of log-probabilities."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn, self.cp_size, self.enable_seq_packing = loss_fn, 1, False
        self.tp_mesh = SimpleNamespace(size=lambda: 1)

    def __call__(
        self,
        logits,
        data_dict,
        processed_inputs,
        global_valid_seqs,
        global_valid_toks,
        sequence_dim=1,
    ):
        ids = data_dict["input_ids"]
        if self.loss_fn.use_fused_linear_logprobs:
            logps = logits[:, : ids.shape[1] - 1]
        else:
            logps = scores_of(logits[:, :-1], ids[:, 1:])[0]
        loss, metrics = self.loss_fn(logps, data_dict, global_valid_toks)
        return loss, metrics


class LogprobsPostProcessor:
    """NeMo-RL 0.6.0's (7ea279a), on one rank."""

    def __init__(self) -> None:
        self.cp_size, self.enable_seq_packing, self.tp_mesh = (
            1,
            False,
            SimpleNamespace(size=lambda: 1),
        )

    def __call__(
        self,
        logits,
        data_dict,
        processed_inputs,
        original_batch_size,
        original_seq_len,
        sequence_dim=1,
    ):
        logps = self._compute_local_logprobs(logits, processed_inputs.input_ids)
        logps = nn.functional.pad(logps, (1, 0))
        return logps * (torch.arange(logps.shape[1]) < data_dict["input_lengths"][:, None])

    def _compute_local_logprobs(self, logits: Tensor, input_ids: Tensor) -> Tensor:
        return scores_of(logits[:, :-1], input_ids[:, 1:])[0]


def need_top_k_or_top_p_filtering(sampling_params: Any) -> bool:
    """NeMo-RL 0.6.0's (7ea279a)."""
    return sampling_params is not None and (
        sampling_params.top_k is not None or sampling_params.top_p != 1.0
    )


def forward_with_post_processing_fn(
    model,
    post_processing_fn,
    processed_mb,
    is_reward_model=False,
    allow_flash_attn_args=True,
    global_valid_seqs=None,
    global_valid_toks=None,
    sampling_params=None,
    sequence_dim=1,
):
    """NeMo-RL 0.6.0's (7ea279a), for the two processors above and others, which get the logits."""
    inputs = processed_mb.processed_inputs
    names = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{name: getattr(inputs, name) for name in names}, use_cache=False).logits
    logits = logits / (1.0 if sampling_params is None else sampling_params.temperature)
    passed = {"logits": logits, "data_dict": processed_mb.data_dict, "processed_inputs": inputs}
    if isinstance(post_processing_fn, LossPostProcessor):
        return *post_processing_fn(
            **passed, global_valid_seqs=None, global_valid_toks=global_valid_toks
        ), processed_mb
    sizes = {
        name: getattr(processed_mb, name) for name in ("original_batch_size", "original_seq_len")
    }
    found = post_processing_fn(**passed, **sizes)
    return found, {"logprobs": found}, processed_mb
