"""Compile what the first calls of a head would compile, so that no training step waits for it.

It is the C++ library for CPU tensors and, on a GPU, Triton's kernels, which Triton caches for all later processes (in
TRITON_CACHE_DIR). A small batch of each kind is computed with a head of the given size: kernels are the same for all
batches.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import build
from grpo_kernels.base.choices import BackendName, LossTypeName, choices
from grpo_kernels.call.run import Run
from grpo_kernels.diagnostics import head_shape
from grpo_kernels.diagnostics.head_shape import HeadShape
from grpo_kernels.divergence import linear_divergence
from grpo_kernels.head.head import Head
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.loss import grpo_loss
from grpo_kernels.objective.config import LossConfig

BATCH, TIME = 2, 8
NAME_WIDTH = 44
# Name of a line -> (log-probabilities for the loss, fields of its config, other arguments).
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "loss, on-policy": ((), {}, {}),
    "loss, old log-probabilities": (("old",), {}, {}),
    "loss, old log-probabilities and a reference": (("old", "ref"), {"beta": 0.04}, {}),
    "loss, two passes": (("old",), {}, {"engine": "two_pass"}),
    "loss, entropy bonus": (("old",), {"entropy_coef": 0.01}, {}),
    "loss, entropy bonus, two passes": (("old",), {"entropy_coef": 0.01}, {"engine": "two_pass"}),
}


def describe(head: HeadShape, loss_type: str) -> str:
    """Describe the head and the loss in one line."""
    parts = [str(head), loss_type]
    parts += ["bias"] if head.bias else []
    parts += [] if head.logit_scale == 1.0 else [f"logit scale {head.logit_scale:g}"]
    parts += [] if head.softcap is None else [f"soft-cap {head.softcap:g}"]
    return ", ".join(parts)


def steps(
    head: HeadShape,
    device: torch.device,
    backend: BackendName,
    *,
    loss_type: LossTypeName = "dapo",
    teacher: bool = False,
) -> dict[str, Callable[[], None]]:
    """Return the calls to make on `device`, by the names of their lines; with `teacher` the divergences too."""
    loss = partial(_loss, head, device, backend, loss_type)
    calls: dict[str, Callable[[], None]] = {
        "log-probabilities": partial(_logps, head, device, backend, "score"),
        "log-probabilities, frozen head": partial(_logps, head, device, backend, "frozen"),
        **{
            name: partial(loss, logps, config, **options)
            for name, (logps, config, options) in LOSSES.items()
        },
    }
    if teacher:
        calls["divergence from a teacher"] = partial(_divergence, head, device, backend)
        exact, logps = {"beta": 0.04, "kl_estimator": "full"}, ("old", "reference")
        for suffix, engine in (("", "auto"), (", two passes", "two_pass")):
            calls[f"loss, exact KL to a reference{suffix}"] = partial(
                loss, logps, exact, engine=engine
            )
    return calls


def _tensors(
    head: HeadShape, device: torch.device, *, trains: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """hidden (B, T, H), weight (V, H), ids (B, T), bias (V,); all of them zeros."""
    new = partial(torch.zeros, device=device)
    hidden = new(BATCH, TIME, head.hidden, dtype=head.dtype, requires_grad=True)
    weight = new(head.vocab, head.hidden, dtype=head.dtype, requires_grad=trains)
    bias = new(head.vocab, dtype=head.dtype, requires_grad=trains) if head.bias else None
    return hidden, weight, new(BATCH, TIME, dtype=torch.int64), bias


def _head(shape: HeadShape, weight: Tensor, bias: Tensor | None) -> Head:
    return Head(weight, bias, final_logit_softcapping=shape.softcap, logit_scale=shape.logit_scale)


def _constant_head(shape: HeadShape, weight: Tensor, bias: Tensor | None) -> Head:
    return _head(shape, weight.detach(), None if bias is None else bias.detach())


def _logps(head: HeadShape, device: torch.device, backend: BackendName, engine: Any) -> None:
    hidden, weight, ids, bias = _tensors(head, device, trains=False)
    with torch.set_grad_enabled(engine != "score"):
        scores = linear_logprob(hidden, _head(head, weight, bias), ids, run=Run(engine, backend))
    if scores.logps.requires_grad:
        scores.logps.sum().backward()


def _divergence(head: HeadShape, device: torch.device, backend: BackendName) -> None:
    hidden, weight, _, bias = _tensors(head, device)
    scores = linear_divergence(
        hidden,
        _head(head, weight, bias),
        hidden.detach(),
        _constant_head(head, weight, bias),
        run=Run(backend=backend),
    )
    (
        scores.divergence * torch.arange(TIME, device=device)
    ).sum().backward()  # unequal: equal ones would take one pass


def _loss(
    head: HeadShape,
    device: torch.device,
    backend: BackendName,
    loss_type: LossTypeName,
    inputs: tuple[str, ...],
    config: dict[str, Any],
    engine: Any = "auto",
) -> None:
    hidden, weight, ids, bias = _tensors(head, device)
    logps = torch.full(
        (BATCH, TIME), -math.log(head.vocab), device=device
    )  # of zero logits: no ratio is clipped
    options: dict[str, Any] = {}
    if "reference" in inputs:
        options["reference"] = hidden.detach(), _constant_head(head, weight, bias)
    out = grpo_loss(
        hidden,
        _head(head, weight, bias),
        ids,
        None,
        torch.arange(
            BATCH, dtype=torch.float32, device=device
        ),  # the first sequence has no gradient
        old_per_token_logps=logps if "old" in inputs else None,
        ref_per_token_logps=logps if "ref" in inputs else None,
        config=LossConfig(loss_type=loss_type, **config),
        run=Run(engine, backend),
        **options,
    )
    torch.autograd.backward(2.0 * out.loss)  # scaled, as a trainer's loss is


def compile_library() -> str:
    """Build or find the C++ library, and return where it came from.

    Raises:
        RuntimeError: there is none; the message says why.
    """
    library = build.load()
    if library.refusal is not None:
        raise RuntimeError(library.refusal)
    return library.origin


def timed(name: str, step: Callable[[], object]) -> bool:
    """Print a line with the seconds that `step` takes and its result; return True if it raised nothing."""
    print(f"  {name:<{NAME_WIDTH}}", end="", flush=True)
    start = time.perf_counter()
    try:
        result = step() or ""
        failed = False
    except Exception as error:
        result, failed = f"FAILED {type(error).__name__}: {error}", True
    print(f"{time.perf_counter() - start:7.1f} s  {result}".rstrip(), flush=True)
    return not failed


def on_gpu(step: Callable[[], None]) -> None:
    """Run `step` to its end on the device."""
    step()
    torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels warmup``."""
    head_shape.add_arguments(parser)
    parser.add_argument("--softcap", type=float, help="of the logits, as in Gemma 2")
    parser.add_argument("--bias", action="store_true", help="the head has one")
    parser.add_argument(
        "--loss-type", choices=choices(LossTypeName), default="dapo", help="default: dapo"
    )
    parser.add_argument(
        "--teacher",
        action="store_true",
        help="divergences from another head, too: the slowest of all",
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compile, and print a line for each step; return 0 if nothing failed, else 1."""
    head = head_shape.described(parser, options)
    if options.softcap is not None:
        if not options.softcap > 0.0:
            parser.error(f"--softcap: expected more than 0, got {options.softcap}")
        head = replace(head, softcap=options.softcap)
    head = replace(head, bias=options.bias)
    print(describe(head, options.loss_type), flush=True)
    done = [timed("C++ library, for CPU tensors", compile_library)]
    if torch.cuda.is_available():
        print(f"Triton's kernels, on {torch.cuda.get_device_name()}", flush=True)
        device = torch.device("cuda", torch.cuda.current_device())
        calls = steps(head, device, "triton", loss_type=options.loss_type, teacher=options.teacher)
        done += [timed(name, partial(on_gpu, call)) for name, call in calls.items()]
    else:
        print(
            "Triton's kernels: none compiled; that needs the GPU that they are for, and there is none here"
        )
    failed = done.count(False)
    print(f"{failed} of {len(done)} steps FAILED" if failed else "done")
    return 1 if failed else 0
