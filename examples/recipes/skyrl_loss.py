"""A loss of grpo_kernels in SkyRL's registry: `policy_loss_type: dapo`.

SkyRL scales the advantages beforehand, so the loss is a sum over tokens.
"""

from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss

from grpo_kernels import LossConfig, policy_loss_from_logps


@register_policy_loss("dapo")  # policy_loss_type: dapo
def dapo(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    clip = {"epsilon": config.eps_clip_low, "epsilon_high": config.eps_clip_high}
    out = policy_loss_from_logps(
        log_probs, loss_mask, advantages, old_per_token_logps=old_log_probs,
        num_items_in_batch=1, config=LossConfig(loss_type="dapo", **clip),
    )  # fmt: skip
    return out.loss, {"clip_ratio": out.metrics["clip_ratio/region_mean"].item()}
