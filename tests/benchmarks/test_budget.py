"""The budget of a step on a GPU, from counted launches and bytes: each case below its limit, and cliffs show in it."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from benchmarks.aot import budget
from benchmarks.aot.budget import SHAPES, Shape
from benchmarks.aot.predict import DEVICES
from benchmarks.aot.tape import Event
from grpo_kernels.engine import device

H200 = DEVICES["H200"]

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")  # of torch.autocast("cuda", enabled=False)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_step_is_near_its_products(shape: Shape) -> None:
    found = budget.budget(shape)
    assert 1.0 < found.ratio <= shape.most
    assert found.products == pytest.approx(found.limit, rel=0.03)  # nothing but what the case needs is multiplied


def test_rows_that_are_not_aligned_would_show() -> None:
    with mock.patch.dict(device._KINDS, cuda=replace(device.CUDA, width_multiple=1)):
        assert budget.budget(Shape(n=1024, v=budget.ODD_V)).ratio > 2


def test_a_product_is_the_slower_of_its_operations_and_its_bytes() -> None:
    flops = 2 * 1024 * 1024 * 1024
    busy = Event("product", "mm", flops, (1024, 1024, 1024), 10, 10)
    assert budget.product_ms(busy, H200) == pytest.approx(1e3 * flops / H200.products)
    starved = Event("product", "mm", flops, (1024, 1024, 1024), 10**10, 0)
    assert budget.product_ms(starved, H200) == pytest.approx(1e13 / H200.dram)
    adds = Event("product", "addmm", flops, (1024, 1024, 1024), 10, 10)
    assert budget.product_ms(adds, H200) == pytest.approx(1e3 * (flops / H200.products + 4 * 1024**2 / H200.dram))


def test_row_kernels_are_predicted_by_what_they_write() -> None:
    fused = budget.rows_ms(Event("rows", "fused", 0, (1024, 151936), 8 * 1024 * 151936, 2 * 1024 * 151936), H200)
    stats = budget.rows_ms(Event("rows", "stats", 0, (1024, 151936), 4 * 1024 * 151936, 0), H200)
    no_gradient = budget.rows_ms(Event("rows", "fused", 0, (1024, 151936), 8 * 1024 * 151936, 0), H200)
    assert 0 < stats == no_gradient < fused
    assert torch.float32.itemsize * 1024 * 151936 / H200.dram * 1e3 <= stats
