"""`Shares`: what is logged of the rows and tokens that were computed."""

from __future__ import annotations

from torch import Tensor

Number = Tensor | int


class Shares:
    """Counts and their totals, by name, summed over calls. Numbers on a device stay there: only `take` waits for them.

    Attributes:
        pairs: name -> (count, total).
    """

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[Number, Number]] = {}

    def add(self, name: str, count: Number, total: Number) -> None:
        """Add `count` out of `total`."""
        counted, all_counted = self.pairs.get(name, (0, 0))
        self.pairs[name] = _sum(counted, count), _sum(all_counted, total)

    def take(self) -> dict[str, float]:
        """Return the shares since the last call, by name, and begin again; empty if nothing was counted."""
        pairs = {name: (int(count), int(total)) for name, (count, total) in self.pairs.items()}
        self.pairs.clear()
        if not any(total for _, total in pairs.values()):
            return {}
        return {name: count / max(1, total) for name, (count, total) in pairs.items()}


def _sum(total: Number, x: Number) -> Number:
    return total + (x.to(total.device) if isinstance(total, Tensor) and isinstance(x, Tensor) else x)
