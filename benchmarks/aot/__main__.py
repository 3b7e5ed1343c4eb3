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
    parser.add_argument("--quick", action="store_true", help="some that have each kernel and rule")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--triton", nargs="+", metavar="RELEASE", help="fetched into .venv")
    arguments = parser.parse_args()
    if is_interpreted():
        return 2
    if arguments.triton:
        command = [sys.executable, "-m", "benchmarks.aot", "--workers", str(arguments.workers)]
        command += ["--quick"] if arguments.quick else []
        of_releases = map(environment, arguments.triton)
        return max(subprocess.run(command, env=env).returncode for env in of_releases)
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
