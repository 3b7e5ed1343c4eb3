"""Layouts of a training step on a GPU: one group of completions through a few layers.

Each layout with each attention implementation, and of a hybrid of Qwen3.5's kind with whatever
functions transformers takes (FLA's and causal_conv1d's where they are installed): errors in bf16
against the padded batch in fp32, milliseconds of forward and backward, peak memory. The padded
layout is what stock TRL computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import groups, timing
from benchmarks.cases import Absence
from benchmarks.groups import PADDED, TREE, Shape, Size, gradient, step
from benchmarks.memory import MIB, Peak
from benchmarks.run import Results, measure_runs
from benchmarks.timing import Clock

# the layers of Qwen3-1.7B; a small vocabulary, since the trunk is timed
SIZE = Size(2048, 6144, 4, 16, 8, 128, 4096)
HYBRID = Size(2048, 6144, 4, 16, 4, 128, 4096, linear_dim=128)
SHAPES = (Shape(256, 1024, 8), Shape(1024, 2048, 8), Shape(4096, 1024, 16), Shape(8192, 8192, 16))
LAYOUTS = (PADDED, "trim", TREE)
# name: model, attention, the package that it needs
MODELS = {
    "sdpa": (SIZE, groups.TOY_SIZE, "sdpa", None),
    "flash_attention_2": (SIZE, groups.TOY_SIZE, "flash_attention_2", "flash_attn"),
    "hybrid": (HYBRID, groups.TOY_HYBRID, "sdpa", None),
}
LIMIT = 120.0  # seconds, after which a layout of a shape hangs
# an error may be that many times the padded batch's in bf16, and the floor
TIMES_PADDED, FLOOR = 2.0, 1e-3


def measure_layouts(
    device: torch.device, results: Results, until: float, *, toy: bool = False
) -> None:
    """Write ``layouts``, by attention and shape, after each; past `until` no shape is begun."""
    shapes = groups.TOY_SHAPES if toy else SHAPES
    longest = max(x.prompt + x.completion for x in shapes)
    for name, (full, small, attention, package) in MODELS.items():
        with results.noting("layouts", name):
            if package and (toy or find_spec(package) is None):
                raise Absence("dry run" if toy else "not installed")
            size = small if toy else full
            # made in bf16, as transformers loads models: frequencies of RoPE stay in fp32
            model = size.model(longest, dtype=torch.bfloat16).float().to(device)
            inputs = groups.group(model, shapes[0])
            loss = step(model, inputs, PADDED).loss.item()
            truth = loss, gradient(model)
            model = size.model(longest, dtype=torch.bfloat16, attn_implementation=attention)
            model = model.to(device)
            for shape in shapes:
                at = ("layouts", name, shape.name)
                if timing.is_past(until):
                    results.merge(*at, status="skipped", reason="no time left")
                    continue
                with results.noting(*at):
                    is_first = shape == shapes[0]
                    given = inputs if is_first else groups.group(model, shape)
                    right = _checked(model, given, results, at, truth if is_first else None)
                    with results.noting(*at, seconds=LIMIT):
                        measure_runs(right, Clock(device), results, at, once=toy)
                model.zero_grad()


def _errors(loss: float, found: Tensor, truth: tuple[float, Tensor]) -> dict[str, float]:
    """Errors of a loss, absolute, and of a gradient and its norm, relative."""
    norm = truth[1].norm()
    apart, of_norm = (found - truth[1]).norm() / norm, (found.norm() - norm).abs() / norm
    return {"loss": abs(loss - truth[0]), "gradient": apart.item(), "grad_norm": of_norm.item()}


def _checked(
    model: Any, inputs: dict[str, Tensor], results: Results, path: tuple[str, ...],
    truth: tuple[float, Tensor] | None,
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """Write status, peak memory and errors of each layout; the steps of those that are right."""
    found: dict[str, Callable[[], Any]] = {}
    allowed = math.inf
    for layout in LAYOUTS:
        run = functools.partial(step, model, inputs, layout)
        with results.noting(*path, layout, seconds=LIMIT):
            run()  # which tries the layout, and compiles kernels
            model.zero_grad()
            peak = Peak(model.device)
            out = run()
            grads = (x.grad.nbytes for x in model.parameters() if x.grad is not None)
            extra, computed = peak.extra_bytes(sum(grads)), out.metrics["tokens/computed"].item()
            about: dict[str, Any] = {"status": "ok", "computed": computed}
            about |= {} if extra is None else {"peak_mib": round(max(0, extra) / MIB, 1)}
            if truth is not None:
                about["errors"] = errors = _errors(out.loss.item(), gradient(model), truth)
                allowed = TIMES_PADDED * errors["gradient"] + FLOOR if layout == PADDED else allowed
                about["status"] = "ok" if errors["gradient"] <= allowed else "wrong"
            results.merge(*path, layout, **about)
            if about["status"] == "ok":
                found[layout] = run
    return found
