"""ROCm's products of 16-bit operands with fp32 results: used where they work and are right, on a pretended device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Run, linear_logprob
from grpo_kernels.engine import probe
from grpo_kernels.engine.device import CUDA, ROCM, device_of
from tests.support import pretend_gpu
from tests.support.pretend_gpu import OnGPU, Waits, pretended

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*CUDA is not available"
)  # of torch.autocast("cuda", enabled=False)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(probe, "_works", {})
    with pretended(monkeypatch) as waits:
        yield waits


def product(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[torch.dtype]:
    """`change` in the place of the library's product; returns the dtypes of the operands it is called with."""
    right, seen = pretend_gpu._wide_product, []

    def changed(*operands: Any, out: Tensor, **options: Any) -> Tensor:
        tensors = [x for x in operands if isinstance(x, Tensor)]
        seen.append(tensors[-1].dtype)
        return change(right, *tensors, out=out)

    monkeypatch.setattr(pretend_gpu, "_wide_product", changed)
    return seen


def as_it_is(right: Any, *operands: Any, **options: Any) -> Tensor:
    return right(*operands, **options)


def absent(right: Any, *operands: Any, **options: Any) -> Tensor:
    raise RuntimeError(
        "gemm input type at::BFloat16 and output type float not allowed with ROCm\nmore"
    )


def rounded(right: Any, *operands: Any, out: Tensor, **options: Any) -> Tensor:
    """What a library does that sums in fp32 and writes 16 bits."""
    return out.copy_(right(*operands, out=out, **options).to(BF16))


def forgets_to_add(right: Any, *operands: Any, **options: Any) -> Tensor:
    return right(*operands[-2:], **options)


def ignores_strides(right: Any, *operands: Any, **options: Any) -> Tensor:
    *start, a, b = operands
    return right(*start, a.t().contiguous().view(a.shape) if a.stride(0) == 1 else a, b, **options)


def test_products_that_are_right_are_used(
    rocm: Waits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = product(monkeypatch, as_it_is)
    caplog.set_level(logging.INFO, logger="grpo_kernels")
    assert device_of(torch.device("cuda")) is ROCM
    assert ROCM.mixed_products(BF16)
    (said,) = [x.getMessage() for x in caplog.records if x.name == probe.__name__]
    assert said == "products of torch.bfloat16 operands with float32 results: used"
    tried = len(seen)
    assert ROCM.mixed_products(BF16)
    assert len(seen) == tried > 0  # once
    hidden, weight = OnGPU(torch.randn(4, 8).to(BF16)), OnGPU(torch.randn(20, 8).to(BF16))
    linear_logprob(
        hidden, weight, OnGPU(torch.zeros(4, dtype=torch.long)), run=Run(backend="torch")
    )
    assert seen[tried:] == [BF16]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (absent, "gemm input type at::BFloat16 and output type float not allowed with ROCm)"),
        (rounded, "a product of integers is off by up to"),
        (forgets_to_add, "a product of integers is off by up to 1)"),
        (ignores_strides, "a product of integers is off by up to"),
    ],
)
def test_products_that_are_wrong_are_not_used(
    rocm: Waits,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Any,
    why: str,
) -> None:
    seen = product(monkeypatch, change)
    caplog.set_level(logging.INFO, logger="grpo_kernels")
    assert not ROCM.mixed_products(BF16)
    assert f"not used, operands are converted to float32 ({why}" in caplog.text
    tried = len(seen)
    hidden, weight = (torch.randn(n, 8).to(BF16) for n in (4, 20))
    ids = torch.zeros(4, dtype=torch.long)
    found = linear_logprob(OnGPU(hidden), OnGPU(weight), OnGPU(ids), run=Run(backend="torch")).logps
    assert len(seen) == tried
    want = (hidden.float() @ weight.float().t()).log_softmax(1)[:, 0]
    assert torch.allclose(found.data_here, want, atol=1e-5)


def test_each_dtype_is_tried_by_itself(rocm: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bf16(right: Any, *operands: Any, **options: Any) -> Tensor:
        return (absent if operands[-1].dtype == BF16 else as_it_is)(right, *operands, **options)

    product(monkeypatch, no_bf16)
    assert ROCM.mixed_products(FP16)
    assert not ROCM.mixed_products(BF16)


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_works", {})
    with monkeypatch.context() as patch, pretended(patch, capturing=True):
        assert not ROCM.mixed_products(BF16)
    with pretended(monkeypatch):
        assert ROCM.mixed_products(BF16)


def test_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = product(monkeypatch, as_it_is)
    assert CUDA.mixed_products(BF16)
    assert seen == []
