"""Stored results of commit eb864c1, and the comparison with today's: ``python -m tests.stored``."""
