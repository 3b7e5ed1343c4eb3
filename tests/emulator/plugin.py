"""A pytest plugin: every test is run with Triton's kernels emulated, for each architecture.

``make emulate`` passes it; it must be there before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.emulator.launch import Emulation

os.environ["TRITON_INTERPRET"] = "0"  # tests/conftest.py would set it
ARCHES = ("sm_80", "sm_90")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--arch", action="append", choices=ARCHES, help="emulate this one alone; may be repeated"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: of the shortest part")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("emulation", metafunc.config.getoption("arch") or ARCHES, indirect=True)


@pytest.fixture(autouse=True)
def emulation(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    """Kernels run as compiled for the architecture that the test's name ends with."""
    from tests.emulator.launch import emulated

    with emulated(request.param) as found:
        yield found
