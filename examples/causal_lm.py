"""One training loop for any causal language model of transformers, whatever it does to its logits.

It trains three small random models: Gemma 2 (soft-cap), Granite (divides its logits) and Cohere
(multiplies its logits, tied head). The loop contains nothing about these differences, because
`causal_lm_loss` measures them. The reward is the share of tokens with a low id. At the end, the
script asserts that log-probabilities match the models' own logits, and that every reward rises.
"""

from __future__ import annotations

from typing import Any

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from grpo_kernels import GRPOLoss
from grpo_kernels.advantages import group_advantages
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss, describe_head

GROUP, PROMPTS, PROMPT, COMPLETION = 8, 4, 4, 8
LOW = 16  # ids below are rewarded
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build_models() -> dict[str, Any]:
    """Three families, random weights."""
    torch.manual_seed(0)
    cohere = {name: x for name, x in SHAPE.items() if name != "head_dim"}
    return {
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=5.0)),
        "granite": GraniteForCausalLM(GraniteConfig(**cohere, logits_scaling=0.5)),
        "cohere": CohereForCausalLM(CohereConfig(**cohere, logit_scale=3.0)),
    }


def train(model: Any, steps: int) -> tuple[float, float, float]:
    """(mean reward at the start, at the end, largest difference from the model's own
    log-probabilities)."""
    loss_fn = GRPOLoss(loss_type="dapo", epsilon_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    rewards, gap = [], 0.0
    for _ in range(0, steps, 2):
        prompts = torch.randint(LOW, SHAPE["vocab_size"], (PROMPTS, PROMPT)).repeat_interleave(
            GROUP, dim=0
        )
        ids = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=COMPLETION,
            do_sample=True,
            top_k=0,
        )
        completion = ids[:, PROMPT:]
        reward = (completion < LOW).float().mean(dim=1)
        rewards.append(reward.mean().item())
        attention_mask, mask = torch.ones_like(ids), torch.ones_like(completion)
        advantages = group_advantages(reward, num_generations=GROUP)
        with torch.no_grad():
            old = causal_lm_logps(model, ids, attention_mask, mask, loss_fn=loss_fn).logps
            gap = max(gap, (old - own_logprobs(model, ids)).abs().max().item())
        for _ in range(2):
            out = causal_lm_loss(
                model, loss_fn, ids, attention_mask, mask, advantages, old_per_token_logps=old
            )
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
    return rewards[0], rewards[-1], gap


def own_logprobs(model: Any, ids: Tensor) -> Tensor:
    """From the model's logits, all of them in memory."""
    logps = model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logps.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def main() -> None:
    steps = steps_of(__doc__, 40, "optimizer steps of each model, two a batch")

    worst, rises = 0.0, []
    for name, model in build_models().items():
        start, end, gap = train(model, steps)
        head = describe_head(model)
        print(
            f"{name:8s} logit scale {head.logit_scale:g}, soft-cap {head.final_logit_softcapping}: "
            f"reward {start:.3f} -> {end:.3f}"
        )
        worst, rises = max(worst, gap), [*rises, end - start]
    print(f"largest difference from the models' own log-probabilities: {worst:.1e}")
    assert worst < 1e-4, "the log-probabilities are not those of the models"
    assert min(rises) > 0.1, "a model's reward did not rise"


if __name__ == "__main__":
    main()
