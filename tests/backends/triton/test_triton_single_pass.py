"""The single pass: its statistics have the bits of `stats`, its gradient is that of `grad` up to a row's factor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, RowStats, SinglePassRowBackend
from grpo_kernels.backends.torch_rows import TorchRows

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.support.row_cases import DEVICE, EXTRAS, PLAIN, assert_same, make_transform, rows
from tests.support.row_truth import U, check, gradient, truth
from tests.support.small_tiles import SmallTiles

INF, NAN = math.inf, math.nan
TILE = RowConfig(block_n=16, block_v=16, num_warps=1, num_stages=1)
KERNELS = SmallTiles(lambda vocab: TILE)
ONE_BY_ONE = SmallTiles(lambda vocab: TILE, block_n=1)


def check_pass(
    raw: Tensor, ids: Tensor, transform: LogitTransform, dtype: torch.dtype, kernels: SmallTiles = KERNELS
) -> tuple[RowStats, Tensor]:
    """Against `stats`, with the same bits, and float64."""
    out = torch.empty_like(raw, dtype=dtype)
    stats, scale = kernels.single_pass(Chunk(raw, ids, transform), out, entropy=True, extras=EXTRAS)
    assert_same(stats, kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS))
    at = truth(raw, ids, transform)
    want, bound = gradient(at, ids, torch.ones_like(scale), None)
    kind = torch.finfo(dtype)
    # e^(z - ref) and e^(m - ref) are up to e^40: each is off by 40 u, as e^(z - m) is where z is as far below
    bound = bound + (kind.eps / 2 + 160 * U) * want.abs() + kind.tiny * scale[:, None].abs().double()
    check(f"{tuple(raw.shape)}: d raw", out.double() * scale.double()[:, None], want, bound)
    return stats, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", range(4))
def test_shapes(kind: int, dtype: torch.dtype) -> None:
    """Less than a step, steps without and with a tail; rows that do not fill a block."""
    for n, vocab in ((1, 1), (2, 3), (3, 16), (17, 17), (5, 64), (4, 75)):
        raw, ids = rows(n, vocab)
        rounded_to = torch.bfloat16 if n == 5 else None
        check_pass(raw, ids, make_transform(n, vocab, kind, rounded_to), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cap", [None, 60.0])
def test_where_the_reference_is_far_below(cap: float | None, dtype: torch.dtype) -> None:
    """How far the largest logit is above the first columns and the target decides whether a row is read again."""
    raw = torch.randn(8, 70, device=DEVICE)
    ids = torch.tensor([0, 3, 69, 40, 41, 2, 1, 1], device=DEVICE)
    for row, margin in enumerate((0.0, 30.0, 39.0, 42.0, 60.0, 95.0, 500.0)):
        raw[row, 40] += margin
    raw[7, 40:] = -INF
    transform = LogitTransform(softcap=cap)
    for kernels in (KERNELS, ONE_BY_ONE):
        _stats, scale = check_pass(raw, ids, transform, dtype, kernels)
        assert (scale == 1.0).tolist() == 4 * [False] + 3 * [True] + [False]


def test_a_row_does_not_depend_on_its_block() -> None:
    raw, ids = rows(20, 50)
    raw[::3, 30] += 80.0
    outs = [torch.empty_like(raw) for _ in range(2)]
    scales = [
        k.single_pass(Chunk(raw, ids, PLAIN), out, entropy=False)[1]
        for k, out in zip((KERNELS, ONE_BY_ONE), outs, strict=True)
    ]
    assert torch.equal(*scales)
    assert torch.equal(*outs)


def test_nearly_certain_tokens() -> None:
    """1 - p keeps its precision."""
    raw = torch.randn(3, 40, device=DEVICE)
    for row, margin in enumerate((10.0, 20.0, 80.0)):
        raw[row, 39] += margin
    for column in (39, 20):
        check_pass(raw, torch.full((3,), column, device=DEVICE), PLAIN, torch.float32)


def test_in_place_and_strided() -> None:
    for kind in (0, 3):
        raw, ids = rows(5, 75)
        transform, wide = make_transform(5, 75, kind, None), torch.full((5, 96), 77.0, device=DEVICE)
        part, ones = wide[:, :75], torch.ones(5, device=DEVICE)
        part.copy_(raw)
        out = torch.empty_like(raw)
        stats, scale = KERNELS.single_pass(Chunk(part, ids, transform), part, entropy=True)
        assert_same(stats, KERNELS.stats(Chunk(raw, ids, transform), entropy=True))
        KERNELS.grad(Chunk(raw, ids, transform), stats, ones, None, out)
        assert torch.equal(part, out)
        assert torch.equal(scale, ones)
        assert (wide[:, 75:] == 77.0).all()
        part.copy_(raw)
        other = torch.full((5, 128), 55.0, device=DEVICE, dtype=torch.bfloat16)
        _stats, scale = KERNELS.single_pass(Chunk(part, ids, transform), other[:, 3:78], entropy=True)
        want = torch.empty_like(raw, dtype=torch.bfloat16)
        assert torch.equal(KERNELS.single_pass(Chunk(raw, ids, transform), want, entropy=True)[1], scale)
        assert torch.equal(other[:, 3:78], want)
        assert torch.equal(part, raw)
        assert (other[:, :3] == 55.0).all()
        assert (other[:, 78:] == 55.0).all()


@pytest.mark.parametrize("cap", [None, 4.0])
def test_special_values(cap: float | None) -> None:
    """Infinities and NaN: what `stats` and then `grad` give, and the other rows as without them."""
    raw = torch.randn(9, 50, device=DEVICE)
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 49], device=DEVICE)
    raw[0] = -INF
    raw[1, :30] = -INF  # the target and all that the reference comes from
    raw[2, 40] = NAN
    raw[3, 3] = NAN
    raw[4, 20] = INF
    raw[5, 5] = INF
    raw[6, [20, 49]] = INF
    raw[7, :49] = -INF
    transform = LogitTransform(softcap=cap)
    stats = KERNELS.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
    by_grad = torch.empty_like(raw)
    KERNELS.grad(Chunk(raw, ids, transform), stats, torch.ones(9, device=DEVICE), None, by_grad)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty_like(raw, dtype=dtype)
        found, scale = KERNELS.single_pass(Chunk(raw, ids, transform), out, entropy=True, extras=EXTRAS)
        assert_same(found, stats, nan=True)
        d = out.double() * scale.double()[:, None]
        assert torch.equal(d.isnan(), by_grad.isnan())
        assert not d.isinf().any()
        error = (d - by_grad.double()).abs().nan_to_num()
        assert (error <= by_grad.abs().nan_to_num() * (torch.finfo(dtype).eps + 1e-5)).all()


def test_the_backend() -> None:
    """Its own tile; the protocol; what it refuses."""
    backend, torch_rows = TritonRows(), TorchRows()
    assert isinstance(backend, SinglePassRowBackend)
    assert not isinstance(torch_rows, SinglePassRowBackend)
    raw, ids = rows(3, 2100)
    out = torch.empty_like(raw, dtype=torch.bfloat16)
    stats, scale = backend.single_pass(Chunk(raw, ids, PLAIN), out, entropy=True)
    assert_same(stats, backend.stats(Chunk(raw, ids, PLAIN), entropy=True))
    by_grad, ones = torch.empty_like(raw), torch.ones_like(scale)
    backend.grad(Chunk(raw, ids, PLAIN), stats, ones, None, by_grad)
    torch.testing.assert_close(out.float() * scale[:, None], by_grad, rtol=2**-8, atol=1e-12)
    _, scale = backend.single_pass(Chunk(raw, ids, PLAIN), raw, entropy=False)
    assert torch.equal(raw, by_grad)
    with pytest.raises(ValueError, match="out: expected float32 or bfloat16"):
        backend.single_pass(Chunk(raw, ids, PLAIN), out.half(), entropy=False)
