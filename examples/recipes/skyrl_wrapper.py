"""SkyRL's FSDP workers without logits.

Import this file in every worker. docs/start/other-trainers.md says what is refused.
"""

from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from torch.nn.functional import pad

from grpo_kernels.transformers import causal_lm_logps


def forward(
    self, sequences, num_actions, attention_mask, temperature=1.0, return_output=False,
    compute_entropy=False, entropy_requires_grad=True, **images,
):  # fmt: skip
    if self.remove_microbatch_padding or self.sequence_parallel_size > 1 or self.is_vlm:
        raise NotImplementedError("remove_microbatch_padding, sequence parallelism or images")
    mask = attention_mask[:, -num_actions:]
    positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    options = {"temperature": temperature, "entropy": compute_entropy, "position_ids": positions}
    scores = causal_lm_logps(self.model, sequences, attention_mask, mask, **options)
    if compute_entropy:  # (B, L), each where the token before it is
        entropies = pad(scores.entropies, (sequences.shape[1] - num_actions - 1, 1))
        scores.entropies = entropies if entropy_requires_grad else entropies.detach()
    return (scores.logps, {"entropy": scores.entropies}) if return_output else scores.logps


HFModelWrapper.forward = forward
