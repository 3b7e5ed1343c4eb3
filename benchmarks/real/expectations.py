"""``python -m benchmarks.real.expectations``: what trainings of Qwen3 may expect, by the arithmetic
of `grpo_kernels.commands.estimate` (docs/results.md)."""

from __future__ import annotations

import itertools
import math

from benchmarks.tables import markdown
from grpo_kernels.commands.estimate import MODELS, Batch, Training, factors, whole

MEAN = 512  # tokens of a completion
GENERATION = 0.5  # share of stock TRL's step, an assumption
# name: one group in a micro-batch, with vLLM?; worst case: equally long, no equal rewards
BATCHES = {
    "prompt 256, without vLLM": (Batch(256, 256, MEAN, 2 * MEAN, 0.25), False),
    "prompt 256, with vLLM": (Batch(256, 256, MEAN, 2 * MEAN, 0.25), True),
    "prompt 2,048, without vLLM": (Batch(2048, 2048, MEAN, 2 * MEAN, 0.25), False),
    "prompt 2,048, with vLLM": (Batch(2048, 2048, MEAN, 2 * MEAN, 0.25), True),
    "worst case": (Batch(256, 256, MEAN, MEAN), False),
}


def lines() -> list[str]:
    """The table: the training without generation, and in brackets the whole step."""
    rows = []
    for model, lora, beta in itertools.product(MODELS.values(), (True, False), (0, 0.04)):
        name = f"{model.name}, {'LoRA' if lora else 'all parameters'}, beta {beta}"
        row = {"training": name}
        for batch_name, (batch, vllm) in BATCHES.items():
            training = Training(lora=lora, kl=beta > 0, vllm=vllm)
            gain = math.prod(factors(model, [batch], training).values())
            row[batch_name] = f"{gain:.1f} ({whole(gain, GENERATION):.1f})"
        rows.append(row)
    return markdown(rows)


if __name__ == "__main__":
    print("\n".join(lines()))
