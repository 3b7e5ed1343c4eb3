"""ms-swift's GRPO trainer without logits, for runs without `--use_liger_kernel`.

Pass this file as `--external_plugins`. docs/start/other-trainers.md says what is not supported.
"""

import torch
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

from grpo_kernels.transformers import causal_lm_logps


def local_forward(self, model, model_inputs, logits_to_keep, input_ids, compute_entropy=False):
    inputs = {**model_inputs, "logits_to_keep": None}
    ids, attention_mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    inputs |= {"temperature": self.temperature, "entropy": compute_entropy}
    scores = causal_lm_logps(model, ids, attention_mask, mask[:, -logits_to_keep:], **inputs)
    return scores.logps, scores.entropies


GRPOTrainer._get_logps_via_local_forward = local_forward
