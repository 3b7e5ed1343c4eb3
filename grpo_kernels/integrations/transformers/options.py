"""Options that say what the trunk computes of a batch: `TrunkOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_kernels.base.choices import PaddingMode, ZeroAdvantage, choices
from grpo_kernels.config import LossConfig


@dataclass(frozen=True)
class TrunkOptions:
    """What the trunk computes of a batch; docs/training-step.md.

    Attributes:
        zero_advantage: what becomes of sequences in which no token has a gradient (advantage 0 without KL term and
            entropy bonus; masked whole). ``"score"``: they run without graph, for the metrics. ``"skip"``: they do not
            run; metrics are those of the other sequences. ``"train"``: as all others.
        padding: ``"trim"``: a forward is as wide as its longest sequence. ``"split"``: sequences sorted by length, in
            forwards of least cost. ``"free"``: sequences one after the other, kept apart by their position ids.
            ``"keep"``: the padded columns.
        shared_prompts: True to compute a prompt once for all of its completions in the batch.
        forward_overhead: cost of one more forward that ``"split"`` reckons with, in tokens.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("zero_advantage", "padding", "shared_prompts", "forward_overhead")

    zero_advantage: ZeroAdvantage = "score"
    padding: PaddingMode = "trim"
    shared_prompts: bool = False
    forward_overhead: int = 128

    def __post_init__(self) -> None:
        _check_choice("zero_advantage", self.zero_advantage, ZeroAdvantage)
        _check_choice("padding", self.padding, PaddingMode)
        if not isinstance(self.shared_prompts, bool):
            raise TypeError(f"shared_prompts: expected a bool, got {self.shared_prompts!r}")
        overhead = self.forward_overhead
        if isinstance(overhead, bool) or not isinstance(overhead, int) or overhead < 0:
            raise ValueError(f"forward_overhead: expected tokens, an int >= 0, got {overhead!r}")
        if self.shared_prompts and self.padding == "keep":
            raise ValueError("shared_prompts: expected padding other than 'keep', got True with padding='keep'")


def check_skip(config: LossConfig) -> None:
    """Raise unless the gradient of live sequences is the same if the others are not scored.

    Raises:
        ValueError: the loss reads the entropies or log-probabilities of all sequences.
    """
    expected = "zero_advantage: expected 'score' or 'train'"
    if config.top_entropy_quantile < 1.0:
        raise ValueError(f"{expected} with top_entropy_quantile, which is one of all sequences, got 'skip'")
    if config.corrects_sampling:
        raise ValueError(f"{expected} where the loss makes the importance sampling ratio, got 'skip'")


def _check_choice(name: str, value: Any, allowed: Any) -> None:
    if value not in choices(allowed):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices(allowed)))}, got {value!r}")
