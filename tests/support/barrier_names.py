"""A row kernel compiled for sm_90 with the barrier by the name that Triton has today, and by the one that it gets.

Prints the kernel's barriers by each, and whether all other instructions are the same.
"""

from __future__ import annotations

import importlib
import json
import re

import torch
import triton.language as tl

from benchmarks.aot.checks import compile_for
from benchmarks.aot.launches import caught
from grpo_kernels.backends.interface import Chunk, LogitTransform, RowStats
from grpo_kernels.backends.triton_rows import barrier, grad
from grpo_kernels.backends.triton_rows.configs import RowConfig

DEBUG_LINE = re.compile(r"\s*(\.loc|\$L__tmp)")


def instructions() -> list[str]:
    """Of the gradient kernel with a soft-cap, in place."""
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    logits, chunk_rows = new(4, 9001), (new(4) for _ in range(4))
    chunk = Chunk(logits, new(4, dtype=torch.int64), LogitTransform(softcap=30.0))
    with caught() as launches:
        grad.launch_grad(
            chunk, RowStats(*chunk_rows), new(4), None, logits, RowConfig(1, 1024, 4, 1)
        )
    text: str = compile_for(launches[0], "sm_90").asm["ptx"].split(".section\t.debug")[0]
    return [line for line in text.splitlines() if not DEBUG_LINE.match(line)]


if __name__ == "__main__":
    old, new = (
        ("debug_barrier", "barrier")
        if hasattr(tl, "debug_barrier")
        else ("barrier", "debug_barrier")
    )
    by_old = instructions()
    setattr(tl, new, getattr(tl, old))
    delattr(tl, old)
    for module in (barrier, grad):
        importlib.reload(module)
    by_new = instructions()
    counts = [sum("bar.sync" in line for line in x) for x in (by_old, by_new)]
    print(json.dumps({"barriers": counts, "same": by_old == by_new}))
