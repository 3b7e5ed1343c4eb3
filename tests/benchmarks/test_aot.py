"""Kernels compiled ahead of time: the rules hold, costs are those of docs/dev/roofline.md, and
faults are noticed. How the tuner finds tiles, and how it writes the table."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from benchmarks import tune
from benchmarks.aot.checks import broken_by_code, may_spill, narrow_products, spills_in_inner_loops
from benchmarks.aot.sass import parsed
from benchmarks.machine import ROOT

KERNELS = ("stats", "grad", "fused", "diverge", "scale")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=plain)


@pytest.mark.slow
def test_every_kernel_keeps_the_rules_on_every_target() -> None:
    done = run("benchmarks.aot", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:-1]]
    assert {(line[0], line[1]) for line in lines} >= {(t, k) for t in TARGETS for k in KERNELS}
    for line in lines:
        registers, spilled, _shared, warps = map(int, line[-4:])
        assert 0 < registers <= 512
        assert spilled <= may_spill(line[0], f"{line[1]}_kernel")
        assert warps in (1, 2, 4, 8, 16)


@pytest.mark.slow
def test_every_kernel_costs_what_the_document_says() -> None:
    done = run("benchmarks.aot.roofline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 of 16 kernels are not as in roofline.md\n")


@pytest.mark.parametrize(
    ("code", "arch", "broken"),
    [
        ("\tadd.f64 \t%fd1, %fd2, %fd3;", "sm_90", "double precision: .f64"),
        ("\t@%p1 atom.global.add.f32 \t%f1, [%rd1], %f2;", "sm_90", "an atomic: @%p1 atom."),
        ("\tred.global.add.f32 \t[%rd1], %f2;", "sm_80", "an atomic: red."),
        ("\tv_add_f64 v[0:1], v[2:3], v[4:5]", "gfx942", "double precision: v_add_f64"),
        ("\tglobal_atomic_add_f32 v0, v1, s[0:1]", "gfx942", "an atomic: global_atomic"),
        ("\tredux.sync.max.s32 %r1, %r2, %r3;\n\tmov.b64 %rd1, %rd2;", "sm_90", None),
    ],
)
def test_forbidden_instructions_are_noticed(code: str, arch: str, broken: str | None) -> None:
    assert broken_by_code(code, arch) == ([] if broken is None else [broken])


PID = "%pid = tt.get_program_id x : i32"
RANGE = "%range = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>"
STRIDE = "%stride = tt.splat %stride_n : i32 -> tensor<4xi32>"
PRODUCT = "%at = arith.muli %rows, %stride : tensor<4xi32>"
SPLAT = "%first = tt.splat %pid : i32 -> tensor<4xi32>"
SUM = "%rows = arith.addi %first, %range : tensor<4xi32>"
LEAST = "%rows = arith.minsi %range, %left : tensor<4xi32>"
WIDE = ("%row = arith.extsi %pid : i32 to i64", "%stride = arith.extsi %stride_n : i32 to i64")


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        *(([PID, f"%at = arith.muli %pid, %{x} : i32"], f"%{x} * %pid")
          for x in ("stride_n", "reference_stride_n")),
        ([PID, RANGE, SPLAT, SUM, STRIDE, PRODUCT], "%stride_n * %rows"),
        ([RANGE, "%left = tt.splat %n : i32 -> tensor<4xi32>", LEAST, STRIDE, PRODUCT], None),
        ([PID, *WIDE, "%at = arith.muli %row, %stride : i64"], None),  # in 64 bits
    ],
)  # fmt: skip
def test_a_narrow_product_of_a_row_and_its_stride_is_noticed(lines, broken):
    ttir = "\n".join(f"{line} loc(#loc)" for line in lines)
    assert narrow_products(ttir) == ([f"a product in 32 bits: {broken}"] if broken else [])


@pytest.mark.parametrize(
    ("place", "found"), [(0, False), (2, False), (4, True), (6, False), (8, False)]
)
def test_spills_in_inner_loops_are_noticed(place: int, found: bool) -> None:
    """In the inner one of two loops alone."""
    code = ["MOV R1, R2", ".L_1:", "MOV R2, R3", ".L_2:", "FADD R2, R2, R1", "@P0 BRA `(.L_2)"]
    code += ["FMUL R1, R2, R2", "@P1 BRA `(.L_1)", "EXIT"]
    code.insert(place, "STL [R1], R5")
    lines = [x if x[-1] == ":" else f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(code)]
    assert spills_in_inner_loops(parsed("\n".join(lines))) == found


def test_the_table_is_whole_and_says_what_was_measured() -> None:
    text = tune.own_table().read_text()
    table = json.loads(text)
    tune.check_table(table)
    assert text == tune.text_of(table), "as the tuner would write it"
    for entry in table:
        measured = entry["measured"]
        assert measured is False or set(measured) == {"device", "torch", "triton"}


def test_the_fastest_that_keeps_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"slow": 3.0, "spills": 1.0, "fast": 2.0}
    monkeypatch.setattr(tune, "seconds", lambda run: times[run])
    monkeypatch.setattr(tune, "SHORTLIST", 1)
    same = lambda config: config  # noqa: E731
    assert tune.shortlist(times, same, lambda c: c == "spills", math.inf) == ["fast"]
    assert tune.fastest(times, [same, same], math.inf) == "spills"


@pytest.mark.slow
def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = tune.own_table().read_text()
    assert tune.main(["--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("candidate: ") == len(tune.REAL.tiles)
    assert "entries of family interpreter written to" in said
    assert tune.own_table().read_text() == before
