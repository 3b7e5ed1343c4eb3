"""Where a kernel is launched: the device, its tile, and why Triton may be unable to launch.

The table of tiles, `tuned.json`, is filled in beforehand (`benchmarks/tune.py`). Nothing is timed
at run time: the fastest tile would change from one run to the next, and so would the bits of the
results, which must not change. For the same reason a tile depends only on the vocabulary and the
family of the device, never on the number of rows. The first entry of a family that fits is used.
``"measured"`` says whether an entry was timed, and on which device.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton

TABLE = "tuned.json"
FAMILIES = ("sm_80", "sm_90", "sm_100", "gfx942", "interpreter", "default")
FAMILY_OF_ARCH = {"cpu": "interpreter", "sm_87": "sm_80", "sm_103": "sm_100", "gfx950": "gfx942"}
# "stats" and "fused" share entries, so that their statistics have the same bits
ROW_KERNELS = ("stats", "fused", "grad")
COLUMNS_OF_WARP = 4 * 32  # least columns of a tile per warp: a lane of four for each thread


@dataclass(frozen=True)
class RowConfig:
    """The tile of a row kernel: `block_n` rows by `block_v` columns, in four adjacent quarters."""

    block_n: int
    block_v: int
    num_warps: int
    num_stages: int

    def for_two_heads(self, vocab: int) -> RowConfig:
        """The same tile, hence the same bits, with twice the threads unless V is a multiple of 16.

        Elements are then read one by one, and two rows take more registers than a thread has. A
        tile of a small vocabulary has at most one column per thread: with more threads, several
        would hold the same column, and one would overwrite in place what another still reads.
        """
        has_columns = self.block_v >= 2 * COLUMNS_OF_WARP * self.num_warps
        return replace(self, num_warps=2 * self.num_warps) if vocab % 16 and has_columns else self

    def arguments(self) -> dict[str, Any]:
        """Launch arguments: the kernel's constants and the compiler's options."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_V": self.block_v,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }


def family(arch: str) -> str:
    """The family of `arch`: ``"interpreter"`` for ``"cpu"``, ``"default"`` if it is unknown."""
    return arch if arch in FAMILIES else FAMILY_OF_ARCH.get(arch, "default")


def row_config(kernel: str, vocab: int, arch: str) -> RowConfig:
    """The tile of one of `ROW_KERNELS` for logits (n, vocab) on `arch`, such as ``"sm_90"``."""
    for most, config in _entries(kernel, family(arch)):
        if most is None or vocab <= most:
            least = COLUMNS_OF_WARP * config.num_warps
            power_of_2 = 1 << max(0, vocab - 1).bit_length()
            return replace(config, block_v=min(config.block_v, max(power_of_2, least)))
    raise LookupError(f"{TABLE}: no tile of kernel {kernel!r} on {arch}")


def row_configs(kernel: str, family_name: str) -> list[RowConfig]:
    """All tiles that the table has for a kernel on a family of devices."""
    return list(dict.fromkeys(config for _, config in _entries(kernel, family_name)))


@functools.cache
def _entries(kernel: str, family_name: str) -> list[tuple[int | None, RowConfig]]:
    """The largest vocabulary (None: any) and the tile of each entry, in the table's order."""
    names = [f.name for f in fields(RowConfig)]
    return [
        (e["vocab_at_most"], RowConfig(**{name: e[name] for name in names}))
        for e in json.loads(resources.files(__package__).joinpath(TABLE).read_text())
        if e["family"] == family_name and kernel in e["kernels"]
    ]


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture, such as sm_90 or gfx942; the device's type if it is not a GPU."""
    if device.type != "cuda":
        return device.type
    with on(device):
        target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: kernels run on its stream, which must be the stream of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def launch_trouble() -> str | None:
    """Say why nothing can be launched, and the remedy; None if launching works.

    Before its first launch Triton compiles a module in C for the running release of Python. This
    check does the same, once per process, and Triton keeps the result.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # of any kind: a launch would fail with it too
        first_line = str(error).strip().partition("\n")[0]
        return _missing(error) or f"Triton cannot start: {type(error).__name__}: {first_line}"
    return None


def _missing(error: Exception) -> str | None:
    """Say what is missing for compiling; None if `error` has another cause."""
    if "C compiler" in str(error):
        return (
            "Triton needs a C compiler, and there is no gcc or clang: install gcc (Debian, Ubuntu: "
            "apt-get install gcc), or set CC"
        )
    scheme = sysconfig.get_default_scheme()
    headers = Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )
    if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").is_file():
        return (
            f"Triton needs Python's headers, and there is no Python.h in {headers}: install them "
            "(Debian, Ubuntu: apt-get install python3-dev)"
        )
    return None
