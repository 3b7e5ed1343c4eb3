"""The error of a kernel that does what no kernel may do."""

from __future__ import annotations


class Fault(Exception):
    """An access to memory, or a step of several lanes together, that is wrong on a GPU whatever its result here."""
