"""Memory that nobody wrote yet: tensors come full of a pattern, a NaN of an odd payload, by which a read of it shows.

Arithmetic hands the payload on, so numbers made of such memory by torch show as well. Types of 8 bits have no pattern
to spare and are not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PATTERNS = {
    torch.float64: (torch.int64, 0x7FF8DEAD_DEADDEAD),
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float16: (torch.int16, 0x7EAD),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.int64: (torch.int64, 0x5EADDEAD_DEADDEAD),
    torch.int32: (torch.int32, 0x5EADDEAD),
}
MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


def is_written(x: Tensor) -> Tensor:
    """Which elements of `x` do not hold the pattern of their type."""
    if x.dtype not in PATTERNS:
        return torch.ones_like(x, dtype=torch.bool)
    integer, pattern = PATTERNS[x.dtype]
    return x.view(integer) != pattern


@contextmanager
def marked() -> Iterator[None]:
    """Inside, `MAKERS` fill new CPU tensors with the patterns."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.dtype in PATTERNS and x.device.type == "cpu" and "out" not in kwargs:
                integer, pattern = PATTERNS[x.dtype]
                x.detach().view(integer).fill_(pattern)
            return x

        return made

    with ExitStack() as stack:
        for owner, name in MAKERS:
            stack.enter_context(mock.patch.object(owner, name, filling(getattr(owner, name))))
        yield
