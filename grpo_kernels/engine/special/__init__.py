"""What few calls need: teachers of K log-probabilities, kept sets, and the gradient by slices of the vocabulary."""

from __future__ import annotations
