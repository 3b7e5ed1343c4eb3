"""The Triton kernels that read the rows of two heads: divergences from a teacher, and their gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows.configs import RowConfig
from tests.support.divergence_suite import BETAS, FusedDivergenceSuite
from tests.support.row_cases import DEVICE
from tests.support.small_tiles import SmallTiles

TILE = RowConfig(block_n=16, block_v=256, num_warps=1, num_stages=1)


class TestSmallTiles(FusedDivergenceSuite):
    """Rows of less than a step, and of whole steps and a rest."""

    vocabs = (2, 600) if DEVICE == "cpu" else (1, 2, 127, 128, 129, 4097)
    betas = BETAS[:3] if DEVICE == "cpu" else BETAS  # the interpreter takes its time, and 0.1 and 0.9 compile to 0.5's

    def backend(self) -> SmallTiles:
        return SmallTiles(lambda vocab: TILE)
