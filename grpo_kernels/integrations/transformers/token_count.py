"""`TokenCount`: number of tokens that the forwards of a trunk computed, out of those in the padded batch."""

from __future__ import annotations


class TokenCount:
    """Sequences and tokens of the calls with gradient: how many there were, and how many the trunk computed."""

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
        """Return the shares since the last call, by name, and begin again; empty if nothing was counted."""
        found = {name: count / total for name, (count, total) in self.pairs.items()}
        self.reset()
        return found
