"""A gradient of the vocabulary's size times the upstream gradient: the kernel has torch's bits, beyond 2^31 too."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.backends import choose_backend
from tests.support.on_device import same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (4097,), (9001, 896), (151_936, 1024)])
def test_bits_are_those_of_torch(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    shape = shape if device.type == "cuda" else tuple(min(x, 4097) for x in shape[:1])
    g = torch.Generator(device).manual_seed(0)
    x, factor = torch.randn(shape, generator=g, device=device), torch.tensor(0.3, device=device)
    want = torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
    backend, out = choose_backend("triton", device)[0], torch.empty_like(x, dtype=dtype)
    backend.scale(x, factor, out)
    assert same_bits(out, want)
    if dtype == torch.float32:
        backend.scale(x, factor, x)
        assert same_bits(x, want)


def test_beyond_2_to_the_31_numbers(gpu: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free device memory")
    n = 2**31 + 5000
    x = torch.arange(n, dtype=torch.float32, device=gpu)
    backend, out = (
        choose_backend("triton", gpu)[0],
        torch.zeros(n, dtype=torch.bfloat16, device=gpu),
    )
    backend.scale(x, torch.tensor(0.5, device=gpu), out)
    for part in (slice(0, 5000), slice(2**31 - 5000, n)):
        assert same_bits(out[part], (x[part] * 0.5).bfloat16())
