"""bf16 operands and an fp32 result on a CPU: sums as exact as of converted operands, and what engines make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import Run, grpo_loss
from grpo_kernels.engine import device, mixed_mm

has_mkl = pytest.mark.skipif(mixed_mm._gemm() is None, reason="torch was built without MKL")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@has_mkl
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (16, 32, 700), (5, 1, 9), (1, 40, 33), (130, 7, 1), (3, 0, 4), (0, 3, 4)],
)
def test_products_are_summed_in_fp32(m: int, k: int, n: int, add: bool) -> None:
    """Of rows or columns that are contiguous, apart or strided, into rows that lie apart."""
    wide_left, wide_right = numbers(m, 2 * k + 3), numbers(k, 2 * n + 3)
    lefts = [numbers(m, k), numbers(k, m).t(), wide_left[:, 2 : k + 2], wide_left[:, : 2 * k : 2]]
    rights = [
        numbers(k, n),
        numbers(n, k).t(),
        wide_right[:, 1 : n + 1],
        wide_right[:, : 2 * n : 2],
    ]
    for left, right in zip(lefts, rights, strict=True):
        for out in (torch.ones(m, n), torch.ones(m, n + 5)[:, :n], torch.ones(n, m).t()):
            mixed_mm.mixed_mm(left, right, out, add=add)
            exact = left.double() @ right.double() + float(add)
            size = left.double().abs() @ right.double().abs() + 1.0
            assert bool(((out - exact).abs() <= 2.0**-22 * size).all())


@has_mkl
def test_what_is_not_finite_surfaces() -> None:
    left, right, out = numbers(20, 30), numbers(30, 40), torch.empty(20, 40)
    left[3, 5], left[7, 2] = torch.nan, torch.inf
    mixed_mm.mixed_mm(left, right, out)
    assert out[3].isnan().all()
    assert out[7].isinf().all()
    assert out[[i for i in range(20) if i not in (3, 7)]].isfinite().all()


@has_mkl
def test_a_row_has_the_same_bits_among_any_others() -> None:
    """From 16 on, the fewest that a product is done with."""
    left, right = numbers(300, 96), numbers(5000, 96).t()
    every = torch.empty(300, 5000)
    mixed_mm.mixed_mm(left, right, every)
    for start, stop in ((0, 16), (3, 20), (17, 64), (100, 228), (40, 297)):
        some = torch.empty(stop - start, 5000)
        mixed_mm.mixed_mm(left[start:stop], right, some)
        assert torch.equal(some, every[start:stop])


@has_mkl
def test_operations_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        mixed_mm.mixed_mm(numbers(3, 5), numbers(5, 7), torch.empty(3, 7))
    assert counter.get_total_flops() == 2 * 3 * 5 * 7


def test_which_processors_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in (False, True):
        monkeypatch.setattr(mixed_mm, "_has_tiles", lambda tiles=tiles: tiles)
        assert mixed_mm.multiplies(torch.bfloat16) == (tiles and mixed_mm._gemm() is not None)
        assert not mixed_mm.multiplies(torch.float16)
        assert not mixed_mm.multiplies(torch.float32)
    monkeypatch.setattr(mixed_mm, "_gemm", lambda: None)
    assert not mixed_mm.multiplies(torch.bfloat16)


@has_mkl
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_engines_agree_with_converted_operands(
    monkeypatch: pytest.MonkeyPatch, weight_dtype: torch.dtype
) -> None:
    """Forward to the rounding of fp32, backward to that of d logits; a weight of fp32 is converted slice by slice."""
    hidden, weight = numbers(2, 40, 48), numbers(3000, 48).to(weight_dtype)
    ids = torch.randint(3000, (2, 40))
    found = []
    for mixed in (False, True):
        monkeypatch.setitem(
            device._KINDS,
            "cpu",
            replace(device.CPU, mixed_products=lambda dtype, mixed=mixed: mixed),
        )
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            out = grpo_loss(
                *leaves, ids, None, torch.tensor([1.0, -0.5]), run=Run(workspace_bytes=2**20)
            )
        out.loss.backward()
        found.append((out.per_token_logps, [x.grad.double() for x in leaves]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=2e-5)
    for x, y in zip(found[0][1], found[1][1], strict=True):
        assert 0 < float((x - y).norm()) <= 3e-3 * float(x.norm())
