"""Advantages and rewards."""
