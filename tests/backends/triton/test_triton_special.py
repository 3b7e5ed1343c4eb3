"""The Triton row kernels where logits are infinite, no numbers, equal, far apart, capped, or very many."""

from __future__ import annotations

import pytest
import torch

from tests.support.row_truth import check, check_stats, gradient, truth

pytest.importorskip("triton")

from grpo_kernels.backends.interface import Chunk
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.rows import INTERPRETED, TritonRows
from grpo_kernels.base.records import take
from tests.support.row_cases import DEVICE, PLAIN
from tests.support.small_tiles import SmallTiles
from tests.support.special_suite import SpecialSuite, check_many_rows

TILE = RowConfig(block_n=16, block_v=16, num_warps=1, num_stages=1)


class TestSmallTiles(SpecialSuite):
    kernels = SmallTiles(lambda vocab: TILE)


def test_many_rows() -> None:
    config = RowConfig(block_n=1 if not INTERPRETED else 4096, block_v=16, num_warps=1, num_stages=1)
    check_many_rows(SmallTiles(lambda vocab: config), DEVICE)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 logits, and the gradient of the last rows in place."""
    n, vocab = 16_400, 151_936
    raw = torch.zeros(n, vocab, device=DEVICE)
    raw[-3:] = torch.randn(3, vocab, device=DEVICE) * 3
    ids = torch.randint(vocab, (n,), device=DEVICE)
    stats = TritonRows().stats(Chunk(raw, ids, PLAIN), entropy=True)
    last, a = raw[-3:].clone(), torch.randn(n, device=DEVICE)
    at = truth(last, ids[-3:], PLAIN)
    take(check_stats(stats, slice(n - 3, n)), at)
    TritonRows().grad(Chunk(raw, ids, PLAIN), stats, a, None, raw)
    check("d raw", raw[-3:], *gradient(at, ids[-3:], a[-3:], None))
