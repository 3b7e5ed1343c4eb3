"""``python -m benchmarks.aot.roofline``: count, hold against the pins, print the table and write docs/roofline.md.

Exit status: 1 if a count is not as pinned, 2 if it could not start.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.aot.costs import Taken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.roofline", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only hold the counts against the pins; writes nothing")
    parser.add_argument("--update", action="store_true", help="write the pins anew, and with them the document")
    parser.add_argument("--case", metavar="TEXT", help="check only those whose kernel and variant contain this")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("error: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    if arguments.update and arguments.check:
        print("error: --check writes nothing, --update does", file=sys.stderr)
        return 2
    if arguments.case and not arguments.check:
        print("error: --case goes with --check: what is written has all cases", file=sys.stderr)
        return 2
    from benchmarks.aot.cases import cases, taken_at

    places = [i for i, case in enumerate(cases()) if (arguments.case or "") in f"{case.kernel} {case.variant}"]
    if not places:
        print("error: nothing to compile: no such case", file=sys.stderr)
        return 2
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # for the workers: everything is compiled anew
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(taken_at, places))
    failures = [result for result in results if isinstance(result, str)]
    counted = [result for result in results if not isinstance(result, str)]
    print("".join(f"{failure}\n" for failure in failures), end="")
    broken = len(failures) + (0 if arguments.update else _compare(counted))
    if not arguments.check and not failures:
        _write(counted, with_pins=arguments.update)
    print(f"{broken} of {len(places)} kernels are not as pinned; {time.monotonic() - start:.0f} s")
    return 1 if broken else 0


def _compare(counted: list[Taken]) -> int:
    """How many differ from their pins; says how."""
    import triton

    from benchmarks.aot.costs import differences, read

    pins = read()
    broken = 0
    for taken in counted:
        try:
            pinned = pins.find(taken.kernel, taken.variant)
        except LookupError as error:
            said = [str(error)]
        else:
            said = differences(pinned, taken, pinned_triton=pins.triton, triton=triton.__version__)
        broken += bool(said)
        print(f"{taken.name:40} {'; '.join(said) or 'as pinned'}", flush=True)
    return broken


def _write(counted: list[Taken], *, with_pins: bool) -> None:
    import triton

    from benchmarks.aot import costs, report

    now = costs.Pins(triton.__version__, tuple(counted))
    if with_pins:
        costs.write(now)
    text = report.report(now)
    report.FILE.write_text(text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
