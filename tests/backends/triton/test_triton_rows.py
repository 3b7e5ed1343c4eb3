"""The Triton row kernels against float64 within derived bounds, against the torch backend, and against themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.row_truth import check, check_stats, gradient, truth

pytest.importorskip("triton")

from grpo_kernels.backends.interface import Chunk
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.support.row_cases import DEVICE, PLAIN, assert_same, make_loss, make_transform, rows
from tests.support.row_suite import RowSuite, check_kernels
from tests.support.small_tiles import SmallTiles

# 7 x 29 shapes: rows of one tile, of less and of more; lanes that see no logit, one, or several.
NS = (1, 2, 3, 5, 8, 16, 17)
VOCABS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    96,
    97,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
)


class TestSmallTiles(RowSuite):
    kernels = SmallTiles()
    likewise = (SmallTiles(block_n=2, num_warps=1),)


@pytest.mark.parametrize("rounded_to", [None, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("n", NS)
def test_every_kernel_on_every_shape(n: int, rounded_to: torch.dtype | None) -> None:
    """fp16: the logits are rounded to it, and the gradient is in it. A shape is of one of the two, in turn."""
    for kind, vocab in [*enumerate(VOCABS)][(n + (rounded_to is None)) % 2 :: 2]:
        raw, ids = rows(n, vocab)
        transform = make_transform(n, vocab, kind, rounded_to)
        check_kernels(SmallTiles(), raw, ids, transform, kind + n, rounded_to or torch.float32)


@pytest.mark.parametrize("vocab", [1000, 5003])
def test_default_tiles(vocab: int) -> None:
    raw, ids = rows(5, vocab)
    transform, backend = make_transform(5, vocab, 3, torch.bfloat16), TritonRows()
    at, loss = truth(raw, ids, transform), make_loss(-torch.rand(5, device=DEVICE), 3)
    stats, out = backend.stats(Chunk(raw, ids, transform), entropy=True), torch.empty_like(raw)
    check_stats(stats, at)
    fused = backend.fused(Chunk(raw, ids, transform), loss, out)
    assert_same(fused, stats)
    by_grad = torch.empty_like(raw)
    b = torch.full_like(stats.logps, loss.d_entropy) if loss.d_entropy else None
    backend.grad(Chunk(raw, ids, transform), stats, fused.terms["d_logp"], b, by_grad)
    assert torch.equal(out, by_grad)
    check("d raw", out, *gradient(at, ids, fused.terms["d_logp"], b))


def test_refusals() -> None:
    raw, ids = rows(2, 8)
    with pytest.raises(ValueError, match="backend: expected float32 logits"):
        TritonRows().stats(Chunk(raw.double(), ids, PLAIN), entropy=False)
    with pytest.raises(ValueError, match="backend: expected logits with contiguous rows"):
        TritonRows().stats(Chunk(raw.T, ids, PLAIN), entropy=False)


def test_cpu_tensors_without_the_interpreter() -> None:
    code = (
        "import torch; from grpo_kernels.backends.interface import Chunk, LogitTransform\n"
        "from grpo_kernels.backends.triton_rows.rows import INTERPRETED, TritonRows\n"
        "assert not INTERPRETED\n"
        "ids = torch.zeros(1, dtype=torch.int64)\n"
        "TritonRows().stats(Chunk(torch.zeros(1, 2), ids, LogitTransform()), entropy=False)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert found.returncode != 0
    assert "ValueError: backend: 'triton' expected tensors on a GPU" in found.stderr
