"""The C++ row kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

`python -m tests.sanitize` builds csrc/ with both and runs, with that library loaded in the usual
one's place:

- the tests of the row kernels, on every instruction set that the processor has,
- 2,000 random cases (`test_random_rows`) on each of them,
- the suites of the whole engine on the "cpp" backend.

`--quick` runs 200 random cases and some of the row tests. A finding ends its process, with a
report. Torch allocates with posix_memalign, which AddressSanitizer replaces when it is loaded
first: a tensor's memory ends where its numbers do. That this works is tried before anything else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_kernels.backends import Chunk, Coefficients, LogitTransform
from grpo_kernels.backends.cpp_rows import CppRows, build
from tests.support.row_cases import ISAS

ROOT = Path(__file__).parents[1]
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS += ("-fno-omit-frame-pointer", "-O1", "-g")
# the second, or exceptions thrown by what was loaded before it are not seen
PRELOADED = ("libasan.", "libstdc++.")
OPTIONS = {
    # Python frees little at its end; pytest handles signals
    "ASAN_OPTIONS": "detect_leaks=0:handle_segv=2",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1])\n"
LOAD += "isa = torch.ops.grpo_kernels_cpp.isa\n"
TRY = LOAD + "from tests.sanitize import try_findings; try_findings(); print(isa(''))"
TEST = LOAD + "import pytest; isa(sys.argv[2]); sys.exit(pytest.main(sys.argv[3:]))"
# stderr is left alone, where a report goes that the process does not survive
ARGUMENTS = ("-q", "-p", "no:cacheprovider", "--capture=sys", "--no-header", "-r", "fE")
BUILDING = ("test_cpp_build.py", "test_cpp_exp.py")  # what they try they build themselves
SOME = ("-k", "TestCpp or Double or not_exist or refus or random")
OTHERS = ("-k", "not every_instruction_set")  # which ends with the best one
FACTOR, SECONDS = 10, 3600


class NotSeen(Exception):
    """A sanitizer that cannot be had, or that misses what it should see."""


def build_sanitized(folder: Path) -> tuple[Path, dict[str, str]]:
    """The library, and the environment that a process needs to load it."""
    library = folder / "sanitized.so"
    build.compile_library(library, FLAGS)
    linked = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    # libasan.so.8 => /lib/libasan.so.8 (0x...)
    paths = {x.split()[0]: x.split()[2] for x in linked.splitlines() if len(x.split()) > 2}
    found = [path for start in PRELOADED for x, path in paths.items() if x.startswith(start)]
    if len(found) < len(PRELOADED):
        wanted = " and ".join(PRELOADED)
        raise NotSeen(f"expected a library linked with {wanted}, as GCC makes it, got:\n{linked}")
    return library, {**os.environ, **OPTIONS, "LD_PRELOAD": ":".join(found)}


def read_too_far() -> None:
    """The last row ends one number before the tensor does."""
    ids = torch.zeros(3, dtype=torch.int64)
    CppRows().stats(Chunk(_cut_short(torch.zeros(3, 17)), ids, LogitTransform()), entropy=True)


def write_too_far() -> None:
    x, ids = torch.zeros(3, 17), torch.zeros(3, dtype=torch.int64)
    stats = CppRows().stats(Chunk(x, ids, LogitTransform()), entropy=True)
    out = _cut_short(torch.zeros(3, 17, dtype=torch.bfloat16))
    CppRows().grad(Chunk(x, ids, LogitTransform()), stats, Coefficients(stats.logps), out)


def read_unaligned() -> None:
    ids = torch.frombuffer(bytearray(33), dtype=torch.int64, offset=1, count=4)
    CppRows().stats(Chunk(torch.zeros(4, 17), ids, LogitTransform()), entropy=True)


def _cut_short(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - x.itemsize)
    return x


FINDINGS: dict[Callable[[], None], str] = {
    read_too_far: "READ of size 4",
    write_too_far: "WRITE of size 2",
    read_unaligned: "load of misaligned address",
}


def try_findings() -> None:
    """Do each of `FINDINGS` in a process of its own, which should not survive it."""
    for finding in FINDINGS:
        child = os.fork()
        if child == 0:
            finding()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(finding.__name__, "lives" if status == 0 else "dies", flush=True)


def check_findings(library: Path, environment: dict[str, str]) -> str:
    """Raise unless the sanitizers find what they should, with the best instruction set here."""
    command = [sys.executable, "-c", TRY, str(library)]
    options = {"capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run(command, cwd=ROOT, env=environment, **options)
    for finding, words in FINDINGS.items():
        if words not in done.stderr or f"{finding.__name__} dies" not in done.stdout:
            raise NotSeen(f"{finding.__name__} was not seen:\n{done.stdout}{done.stderr[-2000:]}")
    return done.stdout.split()[-1]


def suites(best: str, *, quick: bool) -> list[tuple[str, list[str]]]:
    """Instruction sets and pytest's arguments."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    engine = [str(x.relative_to(ROOT)) for x in files if "every_backend" in x.read_text()]
    of_rows = [x for x in files if x.match("test_cpp_*") and x.name not in BUILDING]
    rows = [str(x.relative_to(ROOT)) for x in of_rows]
    if quick:
        return [("auto", [*rows, *SOME])]
    others = [(isa, [*rows, *OTHERS]) for isa in ISAS[: ISAS.index(best)]]
    return [("auto", rows), *others, ("auto", [*engine, "-k", "cpp"])]


def main(arguments: list[str] | None = None) -> int:
    about, quick = __doc__.split("\n\n")[0], "200 random cases and some of the row tests"
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=about)
    parser.add_argument("--quick", action="store_true", help=quick)
    quick = parser.parse_args(arguments).quick
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        library, environment = build_sanitized(Path(folder))
        print(f"built in {time.perf_counter() - begun:.0f} s", flush=True)
        best = check_findings(library, environment)
        seen = "reads and writes too far, and unaligned ones, are seen"
        print(f"{seen}; instruction sets up to {best}", flush=True)
        environment["GRPO_KERNELS_RANDOM_FACTOR"] = "1" if quick else str(FACTOR)
        runs, failed = suites(best, quick=quick), 0
        for isa, chosen in runs:
            print(f"{isa}: {' '.join(chosen)}", flush=True)
            command = [sys.executable, "-c", TEST, str(library), isa, *ARGUMENTS, *chosen]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=SECONDS
            )
            failed += done.returncode != 0
    print(f"{failed} of {len(runs)} runs failed, in {time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
