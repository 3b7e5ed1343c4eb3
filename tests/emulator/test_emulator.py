"""The emulator on kernels written by hand, whose faults are found; parts of what `make emulate`
runs, in processes that import Triton without its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.emulator.lanes import Lanes
from tests.emulator.memory import WARP, Global, marked
from tests.emulator.ptx import Fault, UnknownInstruction, parse

TEXT = """
.file 1 "/somewhere/steps.py"
.visible .entry written(
{parameters}
)
.reqntid {threads}
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<40>;
    {loads}
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    {body}
    ret;
}}
"""


def execute(
    body: str, *tensors: Tensor, threads: int = WARP, programs: int = 1, shared: int = 0
) -> None:
    """Run `body`; %r0 is the thread, %r1 the program, and %rd0, %rd1, ... point to `tensors`."""
    names = [f"written_param_{i}" for i in range(len(tensors))]
    text = TEXT.format(
        parameters=",\n".join(f".param .u64 .ptr .global .align 1 {name}" for name in names),
        threads=threads,
        loads="\n".join(f"ld.param.b64 %rd{i}, [{name}];" for i, name in enumerate(names)),
        body=body,
    )
    memory = Global(dict(zip(names, tensors, strict=True)), threads)
    pointers = {name: memory.pointer(name) for name in names}
    grid = {"programs": programs, "threads": threads, "first": 0, "count": programs}
    Lanes(parse(text), pointers, memory, shared, **grid).run()
    memory.copy_back()


# the thread's element of the first argument, and its own of shared memory
OWN = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10;"
SPOT = "shl.b32 %r10, %r0, 2; mov.b32 %r11, global_smem; add.s32 %r10, %r10, %r11;"
LOAD, STORE = f"{OWN} ld.global.b32 %r2, [%rd11];", f"{OWN} st.global.b32 [%rd11], %r0;"
SHARED_LOAD = f"{SPOT} ld.shared.b32 %r2, [%r10];"
SHARED_STORE = f"{SPOT} st.shared.b32 [%r10], %r0;"
SHUFFLE = "shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;"
BARRIER = "bar.sync 0;"


def numbers(n: int = 32) -> Tensor:
    return torch.arange(n, dtype=torch.int32)


def refused(match: str, body: str, *tensors: Tensor, **options: int) -> None:
    with pytest.raises(Fault, match=match):
        execute(body, *tensors, **options)


def test_a_kernel_that_keeps_the_rules() -> None:
    x = numbers()
    execute(f"{LOAD} add.s32 %r2, %r2, %r0; st.global.b32 [%rd11], %r2;", x)
    assert torch.equal(x, 2 * numbers())


def test_bounds() -> None:
    """Views of one tensor are arguments of their own; columns between those of a view are none."""
    at_line = ".loc 1 12 5 // steps.py:12:5 @[ grad.py:3:4 ]\n ld.global.b32 %r2, [%rd0+4096];"
    named = r"written: ld\.global\.b32 %r2, \[%rd0\+4096\] \(steps\.py:12\): .*outside of"
    refused(named, at_line, numbers())
    for offset in (-4, 4, 128, 4096):
        for code in ("ld.global.b32 %r2, [%rd11+{}];", "st.global.b32 [%rd11+{}], %r0;"):
            refused(f"{code[:2]}.*outside of", OWN + code.format(offset), numbers())
    both, elements = numbers(64), "outside of the elements of written_param_0"
    execute(LOAD, both[:32], both[32:])
    refused(elements, f"{OWN} ld.global.b32 %r2, [%rd11+4];", both[:32], both[32:])
    refused(elements, LOAD, numbers(128).view(4, 32)[:, :31])
    guarded = f"{OWN} setp.lt.u32 %p1, %r0, {{}}; @%p1 ld.global.b32 %r2, [%rd11];"
    execute(guarded.format(31), numbers(31))
    refused("outside of", guarded.format(32), numbers(31))
    execute(SHARED_STORE, shared=128)
    refused("outside of the 64 bytes of shared memory", SHARED_STORE, shared=64)
    for code in ("ld.global.v2.b32 {%r2, %r3}, [%rd0+4];", "ld.global.b64 %rd2, [%rd0+4];"):
        refused("misaligned: 8 bytes of global memory", code, numbers())
        execute(code.replace("+4", "+8"), numbers())


def test_memory_is_written_before_it_is_read() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32):
        with marked():
            result = torch.empty(64, dtype=dtype)
        refused("reads global memory that nobody wrote", "ld.global.b64 %rd2, [%rd0];", result)
    execute(STORE + LOAD, result)
    execute(SHARED_STORE + SHARED_LOAD, shared=128)
    refused("reads shared memory that nobody wrote", SHARED_LOAD + SHARED_STORE, shared=128)


@pytest.mark.parametrize(("threads", "other"), [(32, 4), (64, 128)])
def test_races_of_threads(threads: int, other: int) -> None:
    """Of a warp, and of two."""
    options, of_other = {"threads": threads, "shared": 256}, r"thread \d+ of program 0"
    next_of, load = f"xor.b32 %r12, %r10, {other};", "ld.shared.b32 %r2, [%r12];"
    read, write = SHARED_STORE + BARRIER + next_of + load, "st.shared.b32 [%r10], %r2;"
    execute(read, **options)
    execute(read + BARRIER + write, **options)
    refused(f"race: .* reads what {of_other} wrote", read.replace(BARRIER, ""), **options)
    refused(f"race: .* writes what {of_other} read", read + write, **options)
    body = f"{SHARED_STORE} {next_of} st.shared.b32 [%r12], %r0;"
    refused(f"race: .* writes where {of_other} wrote", body, **options)


def test_many_readers_are_all_remembered() -> None:
    """Threads read one place, one of them last; it writes there without a barrier."""
    place, options = "[global_smem]", {"threads": 64, "shared": 16}
    write = f"setp.eq.u32 %p1, %r0, 63; @%p1 st.shared.b32 {place}, %r0;"
    start = f"setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.b32 {place}, %r0; {BARRIER}"
    start += f" ld.shared.b32 %r2, {place};"
    again = f"setp.gt.u32 %p3, %r0, 31; @%p3 ld.shared.b32 %r3, {place};"
    refused("race: thread 63 of program 0 writes what", start + again + write, **options)
    execute(start + again + BARRIER + write, **options)


@pytest.mark.parametrize("program", [0, 2])
def test_races_of_programs(program: int) -> None:
    """No barrier orders them, and it does not matter which comes first."""
    read, of_other = "ld.global.b32 %r2, [%rd0];", r"what thread \d+ of program \d"
    write = f"setp.eq.u32 %p1, %r1, {program}; @%p1 st.global.b32 [%rd0], 7;"
    execute(read, numbers(), programs=3)
    for what, body in (
        ("writes {} read", read + BARRIER + write),
        ("reads {} wrote", write + read),
    ):
        what = rf"race: .* of program \d {what.format(of_other)}"
        refused(what, body, numbers(), programs=3)
    refused("race: ", "st.global.b32 [%rd0], %r1;", numbers(), programs=3)
    at_once = "lanes write different values to global memory at once"
    refused(at_once, "st.global.b32 [%rd0], %r0;", numbers())
    execute("st.global.b32 [%rd0], 7;", numbers())


def test_what_threads_do_together() -> None:
    """A barrier that not all of them reach; an instruction of whole warps in a part of one."""
    some, two = "setp.gt.u32 %p1, %r0, 40; @%p1", {"threads": 64}
    refused("wait at a barrier for others that have returned", f"{some} ret; {BARRIER}", **two)
    apart = f"{some} bra $A; {BARRIER} bra $B; $A: {BARRIER} $B:"
    refused("wait at different barriers", apart, **two)
    execute(f"{some} bra $A; add.s32 %r2, %r0, 1; $A: {BARRIER}", **two)
    refused("a part of a warp", f"setp.gt.u32 %p1, %r0, 3; @%p1 bra $A; {SHUFFLE} $A:")
    refused("expected all lanes of a warp to be members", SHUFFLE.replace("-1", "65535"))


def test_unknown_instructions_are_named() -> None:
    for opcode in ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "add.sat.s32", "trap"):
        with pytest.raises(UnknownInstruction, match=f"got {opcode}"):
            execute(f"{opcode} %r2, %r0, %r0;")
    with pytest.raises(UnknownInstruction, match="expected a statement of PTX, got '%r2 = 3"):
        execute("%r2 = 3")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("part", ["quick", "slow"])
def test_compiled_kernels(part: str, arch: str) -> None:
    pytest.importorskip("triton")
    command = f"-m pytest -p tests.emulator.plugin -m {part} --arch {arch} -q -p no:cacheprovider"
    files = map(str, Path(__file__).parent.glob("runs/[a-z]*.py"))
    hidden = ("PYTEST", "TRITON_INTERPRET")
    env = {name: x for name, x in os.environ.items() if not name.startswith(hidden)}
    options = {"capture_output": True, "text": True, "env": env}
    done = subprocess.run([sys.executable, *command.split(), *files], **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
