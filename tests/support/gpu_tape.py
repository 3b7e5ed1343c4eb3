"""What a call would do on a GPU, in order: on tensors that say they are on a GPU
(`pretend_gpu.py`). Large ones have no data, so that real sizes fit any machine; a backend that
notes row kernels down stands in their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grpo_kernels.backends import Chunk, Coefficients, FusedLoss, FusedRowBackend, RowStats
from tests.support import pretend_gpu
from tests.support.chosen import choose_by
from tests.support.measure import AllocationWatcher

WITHOUT_DATA = 2**18  # elements: larger tensors have none
PLENTY = 2**40  # bytes
aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm}
# what allocates, or makes a view, and launches nothing; views are known by their aliases
NOTHING = {
    aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided,
    aten.detach, aten.lift_fresh, aten.alias, aten._local_scalar_dense,
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    # "product", "rows" (a row kernel), "launch" (any other), "view" (host work alone), "wait", or
    # "asks" (the driver or the allocator, for its free memory)
    kind: str
    name: str
    flops: int = 0
    shape: tuple[int, ...] = ()  # (m, n, k) of a product, else of rows or of the result
    written: int = 0  # bytes of a launch
    aligned: bool = True  # rows of all matrices start at multiples of 16 bytes
    moved: int = 0  # bytes read and written by `scale`


@dataclass
class Tape:
    """The events of a call, the engine that served, and the most bytes that it took at once."""

    events: list[Event] = field(default_factory=list)
    engine: str = ""
    peak: int = 0

    def of(self, kind: str, name: str = "") -> list[Event]:
        """Those of a kind, and if given with `name` in their name."""
        return [x for x in self.events if x.kind == kind and name in x.name]

    def made(self, name: str, result: Tensor) -> None:
        """A tensor was made on the device."""
        kind = "view" if name == "empty" or result.numel() == 0 else "launch"
        self.events.append(
            Event(kind, name, 0, tuple(result.shape), result.nbytes if kind == "launch" else 0)
        )

    def wait(self, name: str) -> None:
        """The host waits for the device."""
        self.events.append(Event("wait", name))

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation on tensors of the device."""
        packet, returns = func.overloadpacket, func._schema.returns
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if packet in NOTHING or is_view or (outputs and not any(x.numel() for x in outputs)):
            self.events.append(Event("view", str(func)))
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = sum(x.nbytes for x in outputs)
        if packet in PRODUCTS:
            left, right = [x for x in inputs if x.dim() == 2 and x is not outputs[0]][-2:]
            (m, k), n = left.shape, right.shape[1]
            aligned = all(_is_aligned(x) for x in (left, right, outputs[0]))
            sizes = 2 * m * n * k, (m, n, k), written, aligned
            self.events.append(Event("product", str(func), *sizes))
            return
        shape = tuple(outputs[0].shape) if outputs else ()
        self.events.append(Event("launch", str(func), 0, shape, written))

    def rows(self, name: str, logits: Tensor, out: Tensor | None) -> None:
        """A row kernel."""
        aligned = all(_is_aligned(pretend_gpu.here(x)) for x in (logits, out) if x is not None)
        self.events.append(Event("rows", name, shape=tuple(logits.shape), aligned=aligned))


def _is_aligned(x: Tensor) -> bool:
    """Whether the rows, or columns, of `x` (m, n) start at multiples of 16 bytes."""
    places = max(x.stride()), x.storage_offset()
    return min(x.stride()) == 1 and all(at * x.element_size() % 16 == 0 for at in places)


class GPUAllocations(AllocationWatcher):
    """Sees every tensor that is made on the GPU that is not there, with or without data."""

    def storage(self, x: Tensor) -> torch.UntypedStorage:
        return pretend_gpu.here(x).untyped_storage()

    def counts(self, x: Tensor) -> bool:
        return True


class NotedRows(FusedRowBackend):
    """The row backend that a GPU would have, which computes nothing."""

    name = "triton"
    fuses_reference = False

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        self._tape.rows("stats", chunk.logits, None)
        return self._statistics(chunk.logits, extras)

    def diverge(
        self, chunk: Chunk, stats: RowStats, reference_stats: RowStats
    ) -> tuple[Tensor, Tensor]:
        self._tape.rows("diverge", chunk.logits, None)
        return stats.logps, stats.logps

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        self._tape.rows("grad", chunk.logits, out)

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        moved = x.nbytes + factor.nbytes + out.nbytes
        self._tape.events.append(Event("launch", "scale", shape=tuple(x.shape), moved=moved))

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        self._tape.rows("fused", chunk.logits, out)
        return self._statistics(chunk.logits, loss_stats=fused_loss.stat_names)

    def _statistics(
        self, logits: Tensor, extras: tuple[str, ...] = (), loss_stats: tuple[str, ...] = ()
    ) -> RowStats:
        new = lambda: pretend_gpu.OnGPU(torch.zeros(logits.shape[0]))  # noqa: E731
        more = ({name: new() for name in names} for names in (extras, loss_stats))
        return RowStats(new(), new(), new(), new(), *more)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One on the GPU that is not there: random numbers, or nothing if it is large."""
    if math.prod(shape) > WITHOUT_DATA:
        return pretend_gpu.OnGPU(torch.empty(shape, dtype=dtype, device="meta"))
    return pretend_gpu.OnGPU(torch.randn(shape).to(dtype))


@contextmanager
def taped(
    *,
    autocast: torch.dtype | None = None,
    free: int = PLENTY,
    unused: int | None = 0,
    fragments: int = 0,
) -> Iterator[Tape]:
    """Within, calls on `tensor`s are noted down, as they would be within autocast to that dtype.

    Args:
        free: bytes that the driver has free.
        unused: bytes that the allocator has reserved for nobody, in whole blocks; None: to ask it
            raises.
        fragments: such bytes within blocks that are in use.
    """
    tape = Tape()
    in_use = 5 * 2**30
    sizes = {"reserved": in_use + fragments + (unused or 0), "active": in_use}
    sizes["inactive_split"] = fragments

    def driver(device: Any = None) -> tuple[int, int]:
        tape.events.append(Event("asks", "driver"))
        return free, PLENTY

    def allocator(device: Any = None) -> dict[str, Any]:
        tape.events.append(Event("asks", "allocator"))
        if unused is None:
            raise RuntimeError("not supported by this allocator")
        return {f"{name}_bytes": {"all": {"current": x}} for name, x in sizes.items()}

    with pytest.MonkeyPatch.context() as patch, pretend_gpu.pretended(patch, tape=tape):
        choose_by(patch, lambda _: lambda *_: NotedRows(tape))
        patch.setattr(torch.cuda, "mem_get_info", driver)
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator)
        with pretend_gpu.autocast(autocast):
            yield tape
