"""``tests/multi_gpu.py``, which is for GPUs, over gloo: it compares, tabulates, and notices an error."""

from __future__ import annotations

import math

import torch

from tests import multi_gpu
from tests.multi_gpu import Row
from tests.support.parallel_cases import SETUPS
from tests.support.ranks import run_ranks


def test_the_quick_cases_pass_on_a_cpu_and_make_a_table() -> None:
    for rows in run_ranks(multi_gpu.compare, 2, "cpu", True):
        assert all(row.passed for row in rows), rows
        table = multi_gpu.report(rows, 2, "cpu")
        names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:]]
        assert names == [*SETUPS, multi_gpu.SHARDED, "FSDP2, mixed precision"]
        assert table.startswith("2 x CPU, gloo")


def test_an_error_above_its_bound_is_not_hidden_by_others() -> None:
    rows = [Row("DDP", "a", torch.float32, error) for error in (1e-7, math.nan, 2e-7)]
    assert not multi_gpu.worst(rows).passed
    far = Row("DDP", "b", torch.float32, 2e-5)
    assert multi_gpu.worst([rows[0], far]) == far
    assert "| DDP | float32 | 2 | b | 2.0e-05 | above 1e-05 |" in multi_gpu.report([rows[0], far], 2, "cpu")
