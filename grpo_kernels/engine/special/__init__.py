"""What few calls need: teachers of K log-probabilities, kept sets, slices of the vocabulary, scores without logits."""

from __future__ import annotations
