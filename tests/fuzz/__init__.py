"""Attacks on the library, seeded and bounded by time: `python -m tests.fuzz`."""
