"""Parts that few calls need: teachers of K log-probabilities, kept sets, slices of the vocabulary, `score_dot`."""

from __future__ import annotations
