"""The C++ row kernels' divergences from a teacher: in float and double, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.backends.cpp_rows import CppRows
from tests.support.divergence_suite import FusedDivergenceSuite

pytestmark = pytest.mark.usefixtures("cpp_library")


class TestFloat(FusedDivergenceSuite):
    device = "cpu"

    def backend(self) -> CppRows:
        return CppRows()


class TestDouble(TestFloat):
    dtype = torch.float64
