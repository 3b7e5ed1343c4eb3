"""Compare today's results with the stored ones: ``python -m tests.stored [GROUP ...]``.

Every case of `cases.py` is computed in a process of its own whose results do not depend on the
processor: one thread, torch's and MKL's plainest instructions, no fused multiply-add in the C
library. They must equal the stored results by bits; those of another release of torch are not
compared.

``--write`` stores the results of ``--library DIR``, the checkout whose `grpo_kernels` is computed
(default: this one).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.on_device import same_bits

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = {"plain": FOLDER / "results.pt.xz", "triton": FOLDER / "triton.pt.xz"}
# the library first, which may be of another checkout than the cases
WRITE = "import sys, grpo_kernels; sys.path.insert(0, sys.argv.pop(1))\n"
WRITE += "from tests.stored import cases; cases.write(*sys.argv[1:])"

Stored = dict[str, dict[str, Any]]  # case -> name -> tensor or text


def environment(library: Path, *, triton: bool) -> dict[str, str]:
    """What makes the results the same on every x86-64 processor."""
    kept = {k: x for k, x in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    if triton:
        from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

        chosen = [x for x in __cpu_dispatch__ if __cpu_features__.get(x)]
        kept |= {"TRITON_INTERPRET": "1", "NPY_DISABLE_CPU_FEATURES": " ".join(chosen)}
    return kept | {
        "PYTHONPATH": str(library),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
    }


def compute(library: Path, output: Path, groups: list[str], *, triton: bool) -> None:
    """Compute the cases with the checkout `library`, and write the results to `output`."""
    command = [sys.executable, "-c", WRITE, str(ROOT), str(output), *groups]
    env = environment(library, triton=triton)
    subprocess.run(command, env=env, cwd=library, check=True)


def read(path: Path) -> tuple[str, Stored]:
    """The release of torch that a file was made with, and its results."""
    found = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return found["torch"], found["cases"]


def compare(old: Stored, new: Stored) -> tuple[int, list[str]]:
    """Count the cases that are equal, and describe those that are off."""
    off = []
    for case in {**old, **new}:
        before, after = old.get(case, {}), new.get(case, {})
        names = [x for x in {**before, **after} if not same_bits(before.get(x), after.get(x))]
        if names:
            off.append(f"{case}: {', '.join(names)}; raises {after.get('raises', 'nothing')}")
    return len({**old, **new}) - len(off), off


def check(
    library: Path = ROOT, groups: list[str] | None = None
) -> tuple[int, list[str], list[str]]:
    """Compute and compare; return how many cases are equal, what was found, and what is off."""
    equal, off, notes = 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in FILES.items():
            if kind == "triton" and importlib.util.find_spec("triton") is None:
                notes.append("Triton is not installed: its cases were NOT compared")
                continue
            output = Path(folder) / path.name
            compute(library, output, groups or [], triton=kind == "triton")
            (then, old), (now, new) = read(path), read(output)
            if then != now:
                notes.append(f"{kind}: stored with torch {then}, now {now}: NOT compared")
                continue
            if groups:
                old = {case: x for case, x in old.items() if case.split("/")[0] in groups}
            found, wrong = compare(old, new)
            equal, off = equal + found, off + wrong
    return equal, [f"{equal} equal by bits, {len(off)} off", *notes], off


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stored", description=__doc__.split("\n")[0]
    )
    parser.add_argument("groups", nargs="*", help="first words of the cases' names; none: all")
    parser.add_argument("--library", type=Path, default=ROOT, help="the checkout that is computed")
    parser.add_argument("--write", action="store_true", help="store the results")
    arguments = parser.parse_args()
    library = arguments.library.resolve()
    if arguments.write:
        for kind, path in FILES.items():
            compute(library, path, [], triton=kind == "triton")
            size = path.stat().st_size / 2**20
            print(f"wrote {path.relative_to(ROOT)}: {len(read(path)[1])} cases, {size:.2f} MiB")
        return
    equal, found, off = check(library, arguments.groups)
    print("\n".join([*off[:40], *([f"... {len(off) - 40} more"] if off[40:] else []), "", *found]))
    sys.exit(bool(off) or not equal)


if __name__ == "__main__":
    main()
