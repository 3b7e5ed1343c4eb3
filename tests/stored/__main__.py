"""Compare today's results with the stored ones: ``python -m tests.stored [GROUP ...]``.

Every case of `cases.py` is computed in a process of its own whose results do not depend on the
processor: one thread, torch's and MKL's plainest instructions, no fused multiply-add in the C
library. They must equal the stored results by bits. With another release of torch than the stored
one a few units in the last place are allowed.

``--write`` stores the results of ``--library DIR``, the checkout that is computed (default: this
one).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = {"plain": FOLDER / "results.npz", "triton": FOLDER / "triton.npz"}
# with another release of torch, whose products and functions may round otherwise: units in the last
# place of a result's largest number
ULPS = 64.0

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
    command = [sys.executable, str(FOLDER / "cases.py"), str(output), *groups]
    env = environment(library, triton=triton)
    subprocess.run(command, env=env, cwd=library, check=True)


def read(path: Path) -> tuple[dict[str, str], Stored]:
    """The releases that a file was made with, and its results."""
    with np.load(path) as file:
        about = json.loads(file["index"].tobytes())
        flat = {}
        for kind in set(file.files) - {"index"}:
            planes = np.ascontiguousarray(file[kind].T).reshape(-1)
            flat[kind] = torch.from_numpy(planes).view(getattr(torch, kind))
    places: Counter[str] = Counter()
    found: Stored = {}
    for case, results in about.pop("cases").items():
        found[case] = {}
        for name, x in results.items():
            if isinstance(x, str):
                found[case][name] = x
                continue
            kind, shape = x
            size = int(np.prod(shape))
            found[case][name] = flat[kind][places[kind] : places[kind] + size].view(shape)
            places[kind] += size
    return about, found


def difference(old: Any, new: Any) -> float:
    """Distance of two results in units in the last place of the largest number; inf: not alike."""
    if isinstance(old, str) or isinstance(new, str):
        return 0.0 if type(old) is type(new) and old == new else torch.inf
    if old.dtype != new.dtype or old.shape != new.shape:
        return torch.inf
    if not old.is_floating_point():
        return 0.0 if torch.equal(old, new) else torch.inf
    if torch.equal(bits(old), bits(new)):
        return 0.0
    x, y = old.double(), new.double()
    finite = x.isfinite()
    others = (z[~finite].nan_to_num() for z in (x, y))
    if not torch.equal(finite, y.isfinite()) or not torch.equal(*others):
        return torch.inf
    largest = x[finite].abs().max().clamp(min=torch.finfo(old.dtype).tiny)
    off = float((x[finite] - y[finite]).abs().max() / (largest * torch.finfo(old.dtype).eps))
    return max(off, 1e-9)  # zeros of another sign differ, too


def bits(x: Tensor) -> Tensor:
    """The bits of floating-point numbers; those of every NaN are the same."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(kind)


def compare(
    old: Stored, new: Stored, *, other_torch: bool = False
) -> tuple[Counter[str], list[str]]:
    """Count the cases by how they compare, and describe those that are off."""
    counts, off = Counter[str](), []
    for case in {**old, **new}:
        before, after = old.get(case), new.get(case)
        if before is None or after is None or before.keys() != after.keys():
            keys = sorted(set(before or ()) ^ set(after or ()))
            trouble = (after or {}).get("raises") or ", ".join(keys)
            off.append(f"{case}: not the results of before: {trouble}")
            continue
        units = {name: difference(x, after[name]) for name, x in before.items()}
        worst = max(units, key=lambda name: units[name], default="")
        if not any(units.values()):
            counts["equal by bits"] += 1
        elif other_torch and units[worst] <= ULPS:
            counts["near"] += 1
        else:
            number = sum(map(bool, units.values()))
            off.append(f"{case}: {worst} is {units[worst]:.3g} units off, {number} results")
    return counts + Counter(off=len(off)), off


def check(library: Path = ROOT, groups: list[str] | None = None) -> tuple[list[str], list[str]]:
    """Compute and compare; return what was found, and what is off."""
    counts, off, notes = Counter[str](), [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in FILES.items():
            if kind == "triton" and importlib.util.find_spec("triton") is None:
                notes.append("Triton is not installed: its cases were NOT compared")
                continue
            output = Path(folder) / path.name
            compute(library, output, groups or [], triton=kind == "triton")
            (then, old), (now, new) = read(path), read(output)
            other = then["torch"] != now["torch"]
            if other:
                said = f"stored with torch {then['torch']}, now {now['torch']}"
                notes.append(f"{said}: {ULPS:g} ulps are near")
            if groups:
                old = {case: x for case, x in old.items() if case.split("/")[0] in groups}
            found, wrong = compare(old, new, other_torch=other)
            counts, off = counts + found, off + wrong
    return [", ".join(f"{number} {name}" for name, number in counts.items()), *notes], off


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
    found, off = check(library, arguments.groups)
    print("\n".join([*off[:40], *([f"... {len(off) - 40} more"] if off[40:] else []), "", *found]))
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
