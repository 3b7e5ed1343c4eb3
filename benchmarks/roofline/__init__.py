"""The row kernels' machine code taken apart, without a GPU: what an element costs, and what that says of their time.

``python -m benchmarks.roofline`` compiles some configurations for sm_90, counts the instructions of their loops, holds
them against the pins in `pins.json`, and writes docs/roofline.md. It must run without ``TRITON_INTERPRET``.
"""
