"""Stands in for Apple's package, version 25.1.1: the names and arguments that the adapter uses."""

from .linear_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

__version__ = "0"
__all__ = ["LinearCrossEntropyImpl", "linear_cross_entropy"]
