"""The head on a CPU: one loss, forward and backward, ours and every peer in one run, by ``python -m benchmarks.cpu``.

Providers are checked against float64, then timed in turn; the memory each needs is measured in a process of its own.
"""
