"""Compiled kernels without a GPU: the PTX that Triton made, executed in numpy, every access to memory watched."""
