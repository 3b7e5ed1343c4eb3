"""Triton's row kernels."""
