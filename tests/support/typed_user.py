"""A user's file, as type checkers see it; never run. Lines that end in ``# wrong`` are to be reported, no others."""

from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, assert_type

import grpo_kernels
from grpo_kernels import (
    GRPOLoss, Head, LossConfig, LossOutput, Run, Scores, TokenInputs, advantages, grpo_loss,
    linear_divergence, linear_logps, objectives, policy_loss_from_logps, presets, token_level,
    topk_divergence,
)
from grpo_kernels.transformers import causal_lm_loss, causal_lm_logps
from grpo_kernels.typing import BackendName, EngineName, LossFields

x, ids, mask, rewards = torch.randn(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)
loss_args = (x, x, ids, mask, rewards)
lm_head = nn.Linear(4, 7)

# the head, and how a call is computed
whole = Head(x, bias=x, vocab_size=5, final_logit_softcapping=30.0, logits_dtype="input")
assert_type(whole, Head)
Head()  # wrong
Head(x, logits_scale=0.5)  # wrong
run = Run(engine="one_pass", backend="cpp", workspace_bytes=2**20)
Run(engine="twopass")  # wrong

# the module
loss_fn = GRPOLoss(loss_type="grpo", beta=0.04, epsilon_high=None, run=run)
out = loss_fn(x, whole, ids, None, rewards, old_per_token_logps=ids, num_items_in_batch=3.0)
assert_type(out, LossOutput)
assert_type(GRPOLoss(presets.DAPO, temperature=0.9)(*loss_args), LossOutput)
assert_type(out.metrics["kl"], Tensor)
assert_type(out.metrics.pairs["kl"], tuple[Tensor, Tensor])
out.loss.backward()
GRPOLoss(epsilon_hi=1)  # wrong
GRPOLoss(beta="0.04")  # wrong
GRPOLoss(engine="one_pass")  # wrong
loss_fn(x, [x], ids, None, rewards)  # wrong
loss_fn(x, x, ids, None, rewards, old_logps=ids)  # wrong
print(loss_fn(*loss_args).los)  # wrong

# the config
config = LossConfig(loss_type="dapo", importance_sampling_level="sequence", vllm_importance_sampling_mode="token_mask")
assert_type(LossConfig.from_trl(object(), loss_type="grpo"), LossConfig)
LossConfig(loss_type="DAPO")  # wrong
LossConfig(kl_estimator="k4")  # wrong
LossConfig(logits_dtype="input")  # wrong
LossConfig.from_trl(object(), epsilon_hi=1)  # wrong

# the functions
assert_type(grpo_loss(*loss_args, config=config, run=run), LossOutput)
assert_type(grpo_loss(x, whole, ids, None, rewards, reference=(x, lm_head), beta=0.1, kl_estimator="full"), LossOutput)
grpo_loss(*loss_args, engine="lean")  # wrong
grpo_loss(*loss_args, run="lean")  # wrong
grpo_loss(*loss_args, reference=x)  # wrong
grpo_loss(*loss_args, epsilon_hi=1)  # wrong
assert_type(policy_loss_from_logps(ids, mask, rewards, entropies=ids, config=config), LossOutput)

scores = linear_logps(x, whole, ids, completion_mask=mask, temperature=0.9, extras=("is_top1", "mean_logits"), run=run)
assert_type(scores, Scores)
assert_type(scores.logps, Tensor)
assert_type(linear_logps(x, lm_head, ids, kept_ids=ids, on_missing_set="full", entropy="full"), Scores)
linear_logps(x, x, ids, entropy="whole")  # wrong
linear_logps(x, x, ids, extras="is_top1")  # wrong
linear_logps(x, [x], ids)  # wrong

assert_type(linear_divergence(x, whole, (x, lm_head), divergence="jsd", beta=0.5, entropy=True, completion_ids=ids), Scores)
linear_divergence(x, x, (x, x), divergence="js")  # wrong
linear_divergence(x, x, (x, x), teacher_bias=x)  # wrong
assert_type(topk_divergence(x, whole, ids, ids, tail=True), Scores)
topk_divergence(x, x, ids, ids, divergence="jsd")  # wrong


# objectives, advantages, names handed on
@token_level
def reinforce(tokens: TokenInputs) -> Tensor:
    return -tokens.advantages * tokens.logps


def kl(tokens: TokenInputs) -> Tensor:
    return tokens.ref_per_token_logps - tokens.logps  # wrong


def make_loss(backend: BackendName, engine: EngineName, **fields: Unpack[LossFields]) -> GRPOLoss:
    return GRPOLoss(run=Run(engine, backend), **fields)


def read_name(backend: str) -> GRPOLoss:
    return GRPOLoss(run=Run(backend=backend))  # wrong


assert_type(GRPOLoss(objective=reinforce)(*loss_args), LossOutput)
grpo_loss(*loss_args, objective=objectives.ipo)
grpo_loss(*loss_args, objective=partial(objectives.clip_cov, clip_cov_ratio=0.001))
make_loss("cuda", "auto")  # wrong
assert_type(advantages.group_advantages(rewards, 2, scale_rewards="none", std="population"), Tensor)
advantages.group_advantages(rewards, 2, scale_rewards="nothing")  # wrong
grpo_kernels.grpo_los(*loss_args)  # wrong
grpo_kernels.trl.patch_trl()
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, layout="trim", zero_advantage="skip")
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, logits_dtype="input")
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, reference=lm_head)
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, reference=(x, lm_head))  # wrong
assert_type(causal_lm_logps(nn.Linear(2, 2), ids, None, mask, run=run), Scores)
causal_lm_logps(nn.Linear(2, 2), ids, None, mask, run="lean")  # wrong
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, layout="pack")  # wrong
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, zero_advantage="drop")  # wrong
