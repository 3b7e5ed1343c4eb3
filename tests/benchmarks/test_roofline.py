"""Machine code taken apart: kernels cost what docs/roofline.md says, and a fault in a loop is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.aot.roofline import ctas_per_sm
from benchmarks.aot.sass import LOADS, inner_loops, moved, parsed
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
def test_every_kernel_costs_what_the_document_says() -> None:
    done = roofline()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    assert done.stdout.endswith("0 of 21 kernels are not as in roofline.md\n")


@pytest.mark.slow
def test_a_select_more_in_a_loop_is_noticed(tmp_path: Path) -> None:
    plant(SELECT, tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "roofline.md", tmp_path / "docs")
    done = roofline("--case", "stats all extras", "--workers", "1", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN: expected | stats | all extras" in done.stdout


def test_it_refuses_what_it_cannot_do() -> None:
    for arguments, said, more in (
        ((), "error: TRITON_INTERPRET is set", {"TRITON_INTERPRET": "1"}),
        (("--case", "stats", "--update"), "error: --update writes all cases", {}),
    ):
        done = roofline(*arguments, **more)
        assert done.returncode == 2
        assert said in done.stderr


LOOPS = """
stats_kernel:
.text.stats_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P4 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.64 [R35], desc[UR14][R2.64], P5 ;
        /*0030*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0040*/              @!P4 BRA `(.L_x_2) ;
        /*0050*/              @!P4 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR6], R194 ;
        /*0070*/              @!P3 BRA `(.L_x_3) ;
        /*0080*/                   EXIT ;
"""


def test_loops_are_told_apart() -> None:
    """The inner one of two, and one that only waits."""
    code = parsed(LOOPS)
    assert [x.name for x in code[:3]] == ["LDC", "LDG", "LDGSTS"]
    assert [[x.name for x in loop] for loop in inner_loops(code)] == [["LDGSTS", "LDG", "BRA"], ["SYNCS", "BRA"]]
    (reading,) = inner_loops(code, lambda x: x.name in LOADS)
    assert (moved(reading, LOADS), moved(code, LOADS)) == (8 + 2, 16 + 8 + 2)
    with pytest.raises(ValueError, match="no instructions"):
        parsed("nvdisasm fatal")


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "ctas"),
    [
        (48, 256, 16384, 5),
        (79, 256, 16384, 3),
        (30, 256, 0, 8),  # by threads
        (255, 256, 147480, 1),  # by registers, and by shared memory
        (32, 64, 0, 32),  # by programs
        (32, 128, 116 * 1024, 1),  # by the KiB that the system takes
    ],
)
def test_programs_of_a_multiprocessor(registers: int, threads: int, shared: int, ctas: int) -> None:
    assert ctas_per_sm(registers, threads, shared) == ctas
