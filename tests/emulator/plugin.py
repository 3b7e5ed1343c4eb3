"""A pytest plugin: every test is run with Triton's kernels emulated, for each architecture.

``python -m tests.emulator`` passes it; it must be there before Triton is imported.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
    config.addinivalue_line("markers", "quick: of the part that `make test` runs")
    config.pluginmanager.register(_Sums(), "emulated sums")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("emulation", metafunc.config.getoption("arch") or ARCHES, indirect=True)


@pytest.fixture(autouse=True)
def emulation(request: pytest.FixtureRequest) -> Iterator[Emulation]:
    """Kernels run as compiled for the architecture that the test's name ends with."""
    from tests.emulator.launch import emulated

    with emulated(request.param) as found:
        yield found
    tally = found.tally
    request.node.user_properties.append(
        (
            "emulated",
            (
                dict(tally.launches),
                [*map(list, tally.variants)],
                dict(tally.executed),
                tally.running,
                tally.compiling,
            ),
        )
    )


class _Sums:
    """What all tests ran, in every process."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self.variants: dict[tuple[str, ...], None] = {}
        self.running = self.compiling = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, found in report.user_properties if report.when == "teardown" else ():
            if name == "emulated":
                launches, variants, executed, running, compiling = found
                self.launches.update(launches)
                self.executed.update(executed)
                self.variants |= dict.fromkeys(map(tuple, variants))
                self.running += running
                self.compiling += compiling

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of_kernel = Counter(name for _arch, name, *_rest in self.variants)
        for name, launches in sorted(self.launches.items()):
            terminalreporter.write_line(
                f"emulated {name}: {of_kernel[name]} variants, {launches} launches"
            )
        steps, opcodes = sum(self.executed.values()), len(self.executed)
        terminalreporter.write_line(
            f"emulated {steps} instructions of {opcodes} opcodes in {self.running:.0f} s; "
            f"{len(self.variants)} variants compiled in {self.compiling:.0f} s"
        )
