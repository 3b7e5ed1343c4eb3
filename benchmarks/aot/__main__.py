"""``python -m benchmarks.aot``: compile all, print the table.

Exit status: 1 if a rule is broken, 2 if it could not start.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.aot import in_processes, is_interpreted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some that have each kernel and rule")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if is_interpreted():
        return 2
    import triton

    from benchmarks.aot.matrix import HEADER, all_cases, line_of

    start, cases = time.monotonic(), all_cases(arguments.quick)
    print(f"Triton {triton.__version__}, {len(cases)} kernels", HEADER, sep="\n")
    failures = 0
    for line, is_broken in in_processes(line_of, cases, arguments.workers):
        print(line, flush=True)
        failures += is_broken
    print(f"{failures} of {len(cases)} break a rule; {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
