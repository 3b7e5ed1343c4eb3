"""Stands in for Unsloth's package, which as a whole wants more than is there."""

raise ImportError("expected nobody to run the package's __init__")
