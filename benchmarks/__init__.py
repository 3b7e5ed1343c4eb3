"""What the head costs, ours and every peer's, in one run: ``python -m benchmarks``."""
