"""The evidence: what the head costs, ours and every peer's, measured in one run, by ``python -m benchmarks``."""
