"""The benchmarks' own tests."""
