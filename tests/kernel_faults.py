"""Faults planted in the sources and in compiled kernels, one at a time; the suite must notice each.

`python -m tests.kernel_faults [name ...]` plants those of `FAULTS` in a copy of the sources
(`planted`) and prints a table. It fails if a fault survives. Then, or where `compiled` is among the
names, `emulator.planted` plants faults in compiled kernels: in their barriers, masks and offsets.
What that cannot do is here: where rows are looked for. (Faults in the arithmetic that every backend
shares are in `support/wrong_candidates.py`; they are planted in a candidate, not in the sources.)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys

from tests.support.planted import Fault, survives

COMPILED = "compiled"  # stands for the faults in compiled kernels
KERNELS, ENGINE = "grpo_kernels/backends/triton_rows/", "grpo_kernels/engine/"

FAULTS = [
    # Each of these survived when it was planted first. A test was added then.
    Fault(
        "gradient stored where the logits are",
        KERNELS + "grad.py",
        "out_ptr + rows.to(tl.int64)[:, None] * stride_out_n",
        "out_ptr + rows.to(tl.int64)[:, None] * stride_n",
    ),
    Fault(
        "a slice's bias is the first's",
        ENGINE + "sweep.py",
        "row_bias(head.bias[columns], ",
        "row_bias(head.bias[: columns.stop and columns.stop - columns.start], ",
        ("tests/engine/test_slices.py", "-k", "equals"),
    ),
    Fault(
        "a teacher's rows of the first chunk",
        ENGINE + "sweep.py",
        "operand(of_teacher[part])",
        "operand(of_teacher[: part.stop - part.start])",
        ("tests/engine/test_mixed_products.py",),
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        help=f"faults whose name contains one of these, or {COMPILED!r}; all without",
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [
        f for f in FAULTS if not options.names or any(name in f.name for name in options.names)
    ]
    left = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for fault, (alive, line, seconds) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(
                f"{'SURVIVES' if alive else 'caught':8s}  {fault.name:48s} {seconds:5.0f} s  "
                f"{line}",
                flush=True,
            )
            left += [fault.name] if alive else []
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults caught", flush=True)
    if options.names and COMPILED not in options.names:
        return 1 if left or not chosen else 0
    unnoticed = subprocess.run([sys.executable, "-m", "tests.emulator.planted"]).returncode
    return 1 if left or unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
