"""What memory is estimated for, and what an estimate says."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Size:
    """A batch and a head."""

    rows: int  # N: positions, B * T
    vocab: int  # V
    hidden: int  # H
    dtype: torch.dtype = torch.float32  # of hidden states and weight
    frozen: bool = False  # the weight wants no gradient
    score: bool = False  # nothing does
    softcap: bool = False  # of the logits
    masked: float = 0.0  # share of the positions that do not count
    length: int = 1024  # T: tokens of a sequence
    workspace_bytes: int | None = None  # as in `grpo_loss`

    @property
    def itemsize(self) -> int:
        """Bytes of a number of hidden states and weight."""
        return self.dtype.itemsize

    @property
    def counted(self) -> int:
        """Positions that the mask counts."""
        return max(1, round(self.rows * (1.0 - self.masked)))

    @property
    def returned(self) -> int:
        """Bytes of the gradients that a step leaves behind."""
        if self.score:
            return 0
        return (self.rows + (0 if self.frozen else self.vocab)) * self.hidden * self.itemsize

    def describe(self) -> str:
        """In one line."""
        name = str(self.dtype).removeprefix("torch.")
        kind = "log-probabilities alone" if self.score else "frozen head" if self.frozen else "trainable head"
        words = [f"N {self.rows:,}", f"V {self.vocab:,}", f"H {self.hidden:,}", name, kind]
        if self.softcap:
            words.append("soft-cap")
        if self.masked:
            words.append(f"{self.masked:.0%} of the positions masked")
        return f"{', '.join(words)}; MiB on a CPU"

    def notes(self) -> list[str]:
        """What the figures are."""
        missing = "it has no soft-cap" if self.softcap else "it has no log-probabilities to give" if self.score else ""
        return [
            "extra: the most that is allocated beyond the inputs and the gradients returned",
            "with gradients: the same, and the gradients of hidden states and weight",
            "TRL's is of its path for a CPU; on a GPU its kernels work in place, which takes less",
            *([f"Liger is left out: {missing}"] if missing else []),
        ]


@dataclass(frozen=True)
class Need:
    """What a provider allocates beyond its inputs, in bytes."""

    name: str
    peak: int  # the most at once, returned gradients included
    returned: int  # of those
    kept: int  # of what is still there when the forward ends, for the backward; but for a few numbers a token

    @property
    def extra(self) -> int:
        """The peak beyond the gradients that are returned: what a benchmark measures."""
        return self.peak - self.returned
