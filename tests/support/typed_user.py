"""A user's file, as type checkers see it; never run. Lines that end in ``# wrong`` are to be reported, no others."""

import dataclasses

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, assert_type

import grpo_kernels
from grpo_kernels import (
    GRPOLoss,
    LMHeadLogProb,
    LossConfig,
    LossOutput,
    TokenInputs,
    advantages,
    attach,
    grpo_loss,
    kept_set_logprob,
    linear_divergence,
    linear_divergence_with,
    linear_logprob,
    linear_logprob_with,
    objectives,
    policy_loss_from_logps,
    presets,
    token_level,
    topk_divergence,
    topk_divergence_with,
)
from grpo_kernels.integrations.transformers import causal_lm_loss
from grpo_kernels.typing import BackendName, EngineName, LossFields

x, ids, mask, rewards = torch.randn(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)
loss_args = (x, x, ids, mask, rewards)
flag = bool(mask.all())

# the module
loss_fn = GRPOLoss(loss_type="grpo", beta=0.04, epsilon_high=None, engine="one_pass")
out = loss_fn(x, x, ids, None, rewards, bias=None, old_per_token_logps=ids, num_items_in_batch=3.0)
assert_type(out, LossOutput)
assert_type(loss_fn.forward(x, x, ids, None, rewards), LossOutput)
assert_type(GRPOLoss(presets.DAPO, temperature=0.9)(*loss_args), LossOutput)
assert_type(out.loss, Tensor)
assert_type(out.metrics["kl"], Tensor)
assert_type(out.metrics.pairs["kl"], tuple[Tensor, Tensor])
out.loss.backward()
GRPOLoss(epsilon_hi=1)  # wrong
GRPOLoss(loss_type="DAPO")  # wrong
GRPOLoss(kl_estimator="k4")  # wrong
GRPOLoss(beta="0.04")  # wrong
GRPOLoss(engine="twopass")  # wrong
GRPOLoss(backend="cuda")  # wrong
loss_fn(x, x, ids, None)  # wrong
loss_fn(x, x, ids, None, rewards, old_logps=ids)  # wrong
print(loss_fn(*loss_args).los)  # wrong

# the config
config = LossConfig(loss_type="dapo", importance_sampling_level="sequence", vllm_importance_sampling_mode="token_mask")
assert_type(dataclasses.replace(config, loss_type="cispo"), LossConfig)
assert_type(LossConfig.from_trl(object(), loss_type="grpo"), LossConfig)
LossConfig(loss_type="DAPO")  # wrong
LossConfig(kl_estimator="k4")  # wrong
LossConfig(importance_sampling_level="sentence")  # wrong
LossConfig(vllm_importance_sampling_mode="mask")  # wrong
LossConfig(logits_dtype=torch.float32)  # wrong
LossConfig(epsilon_hi=1)  # wrong
LossConfig.from_trl(object(), epsilon_hi=1)  # wrong

# the functions
assert_type(grpo_loss(*loss_args, config=config, engine="auto", backend="cpp"), LossOutput)
grpo_loss(*loss_args, engine="twopass")  # wrong
grpo_loss(*loss_args, backend="cuda")  # wrong
grpo_loss(*loss_args, config={"beta": 0.1})  # wrong
assert_type(policy_loss_from_logps(ids, ids, mask, rewards, config=config), LossOutput)

assert_type(linear_logprob(x, x, ids), tuple[Tensor, Tensor])
assert_type(linear_logprob(x, x, ids, bias=x, mask=mask, entropy=True, temperature=0.9), tuple[Tensor, Tensor])
assert_type(linear_logprob(x, x, ids, entropy=False, backend="torch"), tuple[Tensor, None])
assert_type(linear_logprob(x, x, ids, entropy=flag), "tuple[Tensor, Tensor | None]")
linear_logprob(x, x, ids, engine="twopass")  # wrong
linear_logprob(x, x, ids, entropy=False)[1].sum()  # wrong
linear_logprob(x, x, ids, outputs=("entropy",))  # wrong
assert_type(linear_logprob_with(x, x, ids, outputs=("is_top1",)), dict[str, Tensor])
linear_logprob_with(x, x, ids, outputs=("top1",))  # wrong

assert_type(kept_set_logprob(x, x, ids, x), tuple[Tensor, Tensor])
assert_type(kept_set_logprob(x, x, ids, x, entropy=False, workspace_bytes=2**20), tuple[Tensor, None])
kept_set_logprob(x, x, ids, x, engine="one")  # wrong

assert_type(linear_divergence(x, x, x, x, divergence="jsd", beta=0.5, bias=x, teacher_bias=x), Tensor)
linear_divergence(x, x, x, x, divergence="js")  # wrong
linear_divergence(x, x, x, x, outputs=("entropy",))  # wrong
assert_type(linear_divergence_with(x, x, x, x, outputs=("entropy",)), dict[str, Tensor])
linear_divergence_with(x, x, x, x, outputs=("entropies",))  # wrong
assert_type(topk_divergence(x, x, ids, ids, tail=True, bias=x), Tensor)
topk_divergence(x, x, ids, ids, divergence="jsd")  # wrong
assert_type(topk_divergence_with(x, x, ids, ids, outputs=("student_mass",)), dict[str, Tensor])

# a head of the model's own
head = attach(nn.Linear(4, 7))
assert_type(head, LMHeadLogProb)
assert_type(head.loss(x, ids, mask, rewards, config=config, workspace_bytes=2**20), LossOutput)
assert_type(head.logprobs(x, ids), tuple[Tensor, Tensor])
assert_type(head.logprobs(x, ids, entropy=False, mask=mask), tuple[Tensor, None])
assert_type(head.divergence(x, x, nn.Linear(4, 7), divergence="forward_kl"), Tensor)
assert_type(head.divergence_with(x, x, nn.Linear(4, 7), outputs=("logps",), ids=ids), dict[str, Tensor])
assert_type(head.topk_divergence(x, ids, ids, outputs=("student_mass",)), dict[str, Tensor])
head.loss(x, ids, mask, rewards, engine="twopass")  # wrong
head.loss(x, ids, mask, rewards, bias=x)  # wrong
head.logprobs(x, ids, backend="cuda")  # wrong
head.divergence(x, x, nn.Linear(4, 7), divergence="js")  # wrong
attach(x)  # wrong


# objectives, advantages, names handed on
@token_level
def reinforce(tokens: TokenInputs) -> Tensor:
    return -tokens.advantages * tokens.logps


def kl(tokens: TokenInputs) -> Tensor:
    return tokens.ref_per_token_logps - tokens.logps  # wrong


def make_loss(backend: BackendName, engine: EngineName, **fields: Unpack[LossFields]) -> GRPOLoss:
    return GRPOLoss(backend=backend, engine=engine, **fields)


def read_name(backend: str) -> GRPOLoss:
    return GRPOLoss(backend=backend)  # wrong


assert_type(GRPOLoss(objective=reinforce)(*loss_args), LossOutput)
grpo_loss(*loss_args, objective=objectives.clip_cov(clip_cov_ratio=0.001))
grpo_loss(*loss_args, objective=lambda tokens: tokens.logps * 2)
make_loss("cuda", "auto")  # wrong
make_loss("auto", "auto", epsilon_hi=1)  # wrong
assert_type(advantages.group_advantages(rewards, 2, scale="none", std="population"), Tensor)
advantages.group_advantages(rewards, 2, scale="nothing")  # wrong
grpo_kernels.grpo_los(*loss_args)  # wrong
print(grpo_kernels.integration)  # wrong
grpo_kernels.integrations.trl.patch_trl()
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, layout="trim", zero_advantage="skip")
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, layout="pack")  # wrong
causal_lm_loss(nn.Linear(2, 2), loss_fn, ids, None, mask, rewards, zero_advantage="drop")  # wrong
engine_name: grpo_kernels.typing.EngineName = "lean"
assert_type(grpo_kernels.__version__, str)
