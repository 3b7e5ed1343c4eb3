"""``python -m benchmarks.real.expectations``: what a training of Qwen3 may expect, by arithmetic
(docs/real.md).

Matrix products of a step of stock TRL over those of ours, for one group in a micro-batch; attention
is left out. A token of the body (the model below the head) takes 1 in the forward and 2 in the
backward, with LoRA 1; the head takes what docs/costs.md says. Stock TRL computes prompt and
completion padded to the longest. Ours computes the prompt once and each completion's own tokens,
and a backward for the groups with unequal rewards alone.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

VOCABULARY, GROUP = 151_936, 8
MEAN = 512  # tokens of a completion
GENERATION = 0.5  # share of stock TRL's step, an assumption


class Model(NamedTuple):
    """Sizes of a model of Qwen3, from its configuration."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    queries: int  # heads, of 128
    keys: int

    @property
    def body(self) -> int:
        """Weights of the body's matrices."""
        attention = 2 * self.hidden * 128 * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


MODELS = (Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8), Model("Qwen3-8B", 36, 4096, 12288, 32, 8))


class Batch(NamedTuple):
    """A micro-batch of one group, and how many of the groups have a gradient."""

    name: str
    prompt: int  # tokens
    vllm: bool = False
    longest: int = 2 * MEAN  # tokens of the longest completion
    equal: float = 0.25  # share of the groups whose rewards are equal


BATCHES = (
    Batch("prompt 256, without vLLM", 256),
    Batch("prompt 256, with vLLM", 256, vllm=True),
    Batch("prompt 2,048, without vLLM", 2048),
    Batch("prompt 2,048, with vLLM", 2048, vllm=True),
    Batch(
        "the least", 256, longest=MEAN, equal=0.0
    ),  # all completions equally long, no equal rewards
)


def gain(model: Model, batch: Batch, *, lora: bool, kl: bool) -> float:
    """Stock TRL's products over ours, without generation.

    With a KL term every sequence has a gradient, and the reference runs too. With vLLM, TRL scores
    the completions once more before the loss, and ours does not.
    """
    backward, (of_stock, of_ours, with_gradient) = (1, (6, 2, 2)) if lora else (2, (8, 2, 4))
    live = 1.0 if kl else 1.0 - batch.equal
    counted = GROUP * MEAN
    body, head = 2 * model.body, model.hidden * VOCABULARY * counted
    stock = body * GROUP * (batch.prompt + batch.longest) * (1 + backward + kl + batch.vllm)
    stock += head * (of_stock + 2 * kl + 2 * batch.vllm)
    ours = body * (batch.prompt + counted) * (1 + backward * live + kl)
    ours += head * (of_ours + with_gradient * live + 2 * kl)
    return stock / ours


def whole(gained: float, generation: float = GENERATION) -> float:
    """Gain of the whole step, if generation takes a share of stock TRL's time."""
    return 1 / (generation + (1 - generation) / gained)


def lines() -> list[str]:
    """The table: the training without generation, and in brackets the whole step."""
    table = [["training", *(batch.name for batch in BATCHES)], ["---"] * (1 + len(BATCHES))]
    for model, lora, beta in itertools.product(MODELS, (True, False), (0, 0.04)):
        gains = [gain(model, batch, lora=lora, kl=beta > 0) for batch in BATCHES]
        name = f"{model.name}, {'LoRA' if lora else 'all parameters'}, beta {beta}"
        table.append([name, *(f"{x:.1f} ({whole(x):.1f})" for x in gains)])
    return [f"| {' | '.join(row)} |" for row in table]


if __name__ == "__main__":
    print("\n".join(lines()))
