"""Every Triton kernel compiled ahead of time, for devices that need not be there, and checked.

``python -m benchmarks.aot`` prints a line for each kernel, variant and target, and fails if one
breaks a rule of `checks`. It must run without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def is_interpreted() -> bool:
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return False
    why = "TRITON_INTERPRET is set, and interpreted kernels cannot be compiled"
    print(f"error: {why}", file=sys.stderr)
    return True


def in_processes(
    function: Callable[[Any], Any], cases: Sequence[Any], workers: int
) -> Iterator[Any]:
    """``function(case)`` of each case, in processes that compile everything anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(function, cases)
