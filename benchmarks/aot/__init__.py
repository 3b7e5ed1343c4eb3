"""Every Triton kernel compiled ahead of time, for devices that need not be there, and what came out checked.

``python -m benchmarks.aot`` prints a line for each kernel, variant and target, and fails if one breaks a rule of
`checks`. It must run without ``TRITON_INTERPRET``.
"""
