"""Stands in for Unsloth's package, version 2026.10.9, which as a whole wants more than is there."""

raise ImportError("expected nobody to run the package's __init__")
