r"""Floating-point operations of one GRPO step, computed; `test_bench_training.py` counts them on tiny models.

B sequences of P prompt and T completion tokens, S = P + T; m: entries of the body's matrices that a token is multiplied
with (`Sizes.matrices`); A: query heads times head size; L layers; a head of V x H. A multiply-add is 2 operations.

    forward     2 m B S + 4 A L B S^2
    update      6 m B S + c A L B S^2, c = 14 where the backward computes the scores anew (sdpa), else 12 (eager)
                with gradient checkpointing one forward more, less the products that torch then leaves out
    generation  2 m B (P + T - 1) + 2 V H B T + 4 A B (sum over layers of P^2 + sum_{t=1}^{T-1} min(window, P + t))
    head        8 V H N in TRL, (2 + 4 s) V H N here, of N = B T completion tokens a share s of which carries gradient

Attention counts the whole square, as torch's counter does and as a kernel computes it that is given a mask; a causal
kernel needs half. Every completion has its prompt computed for itself and its full length. On-policy, without a KL
term, as TRL's defaults are: no old and no reference log-probabilities. Optimizer, norms and softmax are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.training.models import MODELS, Sizes, sizes

TRL, OURS = "TRL 1.16", "grpo_kernels"
LIVE_SHARES = (1.0, 0.5)


@dataclass(frozen=True)
class Batch:
    """A step: `sequences` completions of `completion` tokens, `generations` of each prompt of `prompt` tokens."""

    sequences: int = 64
    prompt: int = 256
    completion: int = 1024
    generations: int = 8

    def __str__(self) -> str:
        return (
            f"{self.sequences} completions of {self.completion} tokens, {self.generations} of each prompt of "
            f"{self.prompt} tokens"
        )

    @property
    def tokens(self) -> int:
        """Completion tokens, N."""
        return self.sequences * self.completion

    @property
    def length(self) -> int:
        """Of a sequence, S."""
        return self.prompt + self.completion


def body(size: Sizes, batch: Batch, *, checkpointing: bool) -> int:
    """Forward and backward of the body."""
    products = 2 * size.matrices * batch.sequences * batch.length
    scores = 2 * size.attention * len(size.windows) * batch.sequences * batch.length**2  # one of the two products
    total = 3 * products + (7 if size.fused_attention else 6) * scores
    if checkpointing:
        total += products + 2 * scores - 2 * size.not_recomputed * batch.sequences * batch.length
    return total


def generation(size: Sizes, batch: Batch) -> int:
    """Prefill and decoding with a key-value cache, the head on one position a token."""
    positions = batch.length - 1
    keys = sum(
        batch.prompt**2 + sum(min(window or position, position) for position in range(batch.prompt + 1, batch.length))
        for window in size.windows
    )
    per_sequence = 2 * size.matrices * positions + 2 * size.vocab * size.hidden * batch.completion
    return batch.sequences * (per_sequence + 4 * size.attention * keys)


def head(size: Sizes, rows: int, trainer: str, *, live: float = 1.0) -> int:
    """The trainable head on `rows` rows, of which ours needs a gradient for the share `live`."""
    return round((8 if trainer == TRL else 2 + 4 * live) * size.vocab * size.hidden * rows)


def computed(models: Sequence[str] = tuple(MODELS), batch: Batch | None = None, *, toy: bool = False) -> list[dict]:
    """An entry for each model and trainer, with gradient checkpointing, TRL's default, and a gradient for every token.

    ``variants`` has the same without checkpointing, and ours with a gradient for half of the tokens.
    """
    batch = batch or Batch()
    return [_entry(sizes(name, toy=toy), batch, trainer) for name in models for trainer in (TRL, OURS)]


def conditions(batch: Batch) -> str:
    """Of the computed entries, in words."""
    return (
        f"{batch}; on-policy, no KL term, gradient checkpointing, a gradient for every completion token; attention as "
        "the whole square; TRL's head runs on completion tokens alone, as it does on a GPU"
    )


def _entry(size: Sizes, batch: Batch, trainer: str) -> dict[str, Any]:
    variants = [
        {"gradient_checkpointing": checkpointing, "live_share": live}
        | shares(_parts(size, batch, trainer, checkpointing=checkpointing, live=live))
        for checkpointing in (True, False)
        for live in (LIVE_SHARES if trainer == OURS else LIVE_SHARES[:1])
    ]
    parts = _parts(size, batch, trainer, checkpointing=True, live=1.0)
    return {
        **described(size),
        "kind": "computed",
        "trainer": trainer,
        "flops": parts,
        **shares(parts),
        "tokens": batch.tokens,
        "batch": asdict(batch),
        "variants": variants[1:],
    }


def _parts(size: Sizes, batch: Batch, trainer: str, *, checkpointing: bool, live: float) -> dict[str, int]:
    return {
        "head": head(size, batch.tokens, trainer, live=live),
        "body": body(size, batch, checkpointing=checkpointing),
        "generation": generation(size, batch),
    }


def described(size: Sizes) -> dict[str, Any]:
    """The fields of an entry that say which model it is about."""
    return {
        "model": size.name,
        "head": [size.vocab, size.hidden],
        "parameters": size.parameters,
        "matrices": size.matrices,
    }


def shares(parts: dict[str, float] | dict[str, int]) -> dict[str, float]:
    """The head's share of a step by its parts (seconds or operations), with and without generation."""
    total = sum(parts.values())
    return {
        "head_share": parts["head"] / total,
        "head_share_of_update": parts["head"] / (total - parts["generation"]),
    }
