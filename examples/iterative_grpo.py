"""Iterative GRPO with a reward model that learns (https://arxiv.org/abs/2402.03300, algorithm 1).

Each iteration copies the policy into the reference model. Each of its steps does the following:
sample from the current policy, keep its log-probabilities as the old ones, score with the reward
model, and take mu optimizer steps on the GRPO loss with its KL term. Then the reward model trains
on these samples, with labels, and on 10% of earlier ones. At the end, the script asserts that
answers improve, and that the reward model still tells right answers from wrong ones.
"""

from __future__ import annotations

import copy
import random

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import Rollout, accuracy, evaluate, hidden_states, sample, take_step, warm_model
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from grpo_kernels import grpo_loss, linear_logps, presets
from grpo_kernels.advantages import group_advantages
from grpo_kernels.rewards import compute_rewards


class RewardModel:
    """A classifier of prompt + completion that starts from the policy's body."""

    def __init__(self, policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        config = copy.deepcopy(policy.config)
        config.num_labels = 1
        self.model, self.tokenizer = Qwen3ForSequenceClassification(config), tokenizer
        self.model.model.load_state_dict(policy.model.state_dict())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)
        self.history: list[tuple[str, float]] = []

    def train(self, rollout: Rollout, steps: int, batch: int = 64, replayed: float = 0.1) -> float:
        """Optimizer steps on `rollout`, the share `replayed` of each batch from earlier ones;
        returns the last loss."""
        texts = [
            problem.prompt + text
            for problem, text in zip(rollout.problems, rollout.texts, strict=True)
        ]
        new = list(zip(texts, accuracy(rollout).tolist(), strict=True))
        old = round(replayed * batch) if self.history else 0
        for _ in range(steps):
            rows = random.choices(new, k=batch - old) + random.choices(self.history or new, k=old)
            read, labels = zip(*rows, strict=True)
            inputs = self.tokenizer(read, return_tensors="pt", padding=True, padding_side="right")
            logits = self.model(**inputs).logits[:, 0]
            loss = functional.binary_cross_entropy_with_logits(logits, torch.tensor(labels))
            take_step(self.optimizer, loss)
        self.history += new
        return loss.item()

    def score(self, rollout: Rollout) -> torch.Tensor:
        """The probability of being right, (B,)."""
        prompts = [problem.prompt for problem in rollout.problems]
        return compute_rewards(
            [self.model], prompts, rollout.texts, processing_classes=self.tokenizer
        )[:, 0].sigmoid()


def main() -> None:
    steps = steps_of(__doc__, 6, "steps of each of the three iterations")

    random.seed(0)
    policy, tokenizer, problems = warm_model()
    before = evaluate(policy, tokenizer, problems * 4)
    reward_model = RewardModel(policy, tokenizer)
    start = sample(policy, tokenizer, problems, num_generations=16)
    reward_model.train(start, steps=150)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    for iteration in range(3):
        reference = copy.deepcopy(policy).requires_grad_(False)
        for step in range(steps):
            rollout = sample(policy, tokenizer, problems[step % 4 :: 4], num_generations=8)
            batch = rollout.completion_ids, rollout.completion_mask
            given = {}
            with torch.no_grad():
                for name, model in (
                    ("old_per_token_logps", policy),
                    ("ref_per_token_logps", reference),
                ):
                    states, head = hidden_states(model, rollout), model.lm_head
                    given[name] = linear_logps(
                        states, head, batch[0], completion_mask=batch[1], entropy=False
                    ).logps
            scores = reward_model.score(rollout)
            advantages = group_advantages(scores, num_generations=8)
            for _ in range(2):  # mu
                states, head = hidden_states(policy, rollout), policy.lm_head
                out = grpo_loss(states, head, *batch, advantages, config=presets.GRPO, **given)
                take_step(optimizer, out.loss)
            reward_loss = reward_model.train(rollout, steps=4)
        print(
            f"iteration {iteration + 1}: right {accuracy(rollout).mean():.3f}, scored "
            f"{scores.mean():.3f}, "
            f"KL to the reference {out.metrics['kl'].item():.4f}, loss of the reward model "
            f"{reward_loss:.3f}"
        )
    after = evaluate(policy, tokenizer, problems * 4)
    right, scores = accuracy(start).bool(), reward_model.score(start)
    told = (scores[right].mean() - scores[~right].mean()).item()
    print(
        f"right answers: {before:.3f} before, {after:.3f} after; score of right less wrong ones "
        f"{told:.3f}"
    )
    assert after > before + 0.1, "the share of right answers did not rise"
    assert told > 0.2, "the reward model cannot tell right answers from wrong ones"


if __name__ == "__main__":
    main()
