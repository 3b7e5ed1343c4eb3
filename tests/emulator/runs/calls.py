"""Whole calls with a head as on a GPU: 16-bit operands, products by torch, kernels emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from grpo_kernels.engine import gemm, workspace
from tests.emulator.launch import Emulation
from tests.support.case_builder import Case, make_case
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines, run
from tests.support.tolerance import assert_matches

quick = pytest.mark.quick


def product(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
    """16-bit operands and sums in fp32, which torch has for GPUs alone."""
    assert (left.itemsize, right.itemsize, out.dtype) == (2, 2, torch.float32)
    found = left.float() @ right.float()
    out.copy_(out + found if add else found)


@pytest.fixture(autouse=True)
def _like_a_gpu() -> Iterator[None]:
    kind = replace(
        workspace.CUDA, free=None, is_capturing=lambda: False, fewest_rows=16, row_multiple=16,
    )  # fmt: skip
    with (
        mock.patch.dict(workspace._KINDS, {"cpu": kind}),
        mock.patch.object(gemm, "mixed_mm", product),
    ):
        yield


def case_of(name: str, **options) -> Case:
    given = {"b": 2, "t": 6, "h": 32, "v": 9001, "dtype": torch.bfloat16, "beta": 0.04} | options
    return make_case(name, **given)


def check(case: Case, engine: str) -> None:
    assert engine in allowed_engines(case)
    output, grads = run(case, engine, backend="triton")
    assert output.engine == engine
    assert_matches(output, grads, reference_loss(case), case)


@pytest.mark.parametrize(
    ("engine", "frozen"),
    [
        pytest.param("one_pass", (), marks=quick),
        pytest.param("two_pass", (), marks=quick),
        pytest.param("lean", (), marks=quick),
        pytest.param("frozen", ("weight",), marks=quick),
        pytest.param("score", ("weight", "hidden"), marks=quick),
        ("one_pass", ("weight",)),
        ("two_pass", ("hidden",)),
    ],
)
def test_every_engine(engine: str, frozen: tuple[str, ...], emulation: Emulation) -> None:
    check(case_of(f"emulated {engine}", frozen=frozen), engine)
    assert emulation.launches


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{"final_logit_softcapping": 20.0, "entropy_coef": 0.01}, {"bias": True}], ids=str
)
def test_more_of_the_head(engine: str, dtype: torch.dtype, options: dict) -> None:
    check(case_of(f"emulated {engine} {options}", dtype=dtype, temperature=0.8, **options), engine)


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_a_divergence_from_a_teacher(engine: str) -> None:
    check(case_of(f"emulated teacher {engine}", teacher=0.3, kl_estimator="full"), engine)
