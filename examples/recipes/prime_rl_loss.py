"""A loss of grpo_kernels in prime-rl: `import_path = "prime_rl_loss.my_loss"`.

The loss is a sum, because prime-rl divides by the number of tokens itself.
"""

from prime_rl.trainer.rl.loss import LossOutputs

from grpo_kernels import LossConfig, policy_loss_from_logps


def my_loss(inputs, **fields):
    logps = inputs.trainer_logprobs[None]  # (1, T): one sample at a time
    mask, advantages = inputs.loss_mask[None], inputs.advantages[None]
    out = policy_loss_from_logps(
        logps, mask, advantages, num_items_in_batch=1,
        old_per_token_logps=inputs.inference_logprobs[None],
        config=LossConfig(loss_type="dapo", **fields),
    )  # fmt: skip
    return LossOutputs(loss=out.loss, metrics={"clip_ratio": out.metrics["clip_ratio/region_mean"]})
