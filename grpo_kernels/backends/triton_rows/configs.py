"""Tile shapes, warps and pipeline stages of every kernel, from a table: `tuned.json`.

The table was filled in beforehand (`benchmarks/tune.py`); nothing is timed at run time: the winner would change from
one run to the next, and with it the results' bits, which have to be the same in every run. For the same reason a
configuration follows from the vocabulary, the width of the hidden states, their dtype and the device's family alone:
never from the number of rows. The first entry of a family that fits is taken. ``"measured"`` says whether an entry was
timed, and on which device.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

import torch

TABLE = "tuned.json"
FAMILIES = ("sm_80", "sm_90", "sm_100", "gfx942", "interpreter", "default")
FAMILY_OF_ARCH = {"cpu": "interpreter", "sm_87": "sm_80", "sm_103": "sm_100", "gfx950": "gfx942"}
Entry = dict[str, Any]

REGISTERS = 65536  # of an NVIDIA multiprocessor
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
    maxnreg: int | None = (
        None  # registers per thread of the fused kernel for two heads; None: the assembler decides
    )

    def for_two_heads(self, vocab: int) -> RowConfig:
        """Return the same tile, and so the same bits; with twice the threads if the vocabulary is no multiple of 16.

        Elements are then read one by one, and two rows take more registers than a thread has. A step of a small
        vocabulary has one column for each thread at most: with more threads, several would hold the same column, and
        one would write in place what another still reads.
        """
        has_columns = self.block_v >= 2 * COLUMNS_OF_WARP * self.num_warps
        return replace(self, num_warps=2 * self.num_warps) if vocab % 16 and has_columns else self

    def arguments_with_register_limit(self) -> dict[str, Any]:
        """Return `arguments`, with `maxnreg` if it is set: by itself the assembler takes fewer registers and spills."""
        if self.maxnreg is None:
            return self.arguments()
        return {
            **self.arguments(),
            "maxnreg": min(self.maxnreg, REGISTERS // (32 * self.num_warps)),
        }

    def arguments(self) -> dict[str, Any]:
        """Launch arguments: the kernel's constants, and how to compile it."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_V": self.block_v,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "enable_fp_fusion": False,
        }


@dataclass(frozen=True)
class DotConfig:
    """A program of the scoring kernel goes through one of `splits` parts of the vocabulary.

    Its tiles: (block_n, block_h) of hidden states and (block_v, block_h) of the weight.
    """

    block_n: int
    block_v: int
    block_h: int
    splits: int
    num_warps: int
    num_stages: int
    use_tma: bool

    def tiles_per_split(self, vocab: int) -> int:
        """Return the number of tiles of `block_v` ids in a part of the vocabulary; the last part may have fewer."""
        return _ceil_div(_ceil_div(vocab, self.block_v), self.splits)


def family(arch: str) -> str:
    """Return the family whose entries `arch` takes: ``"interpreter"`` for ``"cpu"``, ``"default"`` if it is unknown."""
    return arch if arch in FAMILIES else FAMILY_OF_ARCH.get(arch, "default")


def row_config(kernel: str, vocab: int, arch: str) -> RowConfig:
    """The tile of one of `ROW_KERNELS` for logits (n, vocab) on `arch`, such as ``"sm_90"`` or ``"cpu"``."""
    for e in _entries("rows", family(arch)):
        if kernel in e["kernels"] and _within(e["vocab_at_most"], vocab):
            config = _row_config(e)
            least = COLUMNS_OF_WARP * config.num_warps
            block_v = min(config.block_v, max(_next_power_of_2(vocab), least))
            maxnreg = (
                None if arch.startswith("gfx") else config.maxnreg
            )  # AMD's compiler knows no such option
            return replace(config, block_v=block_v, maxnreg=maxnreg)
    raise LookupError(f"{TABLE}: no tile of kernel {kernel!r} on {arch}")


def dot_config(
    hidden_width: int,
    vocab: int,
    dtype: torch.dtype,
    arch: str,
    *,
    softcap: bool = False,
    aligned: bool = True,
) -> DotConfig:
    """The tiles of the scoring kernel for hidden (n, hidden_width) and weight (vocab, hidden_width) of `dtype`.

    Args:
        arch: as for `row_config`.
        softcap: True with a soft-cap, which takes registers and so has tiles of its own.
        aligned: True if the weight is aligned (`dot.is_aligned`); else loads of single elements take registers, too.
    """
    for e in _dot_entries(8 * dtype.itemsize, family(arch), softcap=softcap, aligned=aligned):
        if _within(e["hidden_width_at_most"], hidden_width) and _within(e["vocab_at_most"], vocab):
            return _dot_config(e, vocab)
    raise LookupError(f"{TABLE}: no tiles of the scoring kernel for {dtype} on {arch}")


def row_configs(kernel: str, family_name: str) -> list[RowConfig]:
    """All tiles that the table has for a kernel on a family of devices."""
    return list(
        dict.fromkeys(
            _row_config(e) for e in _entries("rows", family_name) if kernel in e["kernels"]
        )
    )


def dot_configs(
    operand_bits: int, family_name: str, vocab: int, *, softcap: bool, aligned: bool
) -> list[DotConfig]:
    """All tiles that the table has for the scoring kernel on a family of devices."""
    entries = _dot_entries(operand_bits, family_name, softcap=softcap, aligned=aligned)
    return list(dict.fromkeys(_dot_config(e, vocab) for e in entries))


def splits_of(vocab: int, block_v: int, at_most: int) -> int:
    """Return the number of parts of a vocabulary, `at_most` or fewer; each has one tile of `block_v` ids or more."""
    tiles = _ceil_div(vocab, block_v)
    return _ceil_div(tiles, _ceil_div(tiles, at_most))


@functools.cache
def _table() -> dict[str, list[Entry]]:
    table: dict[str, list[Entry]] = json.loads(
        resources.files(__package__).joinpath(TABLE).read_text()
    )
    return table


def _entries(kind: str, family_name: str) -> list[Entry]:
    return [e for e in _table()[kind] if e["family"] == family_name]


def _dot_entries(
    operand_bits: int, family_name: str, *, softcap: bool, aligned: bool
) -> list[Entry]:
    wanted = {"operand_bits": operand_bits, "softcap": softcap, "aligned": aligned}
    return [
        e
        for e in _entries("dot", family_name)
        if all(e[name] in (x, None) for name, x in wanted.items())
    ]


def _row_config(entry: Entry) -> RowConfig:
    return RowConfig(**{f.name: entry[f.name] for f in fields(RowConfig) if f.name in entry})


def _dot_config(entry: Entry, vocab: int) -> DotConfig:
    splits = splits_of(vocab, entry["block_v"], entry["splits_at_most"])
    return DotConfig(
        splits=splits, **{f.name: entry[f.name] for f in fields(DotConfig) if f.name != "splits"}
    )


def _within(bound: int | None, x: int) -> bool:
    return bound is None or x <= bound


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()
