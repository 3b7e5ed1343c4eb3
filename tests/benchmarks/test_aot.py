"""Kernels compiled ahead of time: the rules hold, and the checks notice when one does not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.aot import __main__ as aot_command
from benchmarks.aot.checks import broken_by_code, may_spill, narrow_products, spills_in_inner_loops
from benchmarks.aot.sass import parsed

KERNELS = (
    *("stats", "grad", "fused", "single_pass", "diverge", "teacher_fused"),
    *("dot", "combine", "scale"),
)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def aot(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.aot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**plain, **more})


@pytest.mark.slow
def test_every_kernel_keeps_the_rules_on_every_target() -> None:
    done = aot("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:-1]]
    assert {(line[0], line[1]) for line in lines} >= {(t, k) for t in TARGETS for k in KERNELS}
    for line in lines:
        registers, spilled, _shared, warps = map(int, line[-4:])
        assert 0 < registers <= 512
        assert spilled <= may_spill(line[0], f"{line[1]}_kernel")
        assert warps in (1, 2, 4, 8, 16)
    for loads in ("descriptors", "pointers"):
        assert any(loads in line for line in lines)


def test_it_refuses_interpreted_kernels() -> None:
    done = aot("--quick", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "error: TRITON_INTERPRET is set" in done.stderr


def test_it_refuses_an_unknown_target() -> None:
    done = aot("--target", "sm_1")
    assert done.returncode == 2
    assert "error: nothing to compile" in done.stderr


@pytest.mark.parametrize(
    ("code", "arch", "broken"),
    [
        ("\tadd.f64 \t%fd1, %fd2, %fd3;", "sm_90", "double precision: .f64"),
        ("\t@%p1 atom.global.add.f32 \t%f1, [%rd1], %f2;", "sm_90", "an atomic: @%p1 atom."),
        ("\tred.global.add.f32 \t[%rd1], %f2;", "sm_80", "an atomic: red."),
        ("\tmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_80", "TF32: .tf32"),
        ("\tv_add_f64 v[0:1], v[2:3], v[4:5]", "gfx942", "double precision: v_add_f64"),
        ("\tglobal_atomic_add_f32 v0, v1, s[0:1]", "gfx942", "an atomic: global_atomic"),
        ("\tredux.sync.max.s32 %r1, %r2, %r3;\n\tadd.f32 %f1, %f2, %f3;\n\tmov.b64 %rd1, %rd2;", "sm_90", None),
    ],
)
def test_forbidden_instructions_are_noticed(code: str, arch: str, broken: str | None) -> None:
    assert broken_by_code(code, arch) == ([] if broken is None else [broken])


def test_a_narrow_product_of_a_row_and_its_stride_is_noticed() -> None:
    narrow = """
    %pid = tt.get_program_id x : i32 loc(#loc)
    %at = arith.muli %pid, %stride_n : i32 loc(#loc)
    """
    assert narrow_products(narrow) == ["a product in 32 bits: %stride_n * %pid"]
    of_teacher = narrow.replace("%stride_n", "%teacher_stride_n")
    assert narrow_products(of_teacher) == ["a product in 32 bits: %teacher_stride_n * %pid"]
    spread = """
    %pid = tt.get_program_id x : i32 loc(#loc)
    %range = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32> loc(#loc)
    %first = tt.splat %pid : i32 -> tensor<4xi32> loc(#loc)
    %rows = arith.addi %first, %range : tensor<4xi32> loc(#loc)
    %stride = tt.splat %stride_n : i32 -> tensor<4xi32> loc(#loc)
    %at = arith.muli %rows, %stride : tensor<4xi32> loc(#loc)
    """
    assert narrow_products(spread) == ["a product in 32 bits: %stride_n * %rows"]


def test_a_narrow_product_within_a_tile_is_none() -> None:
    within = """
    %range = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32> loc(#loc)
    %left = tt.splat %n : i32 -> tensor<4xi32> loc(#loc)
    %rows = arith.minsi %range, %left : tensor<4xi32> loc(#loc)
    %stride = tt.splat %stride_n : i32 -> tensor<4xi32> loc(#loc)
    %at = arith.muli %rows, %stride : tensor<4xi32> loc(#loc)
    """
    assert narrow_products(within) == []
    wide = """
    %pid = tt.get_program_id x : i32 loc(#loc)
    %row = arith.extsi %pid : i32 to i64 loc(#loc)
    %stride = arith.extsi %stride_n : i32 to i64 loc(#loc)
    %at = arith.muli %row, %stride : i64 loc(#loc)
    """
    assert narrow_products(wide) == []


@pytest.mark.parametrize(("place", "found"), [(0, False), (2, False), (4, True), (6, False), (8, False)])
def test_spills_in_inner_loops_are_noticed(place: int, found: bool) -> None:
    """A loop in a loop, and a spill before both, in the outer one ahead of the inner, in the inner one, and so on."""
    code = ["MOV R1, R2", ".L_1:", "MOV R2, R3", ".L_2:", "FADD R2, R2, R1", "@P0 BRA `(.L_2)"]
    code += ["FMUL R1, R2, R2", "@P1 BRA `(.L_1)", "EXIT"]
    code.insert(place, "STL [R1], R5")
    lines = (x if x.endswith(":") else f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(code))
    assert spills_in_inner_loops(parsed("\n".join(lines))) == found


def test_a_child_imports_the_release_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_command, "FOLDER", tmp_path)
    assert aot_command.environment(version("triton")).get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    package = tmp_path / "triton-0.0.1" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.0.1'")
    (package.parent / ".installed").touch()
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, env=aot_command.environment("0.0.1"))
    assert done.stdout.strip() == "0.0.1", done.stderr
