"""torchtune's fused GRPO loss, computed by grpo_kernels in one pass.

Set `training.loss._component_: torchtune_loss.FusedGRPOLoss` in the asynchronous recipe.
"""

import torch
from torchtune.dev.rl.linear_grpo_loss import LinearGRPOLoss

from grpo_kernels import LossConfig, grpo_loss


class FusedGRPOLoss(LinearGRPOLoss):
    def forward(self, pi_old_outputs, pi_outputs, ref_outputs, advantages, padding_masks=None):
        hidden, targets = pi_old_outputs, pi_outputs  # what torchtune means by these names
        mask = torch.ones_like(targets) if padding_masks is None else padding_masks
        config = LossConfig(loss_type="grpo", beta=self.kl_coeff, use_bias_correction_kl=False)
        options = {"ref_per_token_logps": ref_outputs, "config": config}
        out = grpo_loss(hidden, self.linear_projection, targets, mask, advantages, **options)
        gap = torch.where(mask != 0, ref_outputs - out.logps, 0.0)
        kl = ((gap.exp() - gap - 1).sum(1) / mask.sum(1).clamp(min=1)).mean()
        policy_loss = self.kl_coeff * kl - out.loss.detach()
        zero = out.loss.new_zeros(())  # the clip fraction; the ratio is 1
        return out.loss, policy_loss, kl, zero + 1, zero, out.logps
