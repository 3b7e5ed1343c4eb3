"""The soak with few calls, and whether it notices what is left over."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests import soak

FEW, WARM_UP = 40, 10


@pytest.mark.parametrize("name", [name for name in soak.WORKLOADS if name != "compiled"])
def test_nothing_is_left_over(name: str) -> None:
    assert soak.soak(soak.WORKLOADS[name], FEW, WARM_UP) == []


@pytest.mark.slow
def test_nothing_is_left_over_compiled() -> None:
    assert soak.soak(soak.WORKLOADS["compiled"], FEW, WARM_UP) == []


def test_what_is_left_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    over = threading.Event()

    def leaks() -> None:
        kept.append(torch.ones(2**23))  # 32 MiB: more than what an allocator may have left from before
        kept.append(os.pipe())
        threading.Thread(target=over.wait, daemon=True).start()

    found = "; ".join(soak.soak(leaks, 8, 1))
    over.set()
    for pipe in kept[1::2]:
        for end in pipe:
            os.close(end)
    for name in ("tensors", "threads", "descriptors", "resident memory"):
        assert name in found, found
