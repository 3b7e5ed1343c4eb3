"""A launch compiled for a target, and the rules that the result must keep.

- No register is spilled, but for `SPILLS`, and a program's shared memory is within the device's:
  the compiler looks at neither.
- No double precision, which is slow, and a sign that a number was not cast.
- No atomics: the order of their additions, and with it the bits, would differ from run to run.
- Strides are multiplied in 64 bits: rows * vocabulary passes 2^31. Only the places within a tile
  may do with 32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.aot.launches import Launch
from benchmarks.aot.sass import SPILLING, Instruction, count, disassembled, inner_loops, printed
from grpo_kernels.backends.triton_rows.device import family

# The most shared memory of a program; "default" stands for all other devices.
SHARED_BYTES = {
    "sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "default": 65536,
}  # fmt: skip
# Bytes of a thread that a release of Triton spills, by target and kernel: none in an inner loop, so
# that they are written and read once a row. docs/dev/kernels.md says what they cost.
SPILLS = {"3.8": {("sm_90", "stats_kernel"): 8}, "3.9": {("sm_90", "diverge_kernel"): 16}}
ARGUMENTS_OF_ROWS = re.compile(r"%(reference_)?stride_\w+$")
SPREADING = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")


@dataclass(frozen=True)
class Result:
    registers: int = 0
    spilled: int = 0  # bytes; registers on AMD
    shared: int = 0  # bytes
    warps: int = 0
    broken: tuple[str, ...] = ()


def compile_for(launch: Launch, arch: str) -> Any:
    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    is_amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch[3:]), 32)
    return triton.compile(source, target=target, options=launch.options)


def compile_launch(launch: Launch, arch: str) -> Result:
    try:
        compiled = compile_for(launch, arch)
    except Exception as error:
        return Result(broken=(f"does not compile: {type(error).__name__}: {str(error)[-300:]}",))
    text = compiled.asm["amdgcn" if arch.startswith("gfx") else "ptx"]
    if arch.startswith("gfx"):
        names = ("vgpr_count", "vgpr_spill_count")
        registers, spilled = (_number(rf"\.{name}:\s+(\d+)", text) for name in names)
    else:
        registers, spilled = nvidia_usage(compiled.asm)
    shared = compiled.metadata.shared
    broken = [*broken_by_code(text, arch), *narrow_products(compiled.asm["ttir"])]
    if spilled > may_spill(arch, launch.kernel.__name__):
        broken.append(f"{spilled} {'registers' if arch.startswith('gfx') else 'bytes'} spilled")
    elif spilled and spills_in_inner_loops(disassembled(compiled.asm["cubin"])):
        broken.append(f"{spilled} bytes spilled, some in an inner loop")
    if shared > SHARED_BYTES[family(arch)]:
        broken.append(f"{shared} bytes of shared memory, of {SHARED_BYTES[family(arch)]}")
    return Result(registers, spilled, shared, compiled.metadata.num_warps, tuple(broken))


def nvidia_usage(asm: dict[str, Any]) -> tuple[int, int]:
    """(registers, bytes of stack) of a cubin: a stack is where spilled registers go."""
    usage = printed("cuobjdump", asm["cubin"], "--dump-resource-usage")
    return _number(r"\bREG:(\d+)", usage), _number(r"\bSTACK:(\d+)", usage)


def may_spill(arch: str, kernel: str) -> int:
    return SPILLS.get(triton.__version__.rpartition(".")[0], {}).get((arch, kernel), 0)


def spills_in_inner_loops(code: list[Instruction]) -> bool:
    return any(count(loop, *SPILLING) for loop in inner_loops(code))


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in what the compiler says"
    return int(match.group(1))


def broken_by_code(text: str, arch: str) -> list[str]:
    rules = {"double precision": r"\.f64\b", "an atomic": r"^\s*(@%p\d+ )?(atom|red)\."}
    if arch.startswith("gfx"):
        rules = {"double precision": r"\bv_\w*_f64"}
        rules["an atomic"] = r"\b(global|flat|buffer|ds)_\w*atomic"
    found = {name: re.search(rule, text, re.MULTILINE) for name, rule in rules.items()}
    return [f"{name}: {match.group(0).strip()}" for name, match in found.items() if match]


def narrow_products(ttir: str) -> list[str]:
    """32-bit products of a stride with anything but constants and places within a tile."""
    made: dict[str, list[tuple[str, list[str]]]] = {}  # sibling regions may use a name twice
    products: list[list[str]] = []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#]+)(?::\d+)? = ([\w.]+)(.*?)(?: loc\(.*)?$", line)
        if match:
            name, operation, rest = match.groups()
            operands, _, kind = rest.rpartition(" : ")
            arguments = re.findall(r"%[\w#]+", operands)
            made.setdefault(name, []).append((operation, arguments))
            if operation == "arith.muli" and re.search(r"(\b|x)i32\b", kind):
                products.append(arguments)

    def origin(name: str) -> str:
        """What all elements of a tensor are, if they are equal."""
        for operation, arguments in made.get(name, []):
            if operation in SPREADING:
                return origin(arguments[0])
        return name

    def within_tile(name: str) -> bool:
        return name in made and all(is_place(*definition) for definition in made[name])

    def is_place(operation: str, arguments: list[str]) -> bool:
        if operation in ("arith.minsi", *SPREADING):
            return any(map(within_tile, arguments))
        if operation in ("arith.addi", "arith.subi", "arith.muli"):
            return all(map(within_tile, arguments))
        return operation in ("tt.make_range", "arith.constant")

    return [
        f"a product in 32 bits: {origin(stride)} * {other}"
        for product in products
        for stride, other in (product, product[::-1])
        if ARGUMENTS_OF_ROWS.match(origin(stride)) and not within_tile(other)
    ]
