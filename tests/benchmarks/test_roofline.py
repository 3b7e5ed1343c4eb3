"""Machine code taken apart: kernels cost what is pinned, a fault in a loop is noticed, and the counting is right."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.aot import costs, predict, report
from benchmarks.aot.costs import Layout, Part, parts_of
from benchmarks.aot.predict import DEVICES, ctas_per_sm
from benchmarks.aot.sass import WIDE_COMPARE, Flow, Instruction, counted, parsed
from tests.support.planted import ROOT, Fault, plant

SELECT = Fault(
    "a select more in the loops",
    "grpo_kernels/backends/triton_rows/mathfn.py",
    "return tl.exp2(x * LOG2_E)",
    "return tl.where(x > -1000.0, tl.exp2(x * LOG2_E), 0.0)",
)


def roofline(*arguments: str, folder: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.aot.roofline", *arguments]
    environment = {**plain, "PYTHONPATH": os.pathsep.join([str(folder), plain.get("PYTHONPATH", "")]), **more}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_every_kernel_costs_what_is_pinned() -> None:
    pytest.importorskip("triton")
    done = roofline("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as pinned") == len(costs.read().cases) + 1  # and the line that sums up


@pytest.mark.slow
def test_a_select_more_in_a_loop_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    plant(SELECT, tmp_path)
    done = roofline("--check", "--case", "stats all extras", "--workers", "1", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FSEL an element" in done.stdout


def test_it_refuses_what_it_cannot_do() -> None:
    for arguments, said, more in (
        (("--check",), "error: TRITON_INTERPRET is set", {"TRITON_INTERPRET": "1"}),
        (("--case", "stats"), "error: --case goes with --check", {}),
        (("--check", "--update"), "error: --check writes nothing", {}),
    ):
        done = roofline(*arguments, **more)
        assert done.returncode == 2
        assert said in done.stderr


def test_the_document_is_what_the_pins_say() -> None:
    assert report.FILE.read_text() == report.report(costs.read())


def test_pins_are_read_as_they_were_written(tmp_path: Path) -> None:
    costs.write(costs.read(), tmp_path / "pins.json")
    assert (tmp_path / "pins.json").read_text() == costs.FILE.read_text()


def sass(*lines: str) -> list[Instruction]:
    """Instructions and labels, as nvdisasm prints them."""
    return parsed("\n".join(x if x.endswith(":") else f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(lines)))


def test_instructions_are_told_apart() -> None:
    text = """
\t.headerflags\t@"EF_CUDA_SM90"
stats_kernel:
.text.stats_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P4 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.64 [R35], desc[UR14][R2.64], P5 ;
        /*0030*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0040*/                   STG.E.U16 desc[UR4][R4.64], R8 ;
        /*0050*/                   FMNMX.NAN R12, R37, R12, !PT ;
        /*0060*/                   FFMA.FTZ R23, R6.reuse, R23, R35 ;
        /*0070*/                   ISETP.NE.U32.AND P5, PT, R6, RZ, PT ;
        /*0080*/                   ISETP.NE.U32.AND.EX P5, PT, R16, RZ, PT, P5 ;
        /*0090*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*00a0*/              @!P4 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""
    found = parsed(text)
    assert len(found) == 12
    assert found[1] == Instruction("LDG.E.128.CONSTANT", "@!P4", "R4, desc[UR4][R2.64]", None, (".L_x_1",))
    assert found[-2].target == ".L_x_1"
    assert counted(found) == {
        "FFMA": 1, "FMNMX": 1, "HGMMA.64x256x16.F32.BF16": 1, WIDE_COMPARE: 1,
        "LDG.128": 1, "LDG.32": 1, "LDGSTS.64": 1, "STG.16": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no instructions"):
        parsed("nvdisasm fatal")


LOAD, STORE = "LDG.E.128 R4, desc[UR4][R2.64]", "STG.E.64 desc[UR4][R4.64], R8"
# Two tiles a round, a last one, and where nothing is left to wait for: a spin, and the trap behind the end.
ROW = (
    *("MOV R1, R2", ".L_1:", "FMUL R1, R1, R2", LOAD, LOAD, "@P0 BRA `(.L_1)"),
    *("@P1 BRA `(.L_3)", ".L_2:", LOAD, "FADD R1, R1, R2", "FADD R1, R1, R2", "@P0 BRA `(.L_2)", ".L_3:"),
    *(".L_4:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR6], R194", "@!P3 BRA `(.L_4)"),
    *("STG.E desc[UR4][R4.64], R1", "EXIT", ".L_5:", "BRA `(.L_5)"),
)


def test_loops_are_found_with_what_one_round_handles() -> None:
    found = parts_of(sass(*ROW), Layout(loaded=4, stored=0), sweeps=1)
    assert [(p.does, p.elements, p.instructions) for p in found] == [("reads", 8, 4), ("rest", 4, 4), ("once", 0, 6)]
    assert found[0].counts == {"FMUL": 1, "LDG.128": 2}
    assert found[1].counts == {"FADD": 2, "LDG.128": 1}
    with_bias = parts_of(sass(*ROW), Layout(loaded=8, stored=0), sweeps=1)
    assert [p.elements for p in with_bias] == [4, 2, 0]
    with pytest.raises(ValueError, match="expected 2 loops over a row, got 1"):
        parts_of(sass(*ROW), Layout(4, 0), sweeps=2)


def test_sweeps_are_told_by_what_they_store() -> None:
    write = (".L_6:", LOAD, "MUFU.EX2 R3, R2", STORE, "@P0 BRA `(.L_6)")
    rows = (*ROW[:6], *write, "EXIT")
    found = parts_of(sass(*rows), Layout(4, 2), sweeps=2)
    assert [(p.does, p.elements) for p in found] == [("reads", 8), ("writes", 4), ("once", 0)]
    assert [p.does for p in parts_of(sass(*rows), Layout(4, 2), sweeps=1)] == ["reads", "once"]
    with pytest.raises(ValueError, match="stores 8 at 4"):
        parts_of(sass(*rows), Layout(4, 4), sweeps=2)


def test_a_masked_tile_apart_is_on_the_way_of_a_row() -> None:
    """Where a program has a row to itself; where many share it, few of them have such a tile."""
    tail = ("@P1 BRA `(.L_7)", *("LDG.E R4, desc[UR4][R2.64]",) * 4, ".L_7:", "EXIT")
    one = sass(*ROW[:2], *ROW[4:6], *tail)
    found = parts_of(one, Layout(4, 0), sweeps=1)
    assert [(p.does, p.elements, p.instructions) for p in found] == [("reads", 4, 2), ("once", 4, 7)]
    taken = replace(STATS, parts=tuple(found))  # 1000 elements: 7 rounds of 128, and what is left
    assert predict.instructions(taken, 1000) == pytest.approx((7 * 2 + 7) * 32 / 1000)
    shared = parts_of(one, Layout(4, 0), sweeps=1, programs=10)
    assert (shared[1].elements, shared[1].instructions) == (0, 3)
    two = parts_of(sass(*ROW[:2], *ROW[3:6], *tail), Layout(4, 0), sweeps=1)  # too few for a tile of this loop
    assert (two[0].elements, two[1].elements, two[1].instructions) == (8, 0, 7)


def test_a_further_sweep_is_for_rare_rows() -> None:
    write = (LOAD, "FMUL R1, R1, R2", STORE)
    sweeps = [
        (
            *(f"@P1 BRA `(.L_{i}1)", f".L_{i}0:", *write, f"@P0 BRA `(.L_{i}0)", f".L_{i}1:"),
            *(f"@P2 BRA `(.L_{i}2)", "ISETP.GE.AND P2, PT, R1, R2, PT", *write, f".L_{i}2:"),
        )
        for i in (1, 2)
    ]
    found = parts_of(sass(*sweeps[0], "@P3 BRA `(.L_3)", *sweeps[1], ".L_3:", "EXIT"), Layout(4, 2), sweeps=1)
    assert [(p.does, p.elements, p.instructions) for p in found] == [("writes", 4, 4), ("once", 4, 8)]


def test_the_way_of_a_whole_tile_is_counted() -> None:
    """In a loop and without one: not the masked branch, not what only the target's tile does."""
    branch = (
        *("@P1 BRA `(.L_8)", LOAD, "FMUL R1, R1, R2", STORE, "BRA `(.L_9)"),
        *(".L_8:", "ISETP.GE.AND P2, PT, R1, R2, PT", LOAD, "FMUL R1, R1, R2", "@P2 " + STORE, ".L_9:"),
        *("@!P3 BRA `(.L_10)", "STG.E.U16 desc[UR4][R4.64], R8", ".L_10:"),
    )
    tile = parts_of(sass("LDG.E.64 R2, desc[UR4][R2.64]", *branch, "EXIT"), Layout(4, 2), sweeps=1)
    assert [(p.does, p.elements, p.instructions) for p in tile] == [("tile", 4, 8)]
    loop = parts_of(sass("NOP", ".L_7:", *branch, "@P0 BRA `(.L_7)", "EXIT"), Layout(4, 2), sweeps=1)
    assert [(p.does, p.elements, p.instructions) for p in loop] == [("writes", 4, 7), ("once", 0, 2)]


def test_a_product_and_its_epilogue() -> None:
    """Nested, or as one loop with a branch around the epilogue."""
    shape = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24"
    sums = ("MUFU.EX2 R3, R2", "FADD R1, R1, R2")
    nested = sass(".L_1:", "NOP", ".L_2:", shape, shape, "@P0 BRA `(.L_2)", *sums, "@P1 BRA `(.L_1)", "EXIT")
    product, epilogue = parts_of(nested, Layout(0, 0), sweeps=1)
    assert product == Part("product", 4, 3, {"HGMMA.64x256x16.F32.BF16": 2})
    assert epilogue == Part("epilogue", 128, 4, {"FADD": 1, "MUFU": 1})
    flat = sass(".L_1:", shape, shape, "@P0 BRA `(.L_2)", *sums, ".L_2:", "@P1 BRA `(.L_1)", "EXIT")
    product, epilogue = parts_of(flat, Layout(0, 0), sweeps=1)
    assert (product.instructions, epilogue.instructions, epilogue.elements) == (4, 2, 128)


def test_threads_that_part_meet_again() -> None:
    flow = Flow(sass("BSSY B0, `(.L_2)", "@P0 BRA `(.L_1)", "NOP", ".L_1:", "BSYNC B0", ".L_2:", "EXIT"))
    assert flow.after == [[1, 2], [2], [3], []]
    assert flow.loops == []
    assert Flow(sass(".L_1:", "BRA.DIV UR4, `(.L_1)", "BRA `(.L_1)", "EXIT")).after == [[1, 0], [0], []]
    out_of_line = Flow(sass(".L_1:", "@P1 BRA `(.L_3)", ".L_2:", "@P0 BRA `(.L_1)", "EXIT", ".L_3:", "BRA `(.L_2)"))
    assert [(loop.header, loop.blocks) for loop in out_of_line.loops] == [(0, {0, 1, 3})]


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "ctas"),
    [
        (48, 256, 16384, 5),
        (63, 256, 16384, 4),
        (79, 256, 16384, 3),
        (30, 256, 0, 8),  # by threads
        (255, 256, 147480, 1),  # by registers, and by shared memory
        (32, 64, 0, 32),  # by programs
        (32, 128, 116 * 1024, 1),  # by the KiB that the system takes
    ],
)
def test_programs_of_a_multiprocessor(registers: int, threads: int, shared: int, ctas: int) -> None:
    assert ctas_per_sm(registers, threads, shared) == ctas


STATS = costs.Taken(
    kernel="stats", variant="x", vocab=1000, products=1, loaded=4, stored=0, programs=1, threads=32, registers=40,
    shared=0, parts=(
        Part("reads", 8, 160, {"FSEL": 24, "MUFU": 8, "BAR": 2}),
        Part("rest", 4, 100, {"MUFU": 4}),
        Part("once", 0, 50),
    ),
)  # fmt: skip


def changed(place: int, **to: object) -> costs.Taken:
    parts = list(STATS.parts)
    parts[place] = replace(parts[place], **to)
    return replace(STATS, parts=tuple(parts))


@pytest.mark.parametrize(
    ("now", "triton", "said"),
    [
        (changed(0, counts={"FSEL": 32, "MUFU": 8, "BAR": 2}), "3.6.0", "reads: expected 3 FSEL an element, got 4"),
        (changed(0, counts={"FSEL": 32, "MUFU": 8, "BAR": 2}), "3.9.0", None),
        (changed(0, counts={"FSEL": 24, "MUFU": 9, "BAR": 2}), "3.9.0", "reads: expected 1 MUFU an element, got 1.125"),
        (changed(0, counts={"FSEL": 24, "MUFU": 8, "BAR": 4}), "3.7.1", None),
        (changed(0, instructions=175), "3.7.1", None),
        (changed(0, instructions=177), "3.7.1", "reads: expected 20.00 instructions an element within 10%, got 22.12"),
        (changed(0, elements=16, instructions=320, counts={"FSEL": 48, "MUFU": 16}), "3.7.1", None),
        (changed(2, instructions=60), "3.6.0", "once: expected 50.00 instructions within 10%, got 60.00"),
        (changed(1, counts={"MUFU": 4, "LDL": 1}), "3.9.0", "rest: 1 LDL in its loop"),
        (replace(STATS, registers=41), "3.7.1", "registers: expected 40, got 41"),
        (replace(STATS, registers=41), "3.6.0", None),
        (replace(STATS, parts=STATS.parts[::2]), "3.6.0", "its parts: expected reads+rest+once, got reads+once"),
    ],
)
def test_what_is_held_against_the_pins(now: costs.Taken, triton: str, said: str | None) -> None:
    found = costs.differences(STATS, now, pinned_triton="3.7.1", triton=triton)
    assert found == ([] if said is None else [said])


def test_a_whole_row_is_counted() -> None:
    # of 1000 elements 3 rounds of 256, 2 of 128 (the second in part), and what is outside, by 32 threads
    assert predict.instructions(STATS, 1000) == pytest.approx((3 * 160 + 2 * 100 + 50) * 32 / 1000)
    tiles = replace(STATS, programs=4, parts=(Part("tile", 8, 300, {"MUFU": 8}),))
    assert predict.instructions(tiles, 1000) == pytest.approx(4 * 300 * 32 / 1000)
    assert predict.instructions(tiles, 2000) == pytest.approx(8 * 300 * 32 / 2000)


def test_predictions_follow_the_counts() -> None:
    device = DEVICES["H200"]
    found = predict.times(STATS, 8192, 1000, device)
    second, largest = sorted((found.issue, found.special, found.dram))[1:]
    assert found.predicted == largest + second / 8
    assert found.dram == pytest.approx(4 * 8192 * 1000 / device.dram * 1e3)
    for taken in costs.read().cases:
        small, large = (predict.predicted_ms(taken.kernel, taken.variant, n, 151936) for n in (1024, 8192))
        assert 0 < 7.9 * small < large < 8.1 * small
    fp32 = predict.predicted_ms("fused", "constant", 8192, 151936, 4)
    assert fp32 > predict.predicted_ms("fused", "constant", 8192, 151936)
    with pytest.raises(LookupError, match="no 'fused' 'nothing'"):
        predict.predicted_ms("fused", "nothing", 1, 1)
