"""Launches of Triton kernels on CPU tensors, compiled for an absent GPU and executed here.

Inside of `emulated` whatever launches a kernel runs unchanged: launchers, engines, whole calls.
Triton must have been imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.aot.checks import compile_for
from benchmarks.aot.launches import Launch, describe
from grpo_kernels.backends import triton_rows
from grpo_kernels.backends.triton_rows import rows
from tests.emulator.lanes import Lanes
from tests.emulator.memory import Global, marked
from tests.emulator.ptx import Kernel, parse

MOST_LANES = 2**15  # that run at once


@dataclass
class Emulation:
    """What a launch becomes."""

    arch: str
    # Rows that kernels are told come before those of the tensors: pointers then lie before the
    # memory that there is, and offsets are as large as with all those rows.
    rows_before: int = 0
    launches: int = 0

    def launch(self, function: JITFunction, grid: Any, given: dict[str, Any]) -> None:
        """Run `function` on CPU tensors."""
        described = describe(function, given)
        kernel, threads, shared = self._compiled(described)
        programs = math.prod(grid(given) if callable(grid) else grid)
        values = list(_values(function, given, described.signature))
        memory = Global({name: x for name, x, _ in values if isinstance(x, Tensor)}, threads)
        first_program = 0
        if self.rows_before:
            blocks = -(-given["n"] // given["BLOCK_N"])
            assert self.rows_before % given["BLOCK_N"] == 0
            first_program = self.rows_before // given["BLOCK_N"] * (programs // blocks)
        words = [self._word(name, x, kind, memory, given.get("n")) for name, x, kind in values]
        words += [0] * (len(kernel.parameters) - len(words))  # Triton's own, which are not used
        arguments = dict(zip(kernel.parameters, words, strict=True))
        at_once, end = max(1, MOST_LANES // threads), first_program + programs
        for first in range(first_program, end, at_once):
            grid_of = {"programs": end, "first": first, "count": min(at_once, end - first)}
            grid_of |= {"threads": threads, "number": (first - first_program) * threads}
            Lanes(kernel, arguments, memory, shared, **grid_of).run()
        memory.copy_back()
        self.launches += 1

    def _word(self, name: str, value: Any, kind: str, memory: Global, n: int | None) -> int:
        """An argument as the kernel gets it; `n` is the number of rows."""
        if isinstance(value, Tensor):
            is_of_rows = self.rows_before and value.dim() > 0 and len(value) == n
            before = self.rows_before * value.stride(0) * value.itemsize if is_of_rows else 0
            return memory.pointer(name) - before
        if kind == "fp32":
            return int(struct.unpack("<I", struct.pack("<f", float(value)))[0])
        return int(value) + (self.rows_before if name == "n" else 0)

    def _compiled(self, launch: Launch) -> tuple[Kernel, int, int]:
        """The kernel, its threads, and the bytes of its shared memory."""
        of_launch = launch.signature, launch.constexprs, launch.attrs, launch.options
        key = (self.arch, launch.kernel.__name__, *map(repr, of_launch))
        if key not in _COMPILED:
            with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", _without_assembler):
                found = compile_for(launch, self.arch)
            about = found.metadata
            _COMPILED[key] = parse(found.asm["ptx"]), 32 * about.num_warps, about.shared
        return _COMPILED[key]


_COMPILED: dict[tuple[str, ...], tuple[Kernel, int, int]] = {}


def _without_assembler(*compilation: Any) -> tuple[str, str]:
    """A hook of Triton's compiler that leaves out what follows PTX, with a cache of its own."""
    if compilation:
        _backend, stages, *_options = compilation
        stages["cubin"] = lambda ptx, metadata: b""
    return "no assembler", "no assembler"


def _values(
    function: JITFunction, given: dict[str, Any], signature: dict[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """Name, value and type of what a compiled kernel takes, tuples one by one."""
    for param in function.params:
        kind, value = signature[param.name], given.get(param.name, param.default)
        if isinstance(kind, tuple):
            for i, (x, each) in enumerate(zip(value, kind, strict=True)):
                if each != "constexpr":
                    yield f"{param.name}[{i}]", x, each
        elif kind != "constexpr":
            yield param.name, value, kind


@contextmanager
def emulated(arch: str) -> Iterator[Emulation]:
    """Inside, Triton's kernels run on CPU tensors, as compiled for `arch`."""
    emulation = Emulation(arch)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        assert not args, f"{self.__name__}: launched with positional arguments"
        emulation.launch(self, grid, given)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(rows, "INTERPRETED", True))  # CPU tensors are taken
        for name, module in list(sys.modules.items()):
            if name.startswith(triton_rows.__name__) and hasattr(module, "arch_of"):
                stack.enter_context(mock.patch.object(module, "arch_of", return_value=arch))
        stack.enter_context(marked())
        yield emulation
