"""What the C++ kernels give with each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def each_isa(run: Callable[[], Result]) -> list[tuple[str, Result]]:
    """What `run` returns, with the name of the instruction set; the best one first."""
    isa, found = torch.ops.grpo_kernels_cpp.isa, []
    try:
        for name in ("avx512", "avx2", "portable"):
            try:
                isa(name)
            except RuntimeError as error:
                assert f"no '{name}'" in str(error)  # noqa: PT017
                continue
            found.append((name, run()))
    finally:
        best = isa("auto")
    assert best == found[0][0]
    return found
