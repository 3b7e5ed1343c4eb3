"""Parts that few calls need: teachers of K log-probabilities, kept sets, slices of the vocabulary."""

from __future__ import annotations
