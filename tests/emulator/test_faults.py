"""Each kind of fault, committed by a small kernel, is found; and the same kernel without it runs."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.faults import Fault
from tests.emulator.ptx import UnknownInstruction
from tests.emulator.unwritten import marked
from tests.emulator.written import execute

OWN = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd0, %rd10;"  # the thread's element of the first argument
SPOT = "shl.b32 %r10, %r0, 2; mov.b32 %r11, global_smem; add.s32 %r10, %r10, %r11;"  # its own of shared memory
NEXT = "xor.b32 %r12, %r10, {};"  # another thread's
BARRIER = "bar.sync 0;"


def numbers(n: int = 32) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


def test_a_kernel_that_keeps_the_rules() -> None:
    x = numbers()
    execute(
        f"{OWN} ld.global.b32 %r2, [%rd11]; add.s32 %r2, %r2, %r0; st.global.b32 [%rd11], %r2;", x
    )
    assert torch.equal(x, 2 * numbers())


@pytest.mark.parametrize("offset", [-4, 4, 128, 4096])
def test_outside_of_an_argument(offset: int) -> None:
    with pytest.raises(Fault, match="outside of"):
        execute(f"{OWN} ld.global.b32 %r2, [%rd11+{offset}];", numbers())
    with pytest.raises(Fault, match=r"st\.global\.b32 .*outside of"):
        execute(f"{OWN} st.global.b32 [%rd11+{offset}], %r0;", numbers())


def test_what_is_near_in_memory_belongs_to_others() -> None:
    """Views of one tensor are arguments of their own, and columns between those of a view are none."""
    both = numbers(64)
    execute(f"{OWN} ld.global.b32 %r2, [%rd11];", both[:32], both[32:])
    with pytest.raises(Fault, match="outside of the elements of written_param_0"):
        execute(f"{OWN} ld.global.b32 %r2, [%rd11+4];", both[:32], both[32:])
    columns = numbers(128).view(4, 32)[:, :31]
    with pytest.raises(Fault, match="outside of the elements of written_param_0"):
        execute(f"{OWN} ld.global.b32 %r2, [%rd11];", columns)


def test_guarded_lanes_reach_nothing() -> None:
    x = numbers(31)
    execute(
        f"{OWN} setp.lt.u32 %p1, %r0, 31; @%p1 ld.global.b32 %r2, [%rd11]; @%p1 st.global.b32 [%rd11], %r2;",
        x,
    )
    with pytest.raises(Fault, match="outside of"):
        execute(f"{OWN} setp.lt.u32 %p1, %r0, 32; @%p1 ld.global.b32 %r2, [%rd11];", x)


@pytest.mark.parametrize(
    "code", ["ld.global.v2.b32 {%r2, %r3}, [%rd0+4];", "ld.global.b64 %rd2, [%rd0+4];"]
)
def test_misaligned(code: str) -> None:
    with pytest.raises(Fault, match="misaligned: 8 bytes of global memory"):
        execute(code, numbers())
    execute(code.replace("+4", "+8"), numbers())


def test_results_read_before_they_are_written() -> None:
    with marked():
        result = torch.empty(32, dtype=torch.float32)
    store, load = f"{OWN} st.global.b32 [%rd11], %r0;", f"{OWN} ld.global.b32 %r2, [%rd11];"
    with pytest.raises(Fault, match="reads global memory that nobody wrote"):
        execute(load + store, result)
    execute(store + load, result)
    execute(load, result)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.int32):
        with marked():
            result = torch.empty(64, dtype=dtype)
        with pytest.raises(Fault, match="reads global memory that nobody wrote"):
            execute("ld.global.b64 %rd2, [%rd0];", result)


def test_shared_memory_read_before_it_is_written() -> None:
    store, load = f"{SPOT} st.shared.b32 [%r10], %r0;", f"{SPOT} ld.shared.b32 %r2, [%r10];"
    execute(store + load, shared=128)
    with pytest.raises(Fault, match="reads shared memory that nobody wrote"):
        execute(load + store, shared=128)
    with pytest.raises(Fault, match="outside of the 64 bytes of shared memory"):
        execute(store, shared=64)


@pytest.mark.parametrize(
    ("threads", "other", "barrier"), [(32, 4, "bar.warp.sync -1;"), (64, 128, BARRIER)]
)
def test_races_of_threads(threads: int, other: int, barrier: str) -> None:
    """Of a warp, ordered by a barrier of warps, and of two warps, for which that is not enough."""
    store, load, next_of = (
        f"{SPOT} st.shared.b32 [%r10], %r0;",
        "ld.shared.b32 %r2, [%r12];",
        NEXT.format(other),
    )
    for barriers in ("", "" if threads == 32 else "bar.warp.sync -1;"):
        with pytest.raises(Fault, match=r"race: .* reads what thread \d+ of program 0 wrote"):
            execute(store + barriers + next_of + load, threads=threads, shared=256)
    execute(store + barrier + next_of + load, threads=threads, shared=256)
    read, write = f"{store} {barrier} {next_of} {load}", "st.shared.b32 [%r10], %r2;"
    with pytest.raises(Fault, match=r"race: .* writes what thread \d+ of program 0 read"):
        execute(read + write, threads=threads, shared=256)
    execute(read + barrier + write, threads=threads, shared=256)
    with pytest.raises(Fault, match=r"race: .* writes where thread \d+ of program 0 wrote"):
        execute(f"{store} {next_of} st.shared.b32 [%r12], %r0;", threads=threads, shared=256)


def test_many_readers_are_all_remembered() -> None:
    """Threads read one place, one of them last; it writes there without a barrier after the others."""
    write = "setp.eq.u32 %p1, %r0, 63; @%p1 st.shared.b32 [global_smem], %r0;"
    start = f"setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.b32 [global_smem], %r0; {BARRIER} ld.shared.b32 %r2, [global_smem];"
    again = "setp.gt.u32 %p3, %r0, 31; @%p3 ld.shared.b32 %r3, [global_smem];"
    with pytest.raises(Fault, match="race: thread 63 of program 0 writes what"):
        execute(start + again + write, threads=64, shared=16)
    execute(start + again + BARRIER + write, threads=64, shared=16)


def test_different_values_at_one_place_at_once() -> None:
    with pytest.raises(Fault, match="lanes write different values to global memory at once"):
        execute("st.global.b32 [%rd0], %r0;", numbers())
    execute("st.global.b32 [%rd0], 7;", numbers())


@pytest.mark.parametrize("programs", [2, 3])
def test_races_of_programs(programs: int) -> None:
    """No barrier orders them, and it does not matter which comes first."""
    first, last = "setp.eq.u32 %p1, %r1, 0;", f"setp.eq.u32 %p1, %r1, {programs - 1};"
    read, write = "ld.global.b32 %r2, [%rd0];", "@%p1 st.global.b32 [%rd0], 7;"
    for chosen in (first, last):
        with pytest.raises(
            Fault, match=r"race: .* of program \d writes what thread \d+ of program \d read"
        ):
            execute(f"{read} {BARRIER} {chosen} {write}", numbers(), programs=programs)
        with pytest.raises(
            Fault, match=r"race: .* of program \d reads what thread \d+ of program \d wrote"
        ):
            execute(f"{chosen} {write} {BARRIER} {read}", numbers(), programs=programs)
    execute(read, numbers(), programs=programs)
    with pytest.raises(Fault, match="race: "):
        execute("st.global.b32 [%rd0], %r1;", numbers(), programs=programs)


def test_barriers_that_not_all_threads_reach() -> None:
    with pytest.raises(Fault, match="wait at a barrier for others that have returned"):
        execute("setp.gt.u32 %p1, %r0, 40; @%p1 ret; bar.sync 0;", threads=64)
    with pytest.raises(Fault, match="wait at different barriers"):
        execute(
            "setp.gt.u32 %p1, %r0, 40; @%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B:",
            threads=64,
        )
    execute(
        "setp.gt.u32 %p1, %r0, 40; @%p1 bra $A; add.s32 %r2, %r0, 1; $A: bar.sync 0;", threads=64
    )


def test_a_part_of_a_warp_in_an_instruction_of_whole_ones() -> None:
    shuffle = "shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;"
    with pytest.raises(Fault, match="a part of a warp"):
        execute(f"setp.gt.u32 %p1, %r0, 3; @%p1 bra $A; {shuffle} $A:")
    with pytest.raises(Fault, match="expected all lanes of a warp to be members"):
        execute(shuffle.replace("-1", "65535"))


@pytest.mark.parametrize(
    "opcode", ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "add.sat.s32", "frob.b32"]
)
def test_unknown_instructions_are_named(opcode: str) -> None:
    with pytest.raises(UnknownInstruction, match=f"got {opcode}"):
        execute(f"{opcode} %r2, %r0, %r0;")
    with pytest.raises(UnknownInstruction, match="expected a statement of PTX, got '%r2 = 3"):
        execute("%r2 = 3")
