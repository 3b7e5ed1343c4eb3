"""The C++ kernels' elementary functions, tried by a small program (csrc/elementary.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from grpo_kernels.backends.cpp_rows import build

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def elementary(cpp_library: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled as the library is, for the best instruction set of this processor."""
    program = tmp_path_factory.mktemp("cpp") / "elementary"
    rows = f"rows_{torch.ops.grpo_kernels_cpp.isa('')}.cpp"
    command = [
        *build.compiler(), *(flag for flag in build.FLAGS if flag != "-shared"), f'-DROWS="{rows}"',
        f"-I{build.source_folder()}", "-isystem", str(Path(torch.__file__).with_name("include")),
        str(Path(__file__).parents[2] / "csrc" / "elementary.cpp"), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize(
    ("name", "step", "bound"),
    [
        ("exp", 61, 2.0),
        pytest.param("exp", 1, 2.0, marks=pytest.mark.slow),
        ("exp_below_0", 61, 2.0),
        ("log1p", 61, 2.0),
        ("mixture", 61, 12.0),
        ("phi", 211, 11.0),
        ("chi", 211, 15.0),
        ("tanh", 61, 2.0),
        ("tanh_slope", 61, 5.0),
        ("from_bf16", 1, 0.0),
        ("from_f16", 1, 0.0),
        ("to_bf16", 1, 0.0),
        ("to_f16", 1, 0.0),
    ],
)
def test_every_float(elementary: Path, name: str, step: int, bound: float) -> None:
    """Each `step`th bit pattern, NaN and infinities too: the worst error, in last places."""
    done = subprocess.run([elementary, name, str(step)], capture_output=True, text=True, check=True)
    print(f"{name}: {done.stdout.strip()} ulp")
    assert float(done.stdout.split()[0]) <= bound, done.stdout
