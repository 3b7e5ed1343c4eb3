"""Faults planted in compiled kernels, one at a time: does the emulator notice?

``python -m tests.emulator.planted [--arch sm_90] [kernel ...]`` takes out each barrier, moves the
bound of each comparison of integers by one, either way, and cuts each 64-bit product or shift to 32
bits. A fault is noticed if a launch is refused or if results have other bits. It has no effect if
no lane ever has another value by it. Exit status 1 if another fault stays unnoticed without a
reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
from torch import Tensor

from tests.emulator.launch import emulated
from tests.emulator.ptx import Fault, Instruction, Kernel
from tests.emulator.scenes import SCENES, Scene

ARCHES = ("sm_80", "sm_90")
BOUND = re.compile(r"setp\.(?:lt|le|gt|ge|lo|ls|hi|hs)(?:\.\w+)?\.([su](?:16|32|64))")
PRODUCT = re.compile(
    r"(mul\.lo\.[sub]64|mul\.wide\.[su]32|mad\.wide\.[su]32|mad\.lo\.[su]64|shl\.b64)"
)
# Faults that have an effect and that nothing can notice: patterns of the kernel's and the fault's
# name, and the reason.
REASONS = (
    (
        "fused_kernel",
        r"barrier [^(]*\((grad\.py:\d+ @ )?fused\.py:\d+\)$",
        "reductions with barriers of their own lie between the reads and the writes",
    ),
    (
        ".*",
        r".*setp.* moved by \+1 \(standard.py",
        "a lane more of a reduction adds up what nobody reads",
    ),
    (
        ".*",
        r".*setp.* moved by \+1 \(transform.py",
        "a row past the last repeats it: the same numbers are stored again",
    ),
)


@dataclass(frozen=True)
class Planted:
    """A fault, and the same kernel with a trap where the fault changes a value."""

    name: str
    kernel: Kernel
    probe: Kernel | None = None


def faults(kernel: Kernel) -> Iterator[Planted]:
    """All that are planted in `kernel`."""
    yield from barriers_taken_out(kernel)
    yield from bounds_moved(kernel)
    yield from offsets_cut(kernel)


def barriers_taken_out(kernel: Kernel) -> Iterator[Planted]:
    """Each by itself."""
    places = [place for place, step in enumerate(kernel.code) if step.opcode == "bar.sync"]
    for number, place in enumerate(places):
        step = kernel.code[place]
        where = " @ ".join((step.line, *step.callers))
        name = f"barrier {number} of {len(places)} taken out ({where})"
        yield Planted(name, rewritten(kernel, {place: []}))


def bounds_moved(kernel: Kernel) -> Iterator[Planted]:
    """All comparisons of one kind that a line of the source became, by one up and by one down."""
    lines: dict[tuple[str, str], list[int]] = {}
    for place, step in enumerate(kernel.code):
        if BOUND.fullmatch(step.opcode):
            lines.setdefault((step.line, step.opcode), []).append(place)
    for (line, opcode), places in lines.items():
        for by in (1, -1):
            steps = {place: _moved(kernel.code[place], by) for place in places}
            probes = {place: _probed(kernel.code[place], moved) for place, moved in steps.items()}
            name = f"{len(places)} {opcode} moved by {by:+d} ({line})"
            yield Planted(name, rewritten(kernel, steps), rewritten(kernel, probes))


def _moved(step: Instruction, by: int) -> list[Instruction]:
    """A comparison with a bound that is larger by `by`."""
    found = BOUND.fullmatch(step.opcode)
    assert found is not None
    kind, (d, a, b, *rest) = found[1], step.operands
    bound = f"%moved{kind[1:]}_0"
    add = Instruction(f"add.{kind}", (bound, b, str(by)), step.guard, step.negated, step.line)
    return [add, replace(step, operands=(d, a, bound, *rest))]


def _probed(step: Instruction, moved: list[Instruction]) -> list[Instruction]:
    """The comparison, and a trap where the moved one differs."""
    add, compare = moved
    d = step.operands[0]
    return [
        add,
        replace(compare, operands=("%probe_1", *compare.operands[1:])),
        step,
        Instruction("xor.pred", ("%probe_0", "%probe_1", d), step.guard, step.negated),
        *_trap(step),
    ]


def offsets_cut(kernel: Kernel) -> Iterator[Planted]:
    """Each product or shift of 64 bits by itself: what comes out is the low half, with its sign."""
    for place, step in enumerate(kernel.code):
        if PRODUCT.fullmatch(step.opcode):
            name, _, kind = step.opcode.rpartition(".")
            d, a, b, *addend = step.operands
            product = Instruction(
                f"{name.replace('mad', 'mul')}.{kind}", ("%whole_0", a, b), line=step.line
            )
            wide = "s64" if name.endswith("wide") else kind
            cut = [
                product,
                Instruction("cvt.u32.u64", ("%half_0", "%whole_0")),
                Instruction("cvt.s64.s32", ("%cut_0", "%half_0")),
            ]
            sum_or_move = (
                Instruction(f"add.{wide}", (d, "%cut_0", addend[0]))
                if addend
                else Instruction("mov.b64", (d, "%cut_0"))
            )
            end = replace(sum_or_move, guard=step.guard, negated=step.negated, line=step.line)
            differs = Instruction("setp.ne.s64", ("%probe_0", "%cut_0", "%whole_0"))
            planted = rewritten(kernel, {place: [*cut, end]})
            yield Planted(
                f"{step.opcode} {', '.join(step.operands)} cut to 32 bits ({step.line})",
                planted,
                rewritten(kernel, {place: [*cut, differs, *_trap(step), step]}),
            )


def _trap(step: Instruction) -> list[Instruction]:
    """A trap where %probe_0 is set and `step` is done."""
    if step.guard is None:
        return [Instruction("trap", (), "%probe_0")]
    guard = [Instruction("mov.pred", ("%probe_2", step.guard))]
    if step.negated:
        guard.append(Instruction("not.pred", ("%probe_2", "%probe_2")))
    return [
        *guard,
        Instruction("and.pred", ("%probe_0", "%probe_0", "%probe_2")),
        Instruction("trap", (), "%probe_0"),
    ]


def rewritten(kernel: Kernel, steps: dict[int, list[Instruction]]) -> Kernel:
    """`kernel` with other instructions in some places."""
    code: list[Instruction] = []
    moved = []
    for place, step in enumerate(kernel.code):
        moved.append(len(code))
        code += steps.get(place, [step])
    moved.append(len(code))
    labels = {name: moved[place] for name, place in kernel.labels.items()}
    more = {f"%moved{bits}_": bits for bits in (16, 32, 64)} | {
        "%probe_": 0,
        "%whole_": 64,
        "%cut_": 64,
        "%half_": 32,
    }
    return replace(kernel, code=tuple(code), labels=labels, registers=kernel.registers | more)


def _reason(planted: Planted) -> str:
    """The one of `REASONS`, or nothing."""
    for kernel, fault, reason in REASONS:
        if re.match(kernel, planted.kernel.name) and re.match(fault, planted.name):
            return reason
    return ""


@dataclass(frozen=True)
class Outcome:
    """Of one fault: how it was noticed, or why not."""

    arch: str
    kernel: str
    fault: str
    noticed: str = ""
    reason: str = ""


class Stage:
    """A scene, played with one of its kernels replaced."""

    def __init__(self, scene: Scene, arch: str) -> None:
        self._scene, self._arch = scene, arch
        self.kernels: dict[str, Kernel] = {}
        self._want = self._play(self._note)

    def outcome(self, planted: Planted) -> Outcome:
        """Play with the fault, and with its trap if nobody noticed."""
        found = Outcome(self._arch, planted.kernel.name, planted.name)
        try:
            got = self._play(
                lambda kernel: planted.kernel if kernel.name == planted.kernel.name else kernel
            )
        except Fault as fault:
            return replace(found, noticed=str(fault))
        if not all(map(torch.equal, map(_bytes, got), map(_bytes, self._want))):
            return replace(found, noticed="results have other bits")
        if planted.probe is not None:
            probe = planted.probe
            try:
                self._play(lambda kernel: probe if kernel.name == probe.name else kernel)
            except Fault:
                return replace(found, reason=_reason(planted))
            return replace(found, reason="no effect: no lane has another value")
        return replace(found, reason=_reason(planted))

    def _note(self, kernel: Kernel) -> Kernel:
        self.kernels[kernel.name] = kernel
        return kernel

    def _play(self, change: Callable[[Kernel], Kernel]) -> list[Tensor]:
        torch.manual_seed(0)
        with emulated(self._arch, rows_before=self._scene.rows_before) as emulation:
            emulation.change = change
            return self._scene.play()


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.planted", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "kernels", nargs="*", help="kernels whose name contains one of these; all without"
    )
    parser.add_argument("--arch", action="append", choices=ARCHES)
    parser.add_argument("--verbose", action="store_true", help="print every fault")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for arch in options.arch or ARCHES:
        for scene in SCENES:
            if options.kernels and not any(name in scene.kernel for name in options.kernels):
                continue
            begun = time.perf_counter()
            stage = Stage(scene, arch)
            found = [stage.outcome(planted) for planted in faults(stage.kernels[scene.kernel])]
            outcomes += found
            noticed, idle = (
                sum(bool(x.noticed) for x in found),
                sum(x.reason.startswith("no effect") for x in found),
            )
            print(
                f"{arch} {scene.name:32s} {noticed} of {len(found)} faults noticed, "
                f"{idle} without effect, "
                f"{time.perf_counter() - begun:.0f} s", flush=True,
            )  # fmt: skip
            for x in found:
                if options.verbose or not (x.noticed or x.reason.startswith("no effect")):
                    told = x.noticed or (f"unnoticed: {x.reason}" if x.reason else "NOT NOTICED")
                    print(f"  {x.fault}: {told}", flush=True)
    unexplained = [x for x in outcomes if not x.noticed and not x.reason]
    for kind in ("taken out", "moved", "cut"):
        of_kind = [x for x in outcomes if kind in x.fault]
        idle = sum(x.reason.startswith("no effect") for x in of_kind)
        print(
            f"{kind}: {sum(bool(x.noticed) for x in of_kind)} of {len(of_kind)} noticed, "
            f"{idle} without effect"
        )
    return 1 if unexplained or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
