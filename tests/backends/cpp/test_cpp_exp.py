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


BOUNDS = {  # name -> units in the last place
    "exp": 2.0, "exp_below_0": 2.0, "log1p": 2.0, "mixture": 12.0, "phi": 11.0, "chi": 15.0,
    "tanh": 2.0, "tanh_slope": 5.0, "from_bf16": 0.0, "from_f16": 0.0, "to_bf16": 0.0,
    "to_f16": 0.0,
}  # fmt: skip
# Of 16 bits every pattern is tried; of 32 bits each 601st, and in the slow tests these steps or 61.
STEPS = {"from_bf16": 1, "from_f16": 1}
SLOW_STEPS = {"exp": 1, "phi": 211, "chi": 211, "to_bf16": 1, "to_f16": 1}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((name, STEPS.get(name, 601)) for name in BOUNDS),
        *(
            pytest.param(name, SLOW_STEPS.get(name, 61), marks=pytest.mark.slow)
            for name in BOUNDS
            if name not in STEPS
        ),
    ],
)
def test_every_float(elementary: Path, name: str, step: int) -> None:
    """Each `step`th bit pattern, NaN and infinities too: the worst error, in last places."""
    done = subprocess.run([elementary, name, str(step)], capture_output=True, text=True, check=True)
    print(f"{name}: {done.stdout.strip()} ulp")
    assert float(done.stdout.split()[0]) <= BOUNDS[name], done.stdout
