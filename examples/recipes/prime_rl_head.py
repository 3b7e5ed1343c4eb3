"""prime-rl's fused head, computed by grpo_kernels.

Import this file before prime-rl sets up the model. docs/start/other-trainers.md has the details.
"""

import torch
from prime_rl.trainer.models.layers import lm_head

from grpo_kernels import linear_logps


class FusedHead(lm_head.FusedOutputLinear):
    def forward(self, hidden_states, labels=None, temperature=None, sampling_mask=None):
        if temperature is None:  # its SFT loss
            return super().forward(hidden_states, labels, temperature, sampling_mask)
        scores = linear_logps(
            hidden_states, self.weight, labels, temperature=temperature, topk_ids=sampling_mask
        )
        output = lm_head.PrimeLmOutput(logprobs=scores.logps, entropy=scores.entropies)
        if sampling_mask is not None:
            replayed = lm_head.sampling_replay_mask(sampling_mask, labels)  # sets with the label
            of_set = scores.topk_logps.logsumexp(-1)
            output["logprobs"] = torch.where(replayed, scores.logps - of_set, scores.logps)
            if getattr(self, "return_mask_logprobs", False):  # its score centering
                kept = replayed[..., None] & (sampling_mask >= 0)
                logps = scores.topk_logps - of_set[..., None]
                output["mask_logprobs"] = torch.where(kept, logps, 0.0)
        return output


lm_head.FusedOutputLinear = FusedHead  # before the model is set up
