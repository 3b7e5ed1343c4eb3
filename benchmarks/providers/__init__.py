"""One adapter for each way to compute the case, used as its users would, loaded when asked for.

An adapter takes the inputs and returns the forward: a call that gives an `Outcome`, whose loss the
harness differentiates. One that cannot do a case raises `Absence` with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.cases import Absence, Inputs, policy_loss

IGNORE = -100  # id of a masked token, for a cross-entropy


@dataclass(frozen=True)
class Outcome:
    """What a forward computed. Gradients come into the leaves when `loss` is differentiated."""

    loss: Tensor | None = None  # ()
    logps: Tensor | None = None  # (B, T)
    entropies: Tensor | None = None  # (B, T)
    note: str = ""  # which of its paths ran


Forward = Callable[[], Outcome]
Scored = tuple[Tensor, Tensor | None]  # log-probabilities, entropies
Rows = Callable[[Tensor, Tensor], Scored]  # (n, H), (n,) -> (n,) each


@dataclass(frozen=True)
class Provider:
    """Where an adapter is, and what can be said of it."""

    adapter: str  # module of this package, and function in it
    label: str  # for readers, with "{}" for the version of `package`, a distribution
    package: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)  # beside the inputs
    counted: bool = True  # its matrix products are torch's, so that torch can count operations
    compared: bool = True  # it has results to compare
    lacks: tuple[str, ...] = ()  # of `LACKING`, for which it is absent


# the cases that want it, and the reason not to do them
LACKING: dict[str, tuple[Callable[[Inputs], bool], str]] = {
    "soft-cap": (lambda x: x.case.softcap is not None, "no soft-cap"),
    "two dtypes": (lambda x: x.weight.dtype != x.hidden.dtype,
        "takes hidden states and weight of one dtype, under autocast too"),
    "CPU": (lambda x: not x.hidden.is_cuda, "its Triton kernel serves GPUs only"),
    "scores": (lambda x: x.case.score, "it has no log-probabilities to give"),
    "top entropy": (lambda x: x.case.top_entropy < 1, "it has no top-entropy mask"),
}  # fmt: skip
CAP, CE, GRPO = ("soft-cap",), ("soft-cap", "two dtypes"), ("scores", "top entropy", "soft-cap")
PROVIDERS = {
    "ours": Provider("heads.ours", "grpo_kernels"),
    "ours/torch": Provider("heads.ours", "grpo_kernels, torch backend",
        arguments={"backend": "torch"}),
    "ours/one_pass": Provider("heads.ours", "grpo_kernels, one pass",
        arguments={"engine": "one_pass"}),
    "ours/two_pass": Provider("heads.ours", "grpo_kernels, two passes",
        arguments={"engine": "two_pass"}),
    "ours/lean": Provider("heads.ours", "grpo_kernels, lean engine", arguments={"engine": "lean"}),
    "products": Provider("heads.products", "matrix products alone", compared=False),
    "eager": Provider("heads.eager", "all logits, log_softmax"),
    "compiled": Provider("heads.compiled", "all logits, torch.compile", counted=False),
    "linear_ce": Provider(
        "peers.linear_ce", "torch {} linear_cross_entropy", "torch", counted=False,
        lacks=CAP),
    "trl": Provider("peers.trl", "TRL {} fused head", "trl"),
    "liger_grpo": Provider("peers.liger_grpo", "Liger {} fused GRPO loss", "liger-kernel",
        lacks=GRPO),
    "liger_grpo/uncompiled": Provider(
        "peers.liger_grpo", "Liger {} fused GRPO loss, not compiled", "liger-kernel",
        {"compiled": ""}, lacks=GRPO),
    "liger_ce": Provider("peers.liger_ce", "Liger {} scaled CE", "liger-kernel", counted=False,
        lacks=CE),
    "liger_torch": Provider("peers.liger_torch", "Liger {} scaled CE, torch", "liger-kernel",
        lacks=CE),
    "verl_torch": Provider("peers.verl_torch", "verl {} torch head", "verl", lacks=CE),
    "verl_triton": Provider("peers.verl_triton", "verl {} Triton head", "verl", counted=False,
        lacks=("CPU", *CE)),
    "unsloth": Provider("peers.unsloth", "Unsloth {} fused log-probs", "unsloth_zoo",
        counted=False),
    "cce": Provider("peers.cce", "Apple CCE {}", "cut-cross-entropy", counted=False),
}  # fmt: skip


def named(name: str) -> Provider:
    """The provider `name`; ``ours@128`` is ours with a workspace of so many MiB."""
    kind, _, mib = name.partition("@")
    if kind in PROVIDERS and (not mib or (kind.startswith("ours") and mib.isdigit())):
        found, more = PROVIDERS[kind], {"workspace": mib} if mib else {}
        return replace(found, arguments={**found.arguments, **more})
    known = ", ".join(PROVIDERS)
    raise ValueError(f"providers: expected some of {known}, or ours@MIB, got {name!r}")


def build(name: str, inputs: Inputs, backend: str = "auto") -> Forward:
    """The forward of the provider `name`, with `backend` for ours; `Absence` if it is not installed
    or does not do this case."""
    provider = named(name)
    module, _, function = provider.adapter.partition(".")
    arguments = {**({"backend": backend} if function == "ours" else {}), **provider.arguments}
    try:
        adapter = getattr(importlib.import_module(f"benchmarks.providers.{module}"), function)
        forward: Forward = adapter(inputs, **arguments)
    except ImportError as error:
        raise Absence(f"{type(error).__name__}: {error}") from error
    for wants, reason in (LACKING[x] for x in provider.lacks):
        if wants(inputs):
            raise Absence(reason)
    if not inputs.case.autocast:
        return forward
    # as a trainer calls it: head and loss inside, the backward outside
    return torch.autocast(inputs.hidden.device.type, dtype=torch.bfloat16)(forward)


def from_logps(inputs: Inputs, logps: Callable[[], Scored], note: str = "") -> Forward:
    """A forward around differentiable log-probabilities (B, T), and entropies (B, T) or None."""

    def forward() -> Outcome:
        with torch.set_grad_enabled(not inputs.case.score):
            scored, entropies = logps()
            loss = None if inputs.case.score else policy_loss(inputs, scored, entropies)
            return Outcome(loss, scored, entropies, note)

    return forward


def from_rows(inputs: Inputs, rows: Rows, note: str, *, packs: bool = True) -> Forward:
    """A forward around `rows` of the tokens that count, packed; or of all tokens."""
    packs, counted = packs and inputs.case.padding > 0, inputs.mask.bool()

    def whole(values: Tensor) -> Tensor:
        if not packs:
            return values.view(counted.shape)
        return values.new_zeros(counted.shape).masked_scatter(counted, values)

    def logps() -> Scored:
        both = inputs.hidden, inputs.ids
        scored, entropies = rows(*(x[counted] if packs else x.flatten(0, 1) for x in both))
        return whole(scored), None if entropies is None else whole(entropies)

    return from_logps(inputs, logps, note)


def from_nll(inputs: Inputs, nll: Callable[[Tensor, Tensor], Tensor], note: str) -> Forward:
    ids = inputs.ids.masked_fill(inputs.mask == 0, IGNORE) if inputs.case.padding else inputs.ids
    ids = ids.reshape(-1)

    def logps() -> Scored:
        return -nll(inputs.hidden.reshape(-1, inputs.case.h), ids).view(inputs.ids.shape), None

    return from_logps(inputs, logps, f"{note}, no entropy")


@contextmanager
def forgotten(package: str) -> Iterator[None]:
    """Forget afterwards what is imported of `package` inside: others may want it whole."""
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - known:
            if name.partition(".")[0] == package:
                del sys.modules[name]


def without_init(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which wants Ray and more."""
    for name in names:
        parent, _, last = name.rpartition(".")
        if name in sys.modules:
            continue
        if parent:
            paths = [f"{path}/{last}" for path in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"{name} is not installed")
            paths = list(spec.submodule_search_locations)
        empty_package(name, paths)


def empty_package(name: str, paths: list[str]) -> None:
    module = types.ModuleType(name)
    module.__path__ = paths
    sys.modules[name] = module
