"""Stored results, and the comparison with today's: ``python -m tests.stored``."""
