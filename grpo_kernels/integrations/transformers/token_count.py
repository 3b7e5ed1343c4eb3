"""What the forwards of a trunk computed, of what the padded batch holds: `TokenCount`."""

from __future__ import annotations


class TokenCount:
    """Sequences and tokens of forwards with gradient: what the trunk computed, of what the padded batch holds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again at 0."""
        self.sequences = self.live = self.positions = self.computed = self.gradient = 0

    def add(self, live: int, sequences: int, positions: int, computed: int, gradient: int) -> None:
        """Count one call: sequences with gradient, all sequences; padded positions, computed ones, those with graph."""
        self.live += live
        self.sequences += sequences
        self.positions += positions
        self.computed += computed
        self.gradient += gradient

    @property
    def pairs(self) -> dict[str, tuple[int, int]]:
        """Name -> (count, total); empty if nothing was counted."""
        if self.positions == 0:
            return {}
        return {
            "sequences/gradient": (self.live, self.sequences),
            "tokens/computed": (self.computed, self.positions),
            "tokens/gradient": (self.gradient, self.positions),
        }

    def take(self) -> dict[str, float]:
        """The shares since the last time, by name; empty if nothing was counted."""
        found = {name: count / total for name, (count, total) in self.pairs.items()}
        self.reset()
        return found
