"""One-digit sums: problems to train on, others to test with, and the reward."""

from __future__ import annotations

import random
import re
from typing import Any

from datasets import Dataset

PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
HELD_OUT = random.Random(0).sample(PAIRS, 21)


def problems(pairs: list[tuple[int, int]]) -> Dataset:
    """Conversations that ask for the sum of each pair, and the answers."""
    system = {"role": "system", "content": "Answer with one number."}
    return Dataset.from_list(
        [
            {
                "prompt": [system, {"role": "user", "content": f"Calculate {a} + {b}."}],
                "answer": a + b,
            }
            for a, b in pairs
        ]
    )


def training_problems(count: int, seed: int) -> Dataset:
    """`count` problems, none of them held out."""
    draw, pairs = random.Random(seed), [x for x in PAIRS if x not in HELD_OUT]
    return problems([draw.choice(pairs) for _ in range(count)])


def is_right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 for each completion whose last number is the answer, else 0."""
    found = [
        re.findall(r"-?\d+", x[-1]["content"] if isinstance(x, list) else x) for x in completions
    ]
    return [float(x[-1:] == [str(want)]) for x, want in zip(found, answer, strict=True)]
