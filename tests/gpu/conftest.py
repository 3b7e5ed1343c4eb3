"""Tests with two forms: on a GPU at sizes that matter; on a CPU, in Triton's interpreter, tiny.

The second tells whether the test itself is right before a GPU is at hand. What a CPU does not have
takes `gpu` instead of `device`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

LOST = 70  # exit status


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def as_in_use() -> Iterator[None]:
    """Without the suite's deterministic mode, whose operations wait and allocate."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(False)
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(autouse=True)
def _device_still_answers() -> Iterator[None]:
    """After an error that stays with the process no later test could pass in it."""
    yield
    if not torch.cuda.is_available():
        return
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if os.environ.get("PYTEST_XDIST_WORKER"):  # another process takes over
            print(f"the device is lost to this process: {error}", flush=True)
            os._exit(LOST)
        pytest.exit(f"the device is lost to this process: {error}", LOST)
