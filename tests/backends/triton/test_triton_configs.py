"""The table of tiles, and how it is read."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows import device
from grpo_kernels.backends.triton_rows.device import family, row_config, row_configs

pytestmark = pytest.mark.unit

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
