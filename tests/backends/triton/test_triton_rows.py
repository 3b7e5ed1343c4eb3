"""The Triton row kernels against float64 within derived bounds, torch, and themselves; surrogates
alone; the table of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from grpo_kernels.backends import Chunk
from grpo_kernels.backends.triton_rows import device, reduce
from grpo_kernels.backends.triton_rows.device import RowConfig, family, row_config, row_configs
from grpo_kernels.backends.triton_rows.rows import INTERPRETED, TritonRows
from tests.support.divergence_suite import BETAS, DivergenceSuite
from tests.support.row_cases import DEVICE, PLAIN, make_transform, rows
from tests.support.row_suite import RowSuite, SpecialSuite, check_kernels
from tests.support.row_truth import check_stats, truth
from tests.support.surrogate_suite import SurrogateSuite

pytestmark = pytest.mark.unit

# Rows of one tile, of less and of more; lanes that see no logit, one, or several.
NS = (1, 2, 3, 5, 8, 16, 17)
VOCABS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97),
    *(127, 128, 129, 191, 192, 193),
)


def small_tile(vocab: int) -> RowConfig:
    block_v = 16 if vocab < 40 else 64 if vocab < 128 else 128
    return RowConfig(block_n=16, block_v=block_v, num_warps=2, num_stages=1)


class SmallTiles(TritonRows):
    """`TritonRows` with the tile that `tile` gives for a vocabulary, changed by `changes`."""

    def __init__(self, tile: Callable[[int], RowConfig] = small_tile, **changes: int) -> None:
        self._tile = lambda logits: replace(tile(logits.shape[1]), **changes)

    def _config(self, kernel: str, chunk: Chunk) -> RowConfig:
        return self._tile(chunk.logits)


def small(block_n: int, block_v: int) -> SmallTiles:
    return SmallTiles(lambda vocab: RowConfig(block_n, block_v, num_warps=1, num_stages=1))


class TestSmallTiles(RowSuite):
    kernels = SmallTiles()
    likewise = (SmallTiles(block_n=2, num_warps=1),)


class TestSpecial(SpecialSuite):
    kernels = small(16, 16)


class TestDivergence(DivergenceSuite):
    """Rows of less than a step, and of whole steps and a rest."""

    kernels = small(16, 256)
    vocabs = (2, 600) if DEVICE == "cpu" else (1, 2, 127, 128, 129, 4097)
    # the interpreter takes its time, and 0.1 and 0.9 compile to 0.5's
    betas = BETAS[:3] if DEVICE == "cpu" else BETAS


class TestSurrogates(SurrogateSuite):
    kernels = small(16, 16)
    slack = 16


def test_a_statistic_that_the_kernel_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: a compiled kernel would refuse it, the interpreter ignores it."""
    monkeypatch.setattr(reduce, "EXTRAS", (*reduce.EXTRAS, "median"))
    with pytest.raises(ValueError, match="extras: expected statistics of stats_kernel, got median"):
        SmallTiles().stats(Chunk(*rows(2, 16), PLAIN), entropy=False, extras=())


@pytest.mark.parametrize("n", NS)
def test_every_kernel_on_every_shape(n: int) -> None:
    """Each vocabulary with two of `NS`; every other shape and its gradient are in fp16."""
    for kind, vocab in enumerate(VOCABS):
        if NS.index(n) in (kind % 7, (kind + kind // 7 + 2) % 7):
            raw, ids = rows(n, vocab)
            rounded_to = torch.float16 if (kind // 4 + n) % 2 else None
            transform = make_transform(n, vocab, kind, rounded_to)
            check_kernels(SmallTiles(), raw, ids, transform, kind + n, rounded_to or torch.float32)


@pytest.mark.parametrize("vocab", [1000, 5003])
def test_default_tiles(vocab: int) -> None:
    raw, ids = rows(5, vocab)
    check_kernels(TritonRows(), raw, ids, make_transform(5, vocab, 3, torch.bfloat16), 3)


def test_many_rows() -> None:
    """More than a GPU grid's second and third dimension could count."""
    raw, ids = rows(70_001, 3)
    kernels = small(4096 if INTERPRETED else 1, 16)
    check_stats(kernels.stats(Chunk(raw, ids, PLAIN), entropy=False), truth(raw, ids, PLAIN))


ARCHES = {  # and their families
    **{arch: arch for arch in ("sm_80", "sm_90", "sm_100", "gfx942")},
    **dict.fromkeys(("sm_75", "sm_89", "sm_120", "gfx90a"), "default"),
    "sm_103": "sm_100",
    "gfx950": "gfx942",
    "cpu": "interpreter",
}


@pytest.mark.parametrize("arch", ARCHES)
def test_every_vocabulary_has_tiles(arch: str) -> None:
    assert family(arch) == ARCHES[arch]
    for vocab in (1, 33, 300, 5000, 32000, 151936, 256000):
        config = row_config("stats", vocab, arch)
        assert config == row_config("fused", vocab, arch)
        assert config.block_v & (config.block_v - 1) == 0
        assert config.block_v < 2 * max(vocab, 128 * config.num_warps)


@pytest.mark.parametrize("name", [name for name in device.FAMILIES if name != "interpreter"])
def test_a_thread_reads_16_bytes_at_a_time(name: str) -> None:
    """Four fp32 logits of each quarter of a tile, or accesses are narrower."""
    for kernel in device.ROW_KERNELS:
        for config in row_configs(kernel, name):
            threads = config.num_warps * (64 if name.startswith("gfx") else 32)
            assert config.block_v // 4 >= 4 * threads, (name, kernel)
