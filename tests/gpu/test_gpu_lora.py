"""A low-rank adapter on the device, in the head's dtype and in fp32 beside a 16-bit head."""

from __future__ import annotations

import pytest
import torch

from tests.support.adapter_case import check_adapter
from tests.support.on_device import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equals_the_merged_head(
    device: torch.device, backend: str, engine: str, dtype: torch.dtype
) -> None:
    n = 300 if device.type == "cuda" else 5
    check_adapter(
        torch.float16,
        dtype,
        n=n,
        device=str(device),
        gradient=2.0**-7,
        engine=engine,
        backend=backend,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16(gpu: torch.device, dtype: torch.dtype) -> None:
    for backend in BACKENDS:
        check_adapter(
            torch.bfloat16, dtype, n=300, device=str(gpu), gradient=2.0**-5, backend=backend
        )
