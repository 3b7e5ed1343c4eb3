"""The C++ row kernels where logits are infinite, no numbers, equal, far apart, capped, or very many."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.backends.cpp_rows import CppRows
from tests.support.special_suite import SpecialSuite, check_many_rows

pytestmark = pytest.mark.usefixtures("cpp_library")


class TestFloat(SpecialSuite):
    kernels = CppRows()
    device = "cpu"
    block = 32
    vocabs = (3, 8, 16, 17, 31, 32, 33, 50, 65, 300)
    infinity_is_nan = True


class TestDouble(TestFloat):
    dtype = torch.float64


class TestWide(TestFloat):
    """Rows of more than one tile."""

    block = 4096
    vocabs = (4097, 8200)


def test_many_rows() -> None:
    check_many_rows(CppRows(), "cpu")
