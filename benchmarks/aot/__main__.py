"""``python -m benchmarks.aot``: compile all, print the table.

With ``--triton 3.6.0 3.9.0`` by each of these releases, one after the other.
Exit status: 1 if a rule is broken, 2 if it could not start.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.aot import in_processes, is_interpreted

FOLDER = Path(__file__).resolve().parents[2] / ".venv"  # where other releases of Triton are put


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a subset that has each kernel and rule")
    add("--target", action="append", metavar="ARCH", help="only this one; may be repeated")
    add("--kernel", action="append", metavar="NAME", help="only this one; may be repeated")
    add("--workers", type=int, default=2, metavar="N")
    add("--triton", nargs="+", metavar="RELEASE", help="by each of these; fetched into .venv")
    arguments = parser.parse_args()
    if is_interpreted():
        return 2
    if arguments.triton:
        return max([by_release(release, arguments) for release in arguments.triton])
    import triton

    from benchmarks.aot.matrix import HEADER, all_cases, line_of

    start = time.monotonic()
    cases = [
        case
        for case in all_cases(arguments.quick)
        if (not arguments.target or case.arch in arguments.target)
        and (not arguments.kernel or case.kernel in arguments.kernel)
    ]
    if not cases:
        print("error: nothing to compile: no such target or kernel", file=sys.stderr)
        return 2
    print(f"Triton {triton.__version__}, {len(cases)} kernels")
    print(HEADER)
    failures = 0
    for line, is_broken in in_processes(line_of, cases, arguments.workers):
        print(line, flush=True)
        failures += is_broken
    print(f"{failures} of {len(cases)} break a rule; {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


def by_release(release: str, arguments: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "benchmarks.aot", "--workers", str(arguments.workers)]
    command += ["--quick"] if arguments.quick else []
    command += [f"--target={x}" for x in arguments.target or ()]
    command += [f"--kernel={x}" for x in arguments.kernel or ()]
    return subprocess.run(command, env=environment(release)).returncode


def environment(release: str) -> dict[str, str]:
    if version("triton") == release:
        return dict(os.environ)
    folder = FOLDER / f"triton-{release}"
    stamp = folder / ".installed"
    if not stamp.exists():
        print(f"installing Triton {release} into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        options = ["--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, *options, f"triton=={release}"], check=True)
        stamp.touch()
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


if __name__ == "__main__":
    sys.exit(main())
