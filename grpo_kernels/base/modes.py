"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, `module` and all modules in it are in evaluation mode: dropout is off, nothing random is drawn."""
    modes = [(x, x.training) for x in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for x, training in modes:
            x.training = training
