"""The row kernels."""
