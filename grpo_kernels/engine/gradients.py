"""Which gradients a call computes, and what a sweep has found of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NeedsGrad:
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_u: bool = False
    lora_b: bool = False

    @property
    def head(self) -> bool:
        """True if the head, or an adapter on it, trains."""
        return self.weight or self.bias or self.lora_u or self.lora_b

    def factors(self) -> list[tuple[bool, bool]]:
        """For each of `Head.factors`."""
        return [(self.hidden, self.weight), (self.lora_u, self.lora_b)]


@dataclass(frozen=True)
class Gradients:
    """Gradients of one sweep in the accumulator's dtype, neither scaled nor rounded yet; None where not wanted."""

    hidden: Tensor | None = None  # (n, H), a row for each row of the sweep
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)
    lora_u: Tensor | None = None  # (n, r), a row for each row of the sweep
    lora_b: Tensor | None = None  # (V, r)

    def apply(self, change: Callable[[Tensor], Tensor]) -> Gradients:
        """`change` of each gradient that is there."""
        return Gradients(*(None if x is None else change(x) for x in self))

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.hidden, self.weight, self.bias, self.lora_u, self.lora_b))
