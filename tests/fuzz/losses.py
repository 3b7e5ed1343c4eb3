"""Random losses, heads, engines, backends and layouts against the float64 reference: all outputs
and gradients."""

from __future__ import annotations

import os
import random
from dataclasses import fields, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LossConfig, grpo_loss
from tests.fuzz.draws import Options
from tests.support.case_builder import Case, make_case
from tests.support.flat import flat
from tests.support.random_cases import case_options, with_garbage
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_head import LEAVES, head, on_grid
from tests.support.run_case import (
    allowed_engines,
    config_of,
    gradients_of,
    leaves_of,
    loss_arguments,
    packed,
)  # fmt: skip
from tests.support.sampler import MODES, PREFIX, given_ratio
from tests.support.tolerance import Bounds, assert_matches, bounds_of

OWN = ("name", "engine", "backend", "packed", "strides", "garbage", "scale", "no_mask")
HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
TRITON_SHARE = 0.06  # the interpreter takes a hundred times as long
TRITON_SHAPE = {"b": 2, "t": 4, "h": 8, "v": 33}
PLAIN = {
    x.name: x.default for x in (*fields(LossConfig), *signature(make_case).parameters.values())
}


def draw(random_: Any) -> Options:
    """Options of `make_case`, and how it is called."""
    sometimes = lambda p, value: value if random_.random() < p else None  # noqa: E731
    options = {k: x for k, x in case_options(random_).items() if x is not None}
    backend = "cpp" if random_.random() < 0.6 else "torch"
    if HAS_INTERPRETER and random_.random() < TRITON_SHARE:
        backend = "triton"
        options |= TRITON_SHAPE
        options["dtype"] = torch.float32
    if options["loss_type"] != "gmpo" and "ratio" not in options and random_.random() < 0.25:
        options |= {"sampling": True, PREFIX + "correction": True}
        options[PREFIX + "mode"] = random_.choice(MODES)
        options[PREFIX + "clip_max"] = random_.choice((1.1, 3.0))
        options[PREFIX + "clip_min"] = random_.choice((None, 0.7))
        options["dtype"] = torch.float64
    own: Options = {
        "engine": sometimes(0.8, random_.randrange(60)),
        "backend": backend,
        "packed": sometimes(0.25, True),
        "strides": sometimes(0.2, True),
        "garbage": sometimes(0.3, random_.randrange(10**6)),
        "scale": sometimes(0.3, random_.choice((-3.0, 0.25, 17.0))),
        "no_mask": sometimes(0.5, True),
    }
    if random_.random() < 0.15:
        options |= {"lora": random_.randint(1, 4), "lora_input": random_.random() < 0.5}
        if options["dtype"] != torch.float64:
            options["lora_dtype"] = random_.choice((None, torch.float32, torch.bfloat16))
    if options["dtype"] == torch.float16:
        own["scale"] = None  # below 2^-14 it rounds to a fixed step, which the bounds would scale
    name = f"fuzz/{random_.getrandbits(40)}"
    told = {k: x for k, x in options.items() if k not in PLAIN or x != PLAIN[k]}
    return {"name": name, **told, **{k: x for k, x in own.items() if x is not None}}


def mode_of(case: Case) -> str:
    return case.config.get(PREFIX + "mode", "sequence_mask")


def build(options: Options) -> tuple[Case, Case]:
    """The case for the library; and for the reference, whose sampler's ratio is ready made."""
    # the reference takes that ratio as exact, and bounds no rounding of it
    if options.get("dtype") != torch.float64:
        options = {k: x for k, x in options.items() if not k.startswith(PREFIX)}
    of_case = {k: x for k, x in options.items() if k not in OWN}
    case = same = make_case(options.get("name", "fuzz"), **of_case)
    if case.config.get(PREFIX + "correction") and case.sampling_per_token_logps is not None:
        scored, old = head(same), case.old_per_token_logps
        same = given_ratio(
            same, on_grid(scored.logps.detach(), scored.counted) if old is None else old
        )
        if mode_of(case) in ("sequence_mask", "sequence_truncate"):  # (B, 1) could be (B, T)
            same = same.but(importance_sampling_ratio=same.importance_sampling_ratio[:, 0])
    for name in [name for name in same.config if name.startswith(PREFIX)]:
        del same.config[name]
    if "garbage" in options:
        case = with_garbage(case, random.Random(options["garbage"]))
    return case, same


def engine_of(options: Options, case: Case) -> str:
    """One that is exact for the case, or the library's choice."""
    allowed = allowed_engines(case)
    if case.config.get(PREFIX + "correction"):  # of the ratio that is made here
        level = case.config.get("importance_sampling_level")
        by_sequence = mode_of(case).startswith("sequence") or level == "sequence"
        couples = by_sequence and case.old_per_token_logps is None
        allowed -= {"one_pass"} if couples or case.config.get("loss_type") == "vespo" else set()
    if "engine" not in options or not allowed:
        return "auto"
    return sorted(allowed)[options["engine"] % len(allowed)]


def with_strides(x: Any) -> Any:
    """The same numbers, laid out otherwise."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    wider = torch.full((*x.shape[:-1], x.shape[-1] + 3), 7, dtype=x.dtype)
    wider[..., 1:-2] = x.detach()
    return wider[..., 1:-2].requires_grad_(x.requires_grad)


def check(options: Options) -> None:
    """The library on the case, by one engine of one backend."""
    case, same = build(options)
    strided = with_strides if "strides" in options else lambda x: x
    leaves = {name: strided(x) for name, x in leaves_of(case).items()}
    arguments = loss_arguments(case, leaves).items()
    given = {name: x if name in leaves else strided(x) for name, x in arguments}
    if "no_mask" in options and bool((case.completion_mask != 0).all()):
        given["completion_mask"] = None
    call, stays = given, None
    if "packed" in options and case.completion_ids.shape[1]:
        call, stays = packed(case, given)
        if int(stays.sum()) == len(stays):  # (N,) would be (B,)
            call, stays = given, None
    backend = options.get("backend", "auto")
    if backend == "triton" and case.hidden.dtype == torch.float64:
        backend = "torch"  # Triton's kernels have no float64
    out = flat(grpo_loss)(
        **call, config=config_of(case), engine=engine_of(options, case), backend=backend,
        workspace_bytes=case.workspace_bytes,
    )  # fmt: skip
    scale = options.get("scale", 1.0)
    if out.loss.requires_grad:
        (out.loss * scale).backward()
    want = reference_loss(same)
    bounds = bounds_of(want, same)
    if case.config.get(PREFIX + "correction"):
        bounds = widened(bounds, want)
    assert_matches(padded(out, stays), gradients_of(leaves), want, same, bounds, scale)


def widened(bounds: Bounds, want: ReferenceResult) -> Bounds:
    """By what a ratio that was made of the call's own log-probabilities is off: in float64,
    rounding."""

    def more(bound: Any, x: Tensor) -> Any:
        return bound + 1e-12 * float(x.detach().abs().nan_to_num().max()) if x.numel() else bound

    grads = {f"d_{name}": getattr(bounds, f"d_{name}") for name in LEAVES}
    return replace(
        bounds,
        loss=more(bounds.loss, want.loss),
        metrics={name: more(x, want.metrics[name]) for name, x in bounds.metrics.items()},
        **{k: None if x is None else more(x, getattr(want, k)) for k, x in grads.items()},
    )


def padded(out: Any, stays: Tensor | None) -> Any:
    """A packed output as (B, T)."""
    if stays is None:
        return out
    grid = lambda x: x.new_zeros(stays.shape).masked_scatter(stays, x)  # noqa: E731
    rows = {name: grid(getattr(out, name)) for name in ("logps", "entropies")}
    return SimpleNamespace(loss=out.loss, metrics=out.metrics, **rows)
