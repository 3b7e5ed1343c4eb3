"""Heads: modules and adapters."""
