"""OpenRLHF's `Actor` without logits.

Import this file in every worker. docs/start/other-trainers.md says what is refused.
"""

from openrlhf.models.actor import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from torch.nn.functional import pad

from grpo_kernels.transformers import causal_lm_logps


def forward(
    self, sequences, action_mask, attention_mask, return_output=False, return_entropy=False,
    **others,
):  # fmt: skip
    others.pop("packed_seq_lens", None)  # not needed: positions tell the sequences apart
    if getattr(self, "is_vlm", False) or any(x is not None for x in others.values()):
        raise NotImplementedError(f"images or ring attention: {[*others]}")
    count = action_mask.shape[1]
    if self.packing_samples:  # one row of all tokens, (1, N)
        unpadded = unpad_and_slice_tensor(sequences, attention_mask, None)
        ids, positions, _, _, indices = unpadded
        mask = pad(action_mask, (sequences.shape[1] - count, 0)).flatten()[indices][None]
        attention_mask = None
    else:
        ids, mask = sequences, action_mask
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    options = {"temperature": self.temperature, "entropy": return_entropy, "return_output": True}
    scores, output = causal_lm_logps(
        self.model, ids, attention_mask, mask, position_ids=positions, **options
    )

    def padded(x):
        if not self.packing_samples:
            return x
        return gather_and_pad_tensor(x, None, 0, indices, *sequences.shape)[:, -count:]

    if return_entropy:
        output.entropy = padded(scores.entropies)
    return (padded(scores.logps), output) if return_output else padded(scores.logps)


Actor.forward = forward
