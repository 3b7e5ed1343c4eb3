"""Compiled kernels without a GPU: their PTX executed in numpy, every access to memory watched."""
