"""Samples from a policy of coarser arithmetic, corrected for inside the loss: no forward of the model beforehand.

The sampler is the model in bfloat16, as an inference engine would run it, and reports log-probabilities of its own. The
ratio of the two is an importance weight (truncated at 3). TRL scores the completions once more before the loss to get
it; here the loss makes it of the log-probabilities that it has anyway. The claims at the end: the gradients are the
same, a forward of the model is saved (counted), and training works.
"""

from __future__ import annotations

import argparse
import copy

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, warm_model
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import LossConfig, grpo_loss, linear_logprob
from grpo_kernels.advantages import group_advantages

INSIDE = LossConfig(
    vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_truncate"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
    steps = parser.parse_args().steps

    model, tokenizer, problems = warm_model()
    head, parameters = model.lm_head, list(model.parameters())
    before = evaluate(model, tokenizer, problems * 4)
    sampler = copy.deepcopy(model).bfloat16()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    worst = 0.0
    for step in range(1, steps + 1):
        sampler.load_state_dict(model.state_dict())
        first = step * 16 % len(problems)
        rollout = sample(sampler, tokenizer, problems[first : first + 16], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        with torch.no_grad():  # as an inference engine reports them
            sampled = linear_logprob(
                hidden_states(sampler, rollout), sampler.lm_head, ids, mask=mask
            ).logps
        advantages = group_advantages(accuracy(rollout), num_generations=8)

        with FlopCounterMode(display=False) as one_forward:
            out = grpo_loss(
                hidden_states(model, rollout),
                head,
                ids,
                mask,
                advantages,
                sampling_per_token_logps=sampled.float(),
                config=INSIDE,
            )
            inside = torch.autograd.grad(out.loss, parameters)
        with FlopCounterMode(display=False) as two_forwards:
            with torch.no_grad():
                old = linear_logprob(
                    hidden_states(model, rollout), head, ids, mask=mask, entropy=False
                ).logps
            ratio = torch.exp(old - sampled.float()).clamp(max=3.0)
            states = hidden_states(model, rollout)
            given = grpo_loss(states, head, ids, mask, advantages, importance_sampling_ratio=ratio)
            beforehand = torch.autograd.grad(given.loss, parameters)

        largest = max(x.abs().max().item() for x in beforehand)
        worst = max(
            worst,
            *(
                (x - y).abs().max().item() / largest
                for x, y in zip(inside, beforehand, strict=True)
            ),
        )
        for parameter, gradient in zip(parameters, inside, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step % 8 == 0:
            m = out.metrics
            print(
                f"step {step:3d}  right {accuracy(rollout).mean():.3f}  {out.engine}  ratio "
                f"{m['sampling/importance_sampling_ratio/min'].item():.3f} to "
                f"{m['sampling/importance_sampling_ratio/max'].item():.3f}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    saved = 1 - one_forward.get_total_flops() / two_forwards.get_total_flops()
    print(
        f"right answers: {before:.3f} before, {after:.3f} after; gradients differ by {worst:.1e} of the largest entry"
    )
    print(f"FLOPs of a step saved: {saved:.0%}")
    assert out.engine == "one_pass", f"expected the one-pass engine, got {out.engine}"
    assert worst < 1e-5, "the gradients differ"
    assert 0.15 < saved < 0.3, "expected a forward less of about four"
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
