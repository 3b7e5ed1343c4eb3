"""What every test starts from: one thread, a fixed seed, and uninitialized memory that is NaN."""

from __future__ import annotations

import importlib.util
import os
import random

# Before torch and the Hugging Face libraries are imported, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

# before Triton is imported: its kernels then run in its interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch.utils import deterministic

from grpo_kernels.backends import choose_backend
from grpo_kernels.base.checks import WARNED
from tests.support import interpreter
from tests.support.chosen import Choose, choose_by
from tests.support.ranks import Ranks

SEED = 20240203
NO_GPU = "needs a CUDA or ROCm device"

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    interpreter.prepare()


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped without one. Slow in the interpreter are two of three of what
    every backend runs, and what tests/gpu runs there."""
    of_all = [x for x in items if hasattr(x, "callspec") and "every_backend" in x.fixturenames]
    interpreted = [x for x in of_all if x.callspec.params["every_backend"] == "triton"]
    for i, item in enumerate(interpreted):
        if i % 3:
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
            elif item.path.parent.name == "gpu":
                item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats.get("skipped", [])
    skipped = [report for report in stats if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests marked gpu did NOT run: {NO_GPU}", yellow=True
        )


@pytest.fixture
def forget_warnings() -> Callable[[], None]:
    """Each warning comes again, which comes once for a line; call it to have it come once more."""
    WARNED.clear()
    return WARNED.clear


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """One thread, so that sums have one order; the same random numbers whatever ran before."""
    torch.set_num_threads(1)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> Iterator[None]:
    """`torch.empty` and its kin come full of NaN (integers: the largest), so that reading what
    nobody wrote shows."""
    before, filled = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    # the filling needs it; determinism itself is not tested
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    yield
    deterministic.fill_uninitialized_memory = filled
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(params=["torch", "triton", "cpp"])
def every_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test with each row backend in the place of "auto"; float64, which Triton's lacks, runs in
    torch instead."""

    def make(choose: Choose) -> Choose:
        def chosen(name: str, device: torch.device, dtype: torch.dtype = torch.float32):
            other = "torch" if dtype == torch.float64 else "triton"
            wanted = other if request.param == "triton" else request.param
            return choose(wanted if name == "auto" else name, device, dtype)

        return chosen

    choose_by(monkeypatch, make)
    return request.param


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes for all tests of a file: what they import may take longer than the tests."""
    with Ranks(2) as made:
        yield made


@pytest.fixture(scope="session")
def cpp_library() -> None:
    """The C++ row kernels, loaded, or a failure that says why not."""
    choose_backend("cpp", torch.device("cpu"))
