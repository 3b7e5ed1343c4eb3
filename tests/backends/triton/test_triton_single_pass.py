"""The single pass: its statistics have the bits of `stats`, its gradient is that of `grad` up to a row's factor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, SinglePassRowBackend
from grpo_kernels.backends.torch_rows import TorchRows

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.support.row_cases import DEVICE, PLAIN, assert_same, make_transform, rows, statistics
from tests.support.row_suite import check_single_pass, check_single_pass_of_special_rows
from tests.support.small_tiles import SmallTiles

TILE = RowConfig(block_n=16, block_v=16, num_warps=1, num_stages=1)
KERNELS = SmallTiles(lambda vocab: TILE)
ONE_BY_ONE = SmallTiles(lambda vocab: TILE, block_n=1)
DTYPES = (torch.float32, torch.bfloat16)


def check_pass(
    chunk: Chunk, dtype: torch.dtype = torch.float32, kernels: SmallTiles = KERNELS
) -> Tensor:
    """The rows' factors (n,)."""
    stats, scale = check_single_pass(kernels, chunk, dtype)
    assert_same(stats, statistics(kernels, chunk))
    return scale


@pytest.mark.parametrize("kind", range(4))
def test_shapes(kind: int) -> None:
    """Less than a step, steps without and with a tail; rows that do not fill a block; a dtype in turn."""
    for i, (n, vocab) in enumerate(((1, 1), (2, 3), (3, 16), (17, 17), (5, 64), (4, 75))):
        raw, ids = rows(n, vocab)
        transform = make_transform(n, vocab, kind, torch.bfloat16 if n == 5 else None)
        check_pass(Chunk(raw, ids, transform), DTYPES[(i + kind // 2) % 2])


@pytest.mark.parametrize(
    ("kernels", "dtype"), [(KERNELS, DTYPES[0]), (ONE_BY_ONE, DTYPES[1])], ids=["block", "rows"]
)
@pytest.mark.parametrize("cap", [None, 60.0])
def test_where_the_reference_is_far_below(
    cap: float | None, kernels: SmallTiles, dtype: torch.dtype
) -> None:
    """How far the largest logit is above the first columns and the target decides whether a row is read again."""
    raw = torch.randn(8, 70, device=DEVICE)
    ids = torch.tensor([0, 3, 69, 40, 41, 2, 1, 1], device=DEVICE)
    raw[:7, 40] += torch.tensor([0.0, 30.0, 39.0, 42.0, 60.0, 95.0, 500.0], device=DEVICE)
    raw[7, 40:] = -torch.inf
    scale = check_pass(Chunk(raw, ids, LogitTransform(softcap=cap)), dtype, kernels)
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
    raw = torch.randn(6, 40, device=DEVICE)
    raw[:, 39] += torch.tensor([10.0, 20.0, 80.0], device=DEVICE).repeat(2)
    check_pass(Chunk(raw, torch.tensor([39, 39, 39, 20, 20, 20], device=DEVICE), PLAIN))


@pytest.mark.parametrize("kind", [0, 3])
def test_in_place_and_strided(kind: int) -> None:
    raw, ids = rows(5, 75)
    transform, wide = make_transform(5, 75, kind, None), torch.full((5, 96), 77.0, device=DEVICE)
    part, ones, chunk = wide[:, :75], torch.ones(5, device=DEVICE), Chunk(raw, ids, transform)
    part.copy_(raw)
    want = torch.empty_like(raw)
    stats, scale = KERNELS.single_pass(Chunk(part, ids, transform), part, entropy=True)
    assert_same(stats, statistics(KERNELS, chunk))
    KERNELS.grad(chunk, stats, ones, None, want)
    assert torch.equal(part, want)
    assert torch.equal(scale, ones)
    assert (wide[:, 75:] == 77.0).all()
    part.copy_(raw)
    other = torch.full((5, 128), 55.0, device=DEVICE, dtype=torch.bfloat16)
    _stats, scale = KERNELS.single_pass(Chunk(part, ids, transform), other[:, 3:78], entropy=True)
    want = torch.empty_like(raw, dtype=torch.bfloat16)
    assert torch.equal(KERNELS.single_pass(chunk, want, entropy=True)[1], scale)
    assert torch.equal(other[:, 3:78], want)
    assert torch.equal(part, raw)
    assert (other[:, :3] == 55.0).all()
    assert (other[:, 78:] == 55.0).all()


@pytest.mark.parametrize("cap", [None, 4.0])
def test_special_values(cap: float | None) -> None:
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 49], device=DEVICE)
    check_single_pass_of_special_rows(KERNELS, torch.randn(9, 50, device=DEVICE), ids, cap, DTYPES)


def test_the_backend() -> None:
    """Its own tile; the protocol; what it refuses."""
    backend = TritonRows()
    assert isinstance(backend, SinglePassRowBackend)
    assert not isinstance(TorchRows(), SinglePassRowBackend)
    raw, ids = rows(3, 2100)
    chunk, by_grad = Chunk(raw, ids, PLAIN), torch.empty_like(raw)
    stats, scale = check_single_pass(backend, chunk, torch.bfloat16)
    assert_same(stats, statistics(backend, chunk))
    with pytest.raises(ValueError, match="out: expected float32 or bfloat16"):
        backend.single_pass(chunk, by_grad.half(), entropy=False)
    backend.grad(chunk, stats, torch.ones_like(scale), None, by_grad)
    backend.single_pass(chunk, raw, entropy=False)
    assert torch.equal(raw, by_grad)
