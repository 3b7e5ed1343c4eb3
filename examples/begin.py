"""Called first by every example: prints what the example is, and leaves busy cores to others."""

from __future__ import annotations

import argparse
import logging
import os
import sys


def begin(doc: str) -> None:
    """Print the first line of `doc`, limit torch's threads, and show what the library logs.

    Called before torch is imported, which reads OMP_NUM_THREADS then. Whoever has set that has
    chosen.
    """
    sys.stdout.reconfigure(line_buffering=True)  # each line at once, in a pipe too
    print(doc.splitlines()[0])
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(free_cores()))
    print(
        f"threads: {threads} (OMP_NUM_THREADS); the first import of everything takes some seconds"
    )
    shown = logging.StreamHandler(sys.stdout)
    shown.setFormatter(logging.Formatter("grpo_kernels: %(message)s"))
    logger = logging.getLogger("grpo_kernels")
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)


def steps_of(doc: str, default: int, about: str) -> int:
    """The one option of the short examples, --steps."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=int, default=default, help=about)
    return parser.parse_args().steps


def free_cores() -> int:
    """The cores this process may use, less those that have been busy over the last minute; at least
    one."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    return max(1, min(ours, (os.cpu_count() or 1) - busy))
