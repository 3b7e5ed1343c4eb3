"""What a call should take on a GPU, from counted launches and bytes: a prediction, never a measurement.

A call is noted down on tensors without data (`tape.py`), at its real sizes, and its events are added up:

- a product: its operations at the library's rate, and the accumulator that it adds to, read at DRAM's;
- a row kernel: `predict.predicted_ms`, from its counted instructions and bytes;
- any other launch: its bytes at DRAM's rate, at least `SMALL_MS`;
- until the first product begins the device has nothing to do: what the host takes until then is added, an operation at
  a time. Later the host runs ahead.

The limit is the products that the case cannot do without, at the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.aot.predict import DEVICES, Device, predicted_ms
from benchmarks.aot.pretend_gpu import OnGPU
from benchmarks.aot.tape import Event, Tape, taped, tensor
from grpo_kernels import grpo_loss, linear_logprob

SMALL_MS = 0.0025  # of a launch that moves next to nothing
# Of the host, for an operation that launches, one that does not (a view, an allocation), and a wait: chosen, from what
# others report of eager PyTorch on such machines. And for the checks and plans of a call.
LAUNCH_MS, VIEW_MS, WAIT_MS, CALL_MS = 0.006, 0.0015, 0.02, 0.1
ODD_V = 151665


@dataclass(frozen=True)
class Shape:
    """A call: N tokens in sequences of `t`, all counted by a mask; bf16 hidden states, on-policy dapo, or scoring."""

    name: str = ""
    most: float = math.inf  # what the ratio to the products is to stay below
    n: int = 8192
    h: int = 4096
    v: int = 151936
    t: int = 512
    weight_dtype: torch.dtype = torch.bfloat16
    frozen: bool = False
    score: bool = False
    zero_share: float = 0.0  # of the sequences with advantage 0

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.weight_dtype == torch.float32 else None

    @property
    def products_nvh(self) -> float:
        share = 1 - self.zero_share
        return 2.0 if self.score else 2 + (2 if self.frozen else 4) * share


SHAPES = (
    Shape("trainable", 1.12),
    Shape("frozen", 1.15, frozen=True),
    Shape("scoring", 1.12, score=True),
    Shape("half of the groups zero", 1.16, zero_share=0.5),
    Shape("fp32 weight, autocast", 1.25, weight_dtype=torch.float32),
    Shape("fp32 weight, autocast, frozen", 1.25, weight_dtype=torch.float32, frozen=True),
    Shape(f"V {ODD_V}", 1.12, v=ODD_V),
    Shape("H 1024", 1.40, h=1024),
    Shape("N 1024", 1.40, n=1024),
)


def noted(shape: Shape, **options: Any) -> Tape:
    """What a step of `shape` does; `options` are `grpo_loss`'s."""
    batch = shape.n // shape.t
    with taped(autocast=shape.autocast) as tape:
        hidden = tensor(batch, shape.t, shape.h, dtype=torch.bfloat16).requires_grad_(not shape.score)
        weight = tensor(shape.v, shape.h, dtype=shape.weight_dtype)
        ids = OnGPU(torch.zeros(batch, shape.t, dtype=torch.long))
        mask = OnGPU(torch.ones(batch, shape.t, dtype=torch.long))  # of integers, as trainers have it
        if shape.score:
            with torch.no_grad():
                linear_logprob(hidden, weight, ids, mask=mask)
            return tape
        weight.requires_grad_(not shape.frozen)
        advantages = torch.ones(batch)
        advantages[: int(batch * shape.zero_share)] = 0.0
        torch.autograd.backward(grpo_loss(hidden, weight, ids, mask, OnGPU(advantages), **options).loss)
    return tape


@dataclass(frozen=True)
class Budget:
    """Milliseconds, predicted."""

    shape: Shape
    limit: float  # the products alone
    products: float
    rows: float
    others: float  # launches
    gap: float  # of the host
    launches: int

    @property
    def total(self) -> float:
        return self.products + self.rows + self.others + self.gap

    @property
    def ratio(self) -> float:
        return self.total / self.limit


def budget(shape: Shape, device: Device = DEVICES["H200"]) -> Budget:
    """What a step of `shape` should take on `device`."""
    tape = noted(shape)
    first = next(i for i, x in enumerate(tape.events) if x.kind == "product")
    before, after = tape.events[:first], tape.events[first:]
    host: dict[str, float] = {"launch": LAUNCH_MS, "view": VIEW_MS, "wait": WAIT_MS}

    def ms(kind: str, of: Callable[[Event], float], events: list[Event]) -> float:
        return sum(of(x) for x in events if x.kind == kind)

    return Budget(
        shape=shape,
        limit=1e3 * shape.products_nvh * shape.n * shape.v * shape.h / device.products,
        products=ms("product", lambda x: product_ms(x, device), after),
        rows=ms("rows", lambda x: rows_ms(x, device), after),
        others=ms("launch", lambda x: max(SMALL_MS, 1e3 * x.moved / device.dram), after),
        gap=CALL_MS + sum(max(host[x.kind], 1e3 * x.moved / device.dram) for x in before),
        launches=tape.launches,
    )


def table(device: Device = DEVICES["H200"]) -> tuple[str, list[list[str]]]:
    """Header and cells of a table of all `SHAPES`."""
    header = "case | products alone | products | rows | other | host | **total** | **ratio** | launches"
    cells = []
    for shape in SHAPES:
        x = budget(shape, device)
        ms = [f"{y:.2f}" for y in (x.limit, x.products, x.rows, x.others, x.gap)]
        cells.append([shape.name, *ms, f"**{x.total:.2f}**", f"**{x.ratio:.3f}**", str(x.launches)])
    return header, cells


def product_ms(event: Event, device: Device) -> float:
    """A product whose rows are not aligned takes three times as long, by what others measured."""
    (m, n, _), slower = event.shape, 1 if event.aligned else 3
    added_to = 4 * m * n if "addmm" in event.name else 0
    return 1e3 * (max(slower * event.flops / device.products, event.moved / device.dram) + added_to / device.dram)


def rows_ms(event: Event, device: Device) -> float:
    """A row kernel, by the counts of its plain form; `fused` without a gradient goes over its rows as `stats` does."""
    kernel = "stats" if event.name == "fused" and event.written == 0 else event.name
    rows, vocab = event.shape
    out_bytes = event.written / (rows * vocab)
    return predicted_ms(kernel, "constant" if kernel == "fused" else "plain", rows, vocab, out_bytes, device.name)
