"""``python -m benchmarks.real.expectations``: what trainings of Qwen3 may expect, by the arithmetic
of `grpo_kernels.commands.estimate` (docs/results.md)."""

from __future__ import annotations

import itertools
import math

from grpo_kernels.commands.estimate import MODELS, Batch, Training, factors, whole

MEAN = 512  # tokens of a completion
GENERATION = 0.5  # share of stock TRL's step, an assumption
# name: one group in a micro-batch, with vLLM?; the least: equally long, no equal rewards
BATCHES = {
    "prompt 256, without vLLM": (Batch(256, 256, MEAN, 2 * MEAN, 0.25), False),
    "prompt 256, with vLLM": (Batch(256, 256, MEAN, 2 * MEAN, 0.25), True),
    "prompt 2,048, without vLLM": (Batch(2048, 2048, MEAN, 2 * MEAN, 0.25), False),
    "prompt 2,048, with vLLM": (Batch(2048, 2048, MEAN, 2 * MEAN, 0.25), True),
    "the least": (Batch(256, 256, MEAN, MEAN), False),
}


def lines() -> list[str]:
    """The table: the training without generation, and in brackets the whole step."""
    table = [["training", *BATCHES], ["---"] * (1 + len(BATCHES))]
    for model, lora, beta in itertools.product(MODELS.values(), (True, False), (0, 0.04)):
        gains = [
            math.prod(factors(model, [batch], Training(lora=lora, kl=beta > 0, vllm=vllm)).values())
            for batch, vllm in BATCHES.values()
        ]
        name = f"{model.name}, {'LoRA' if lora else 'all parameters'}, beta {beta}"
        table.append([name, *(f"{x:.1f} ({whole(x, GENERATION):.1f})" for x in gains)])
    return [f"| {' | '.join(row)} |" for row in table]


if __name__ == "__main__":
    print("\n".join(lines()))
