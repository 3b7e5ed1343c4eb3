"""Random losses, heads, engines, backends and layouts against the float64 reference: all outputs and gradients."""

from __future__ import annotations

import os
import random
from dataclasses import fields, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LoRA, LossConfig, grpo_loss
from tests.fuzz.attack import Attack, Options
from tests.support.case_builder import Case, make_case, seeded
from tests.support.flat import flat
from tests.support.random_cases import case_options, with_garbage
from tests.support.reference import ReferenceResult, head, on_grid, reference_loss
from tests.support.run_case import allowed_engines, arguments, config_of, packed
from tests.support.sampler_ratio import MODES, PREFIX, given_ratio
from tests.support.tolerance import Bounds, assert_matches, bounds_of

OWN = ("name", "engine", "backend", "packed", "strides", "garbage", "scale", "lora", "no_mask")
HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()
TRITON_SHARE = 0.06  # the interpreter takes a hundred times as long
TRITON_SHAPE = {"b": 2, "t": 4, "h": 8, "v": 33}
PLAIN = {x.name: x.default for x in (*fields(LossConfig), *signature(make_case).parameters.values())}


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
        options |= {"sampling": True, PREFIX + "correction": True, PREFIX + "mode": random_.choice(MODES)}
        options |= {PREFIX + "clip_max": random_.choice((1.1, 3.0)), PREFIX + "clip_min": random_.choice((None, 0.7))}
        options["dtype"] = torch.float64
    own: Options = {
        "engine": sometimes(0.8, random_.randrange(60)),
        "backend": backend,
        "packed": sometimes(0.25, True),
        "strides": sometimes(0.2, True),
        "garbage": sometimes(0.3, random_.randrange(10**6)),
        "scale": sometimes(0.3, random_.choice((-3.0, 0.25, 17.0))),
        "lora": sometimes(0.1, random_.randint(1, 4)),
        "no_mask": sometimes(0.5, True),
    }
    if own["lora"]:
        options["dtype"] = torch.float64  # its own bounds are of a merged head, which float32 would round
        options.pop("frozen", None)
    if options["dtype"] == torch.float16:
        own["scale"] = None  # below 2^-14 it rounds to a fixed step, which the bounds would scale
    name = f"fuzz/{random_.getrandbits(40)}"
    told = {k: x for k, x in options.items() if k not in PLAIN or x != PLAIN[k]}
    return {"name": name, **told, **{k: x for k, x in own.items() if x is not None}}


def build(options: Options) -> tuple[Case, Case, LoRA | None]:
    """The case for the library; the one for the reference, whose head is merged with the adapter and whose sampler's
    ratio is ready made; the adapter."""
    if options.get("dtype") != torch.float64:  # the reference takes that ratio as exact, and bounds no rounding of it
        options = {k: x for k, x in options.items() if not k.startswith(PREFIX)}
    case = make_case(options.get("name", "fuzz"), **{k: x for k, x in options.items() if k not in OWN})
    same, adapter = case, None
    if "lora" in options and case.hidden.dtype == torch.float64:
        adapter = lora_of(case, options["lora"])
        same = same.but(weight=case.weight + adapter.scaling * adapter.b.detach() @ adapter.a.detach())
    if case.config.get(PREFIX + "correction") and case.sampling_per_token_logps is not None:
        scored = head(same)
        logps = on_grid(scored.logps.detach(), scored.counted)
        same = given_ratio(same, logps if case.old_per_token_logps is None else case.old_per_token_logps)
        if case.config.get(PREFIX + "mode", "sequence_mask") in ("sequence_mask", "sequence_truncate"):
            same = same.but(importance_sampling_ratio=same.importance_sampling_ratio[:, 0])  # (B, 1) could be (B, T)
    for name in [name for name in same.config if name.startswith(PREFIX)]:
        del same.config[name]
    if "garbage" in options:
        case = with_garbage(case, random.Random(options["garbage"]))
    return case, same, adapter


def engine_of(options: Options, case: Case) -> str:
    """One that is exact for the case, or the library's choice."""
    allowed = allowed_engines(case)
    mode = case.config.get(PREFIX + "mode", "sequence_mask")
    if case.config.get(PREFIX + "correction"):  # of the ratio that is made here
        by_sequence = mode.startswith("sequence") or case.config.get("importance_sampling_level") == "sequence"
        couples = by_sequence and case.old_per_token_logps is None
        allowed -= {"one_pass"} if couples or case.config.get("loss_type") == "vespo" else set()
    if "lora" in options:
        allowed -= {"frozen", "score"}
    return sorted(allowed)[options["engine"] % len(allowed)] if "engine" in options and allowed else "auto"


def with_strides(x: Any) -> Any:
    """The same numbers, laid out otherwise."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    wider = torch.full((*x.shape[:-1], x.shape[-1] + 3), 7, dtype=x.dtype)
    wider[..., 1:-2] = x.detach()
    return wider[..., 1:-2].requires_grad_(x.requires_grad)


def check(options: Options) -> None:
    """The library on the case, by one engine of one backend."""
    case, same, adapter = build(options)
    given = arguments(case)
    if "no_mask" in options and bool((case.completion_mask != 0).all()):
        given["completion_mask"] = None
    if "strides" in options:
        given = {name: with_strides(x) for name, x in given.items()}
    call, stays = given, None
    if "packed" in options and case.completion_ids.shape[1]:
        call, stays = packed(case, given)
        if int(stays.sum()) == len(stays):  # (N,) would be (B,)
            call, stays = given, None
    backend = options.get("backend", "auto")
    if backend == "triton" and case.hidden.dtype == torch.float64:
        backend = "torch"  # Triton's kernels have no float64
    out = flat(grpo_loss)(
        **call, config=config_of(case), engine=engine_of(options, case), backend=backend, lora=adapter,
        workspace_bytes=case.workspace_bytes,
    )  # fmt: skip
    scale = options.get("scale", 1.0)
    if out.loss.requires_grad:
        (out.loss * scale).backward()
    grads = {name: None if given[name] is None else given[name].grad for name in ("hidden", "weight", "bias")}
    want = reference_loss(same)
    bounds = bounds_of(want, same)
    if case.config.get(PREFIX + "correction"):
        bounds = widened(bounds, want)
    assert_matches(padded(out, stays), grads, want, same, bounds, scale)
    if adapter is not None:
        up = scale * adapter.scaling
        for name, got, exact in (
            ("lora.a", adapter.a.grad, up * adapter.b.detach().T @ want.d_weight),
            ("lora.b", adapter.b.grad, up * want.d_weight @ adapter.a.detach().T),
        ):
            off = float((got - exact).abs().max()) if got is not None else float("nan")
            assert off <= 1e-9 * (1.0 + float(exact.abs().max())), f"d {name}: off by {off:.3g}"


def widened(bounds: Bounds, want: ReferenceResult) -> Bounds:
    """By what a ratio that was made of the call's own log-probabilities is off: in float64, rounding."""

    def more(bound: Any, x: Tensor) -> Any:
        return bound + 1e-12 * float(x.detach().abs().nan_to_num().max()) if x.numel() else bound

    return replace(
        bounds,
        loss=more(bounds.loss, want.loss),
        d_hidden=more(bounds.d_hidden, want.d_hidden),
        d_weight=more(bounds.d_weight, want.d_weight),
        d_bias=None if bounds.d_bias is None or want.d_bias is None else more(bounds.d_bias, want.d_bias),
        metrics={name: more(bound, want.metrics[name]) for name, bound in bounds.metrics.items()},
    )


def lora_of(case: Case, rank: int) -> LoRA:
    """An adapter that changes the logits by about as much as there is."""
    g = seeded(case.name + "/lora")
    vocab, width = case.weight.shape
    a, b = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((rank, width), (vocab, rank)))
    return LoRA(a.requires_grad_(), b.requires_grad_(), 0.3 / width**0.5)


def padded(out: Any, stays: Tensor | None) -> Any:
    """A packed output as (B, T)."""
    if stays is None:
        return out
    grid = lambda x: x.new_zeros(stays.shape).masked_scatter(stays, x)  # noqa: E731
    return SimpleNamespace(
        loss=out.loss, per_token_logps=grid(out.per_token_logps), entropies=grid(out.entropies), metrics=out.metrics
    )


LOSS = Attack(draw, check)
