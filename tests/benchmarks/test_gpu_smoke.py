"""The smoke test of ``python -m benchmarks.gpu``, at small sizes in Triton's interpreter; its real ones, launched."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from benchmarks.gpu import outside, smoke, summary
from benchmarks.process import ROOT
from benchmarks.run import Results
from grpo_kernels.backends import triton_rows

CPU = torch.device("cpu")
GROUPS = smoke.checks(smoke.DRY_RUN, CPU)
CHECKS = {name: check for group in GROUPS for name, check in group.items()}
ABSENT = [name for name in CHECKS if "out_dtype" in name]


def kernels() -> set[str]:
    """What is launched: every function of the backend that Triton compiles and that is named a kernel."""
    modules = [
        importlib.import_module(f"{triton_rows.__name__}.{x.name}") for x in pkgutil.iter_modules(triton_rows.__path__)
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


@contextmanager
def launched() -> Iterator[set[str]]:
    """The names of the kernels that the interpreter runs inside."""
    names: set[str] = set()
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with mock.patch.object(interpreter.GridExecutor, "__call__", noted):
        yield names


def test_every_kernel_is_checked_and_right() -> None:
    """A new kernel that no check launches fails here."""
    with launched() as names:
        for name, check in CHECKS.items():
            if name not in ABSENT:
                assert check()["status"] == "ok", name
    assert kernels() == names
    assert {"stats_kernel", "dot_kernel", "combine_kernel"} <= names


def test_the_sanitizers_watch_every_kernel() -> None:
    """By the names of the checks, which `test_every_kernel_is_checked_and_right` runs."""
    assert {name.partition(",")[0] for name in outside.watched("memcheck")} == {
        name.partition(",")[0] for name in CHECKS if name != "bandwidth"
    }
    assert {name.partition(",")[0] for name in outside.watched("racecheck")} == set(smoke.KERNELS)
    assert any(vocab > 2 * 4096 and vocab % 4096 for vocab in smoke.SANITIZED.vocabs)


@pytest.mark.parametrize("kernel", ["grad", "single_pass"])
def test_a_wrong_kernel_is_noticed(kernel: str) -> None:
    """An element in the tail of a row that is off by a hundredth; one that is written past its end."""
    check = CHECKS[f"{kernel}, V 1100, float32"]
    launch = getattr(triton_rows, f"launch_{kernel}")

    def wrong(place: int) -> Any:
        def launched(chunk: Any, *args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("out", args[3] if kernel == "grad" else args[0])
            found = launch(chunk, *args, **kwargs)
            if place < out.shape[1]:
                out[-1, place] *= 1.01
            else:
                out.as_strided((1,), (1,), place)[:] = 0.0
            return found

        return launched

    for place in (1099, 1100):
        with mock.patch.object(triton_rows, f"launch_{kernel}", wrong(place)):
            assert check()["status"] == "wrong", place


CHILD = """
import json, sys, time
say = lambda name, **found: print(json.dumps({"name": name, **found}), flush=True)
for i, name in enumerate(x for x in sys.argv[1:] if x != "--dry-run"):
    say(name, status="running")
    if i == 2:
        print("a warning", flush=True)
        time.sleep(60) if HANGS else sys.exit(1)
    say(name, status="absent" if i else "ok", reason="why")
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_what_ends_early_is_said(hangs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result is written when it comes; the check that ended the process and those after it are no pass."""
    results = Results(tmp_path / "results.json", dry_run=True)
    command = [sys.executable, "-c", CHILD.replace("HANGS", str(hangs))]
    smoke.run_smoke(results, seconds=6.0 if hangs else 60.0, toy=True, command=command)
    data = json.loads(results.path.read_text())
    statuses = [x["status"] for x in data["smoke"]["checks"].values()]
    assert statuses == ["ok", "absent", "hung" if hangs else "crashed", *["not run"] * (len(CHECKS) - 3)]
    assert data["smoke"]["status"] == "failed"
    assert not summary.is_well(data)
    said = capsys.readouterr().out
    assert "smoke: stats, V 1100, float32: ok, reason why\n" in said
    assert "a warning\n" in said
    assert f"smoke: of {len(CHECKS)} checks 1 ok, 1 absent, 1 {statuses[2]}, {len(CHECKS) - 3} not run" in said
    assert sum("not run: smoke" in line for line in summary.did_not_run(data)) == len(CHECKS) - 2


PRETENDED = """
from types import SimpleNamespace
import pytest, torch, triton
from triton.backends.compiler import GPUTarget
from benchmarks.aot.launches import caught
from tests.support import pretend_gpu
from benchmarks.gpu import smoke
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
with pytest.MonkeyPatch.context() as patch, pretend_gpu.pretended(patch, memory=False), caught() as launches:
    for group in smoke.checks(smoke.ON_GPU, pretend_gpu.GPU)[:-1]:
        for name, check in group.items():
            check()
            print(name)
print(*sorted({x.kernel.__name__ for x in launches}))
"""


def test_the_sizes_of_a_gpu_launch_every_kernel() -> None:
    """Every check but the bandwidth, at its real size, on tensors without memory that say they are on a GPU."""
    plain = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PRETENDED], cwd=ROOT, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *names, launches = done.stdout.splitlines()
    assert names == [name for group in smoke.checks(smoke.ON_GPU, CPU)[:-1] for name in group]
    assert set(launches.split()) == kernels()
