"""Tile shapes, warps and pipeline stages of every kernel, from a table: `tuned.json`.

The table was filled in beforehand (`benchmarks/tune.py`). Nothing is timed at run time: the winner
would change from one run to the next, and with it the results' bits, which have to be the same in
every run. For the same reason a configuration follows from the vocabulary and the device's family
alone, never from the number of rows. The first entry of a family that fits is taken. ``"measured"``
says whether an entry was timed, and on which device.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

TABLE = "tuned.json"
FAMILIES = ("sm_80", "sm_90", "sm_100", "gfx942", "interpreter", "default")
FAMILY_OF_ARCH = {"cpu": "interpreter", "sm_87": "sm_80", "sm_103": "sm_100", "gfx950": "gfx942"}
Entry = dict[str, Any]

COLUMNS_OF_WARP = 4 * 32  # of a step, at least: a lane of four columns for each thread

ROW_KERNELS = (
    "stats",
    "fused",
    "grad",
)  # the first two share their entries, so that the statistics' bits agree


@dataclass(frozen=True)
class RowConfig:
    """A step of a row kernel takes `block_n` rows by `block_v` columns of logits, in four tiles side by side."""

    block_n: int
    block_v: int
    num_warps: int
    num_stages: int

    def for_two_heads(self, vocab: int) -> RowConfig:
        """Return the same tile, and so the same bits; with twice the threads if the vocabulary is no multiple of 16.

        Elements are then read one by one, and two rows take more registers than a thread has. A step of a small
        vocabulary has one column for each thread at most: with more threads, several would hold the same column, and
        one would write in place what another still reads.
        """
        has_columns = self.block_v >= 2 * COLUMNS_OF_WARP * self.num_warps
        return replace(self, num_warps=2 * self.num_warps) if vocab % 16 and has_columns else self

    def arguments(self) -> dict[str, Any]:
        """Launch arguments: the kernel's constants, and how to compile it."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_V": self.block_v,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }


def family(arch: str) -> str:
    """Return the family whose entries `arch` takes: ``"interpreter"`` for ``"cpu"``, ``"default"`` if it is unknown."""
    return arch if arch in FAMILIES else FAMILY_OF_ARCH.get(arch, "default")


def row_config(kernel: str, vocab: int, arch: str) -> RowConfig:
    """The tile of one of `ROW_KERNELS` for logits (n, vocab) on `arch`, such as ``"sm_90"`` or ``"cpu"``."""
    for e in _entries(kernel, family(arch)):
        if _within(e["vocab_at_most"], vocab):
            config = _row_config(e)
            least = COLUMNS_OF_WARP * config.num_warps
            block_v = min(config.block_v, max(_next_power_of_2(vocab), least))
            return replace(config, block_v=block_v)
    raise LookupError(f"{TABLE}: no tile of kernel {kernel!r} on {arch}")


def row_configs(kernel: str, family_name: str) -> list[RowConfig]:
    """All tiles that the table has for a kernel on a family of devices."""
    return list(dict.fromkeys(_row_config(e) for e in _entries(kernel, family_name)))


@functools.cache
def _table() -> list[Entry]:
    table: list[Entry] = json.loads(resources.files(__package__).joinpath(TABLE).read_text())
    return table


def _entries(kernel: str, family_name: str) -> list[Entry]:
    return [e for e in _table() if e["family"] == family_name and kernel in e["kernels"]]


def _row_config(entry: Entry) -> RowConfig:
    return RowConfig(**{f.name: entry[f.name] for f in fields(RowConfig)})


def _within(bound: int | None, x: int) -> bool:
    return bound is None or x <= bound


def _next_power_of_2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()
