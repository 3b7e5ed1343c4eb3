"""What the tests count exactly: floating point operations of products, and every allocation with
its life time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode


def count_flops(run: Callable[[], Any]) -> int:
    """Floating point operations of the matrix products that `run` does."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


class AllocationWatcher(TorchDispatchMode):
    """Sees every tensor that an operation makes, but for those without memory.

    Attributes:
        largest: elements of the largest storage made.
        peak: the most bytes alive at once, of what was made inside.
        live: bytes of it alive now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self.live = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor))
        given = {self.storage(x)._cdata for x in tensors}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self._see(x, given)
        return out

    def storage(self, x: torch.Tensor) -> torch.UntypedStorage:
        return x.untyped_storage()

    def counts(self, x: torch.Tensor) -> bool:
        return not x.is_meta

    def _see(self, x: torch.Tensor, given: set[int]) -> None:
        storage = self.storage(x)
        key = storage._cdata
        if not self.counts(x) or key in given or key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.largest = max(self.largest, storage.nbytes() // x.element_size())
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)
