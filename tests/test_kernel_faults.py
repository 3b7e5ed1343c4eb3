"""The list of planted faults (`kernel_faults.py`) fits the sources, and its runner tells caught
from not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernel_faults import FAULTS
from tests.support.planted import ROOT, survives

QUICK = ("tests/backends/triton/test_triton_rows.py", "-k", "strided")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_still_has_its_place(fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.old != fault.new
    assert all((ROOT / name).exists() for name in fault.tests if name.startswith("tests/"))


@pytest.mark.slow
def test_the_runner_tells_caught_from_not() -> None:
    fault = replace(next(f for f in FAULTS if "gradient stored" in f.name), tests=QUICK)
    assert not survives(fault)[0]
    assert survives(replace(fault, new=fault.old))[0]
    assert survives(replace(fault, tests=("tests/test_there_is_no_such_file.py",)))[
        0
    ]  # proves nothing
