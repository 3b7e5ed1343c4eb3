"""One adapter for each way to compute the case, each used as its users would, each loaded only when it is asked for.

An adapter takes the inputs and returns the forward: a call that gives an `Outcome`, whose loss the harness
differentiates. One that cannot do a case raises `Absence` with the reason.
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


@dataclass(frozen=True)
class Outcome:
    """What a forward computed. Gradients come into the leaves when `loss` is differentiated."""

    loss: Tensor | None = None  # ()
    logps: Tensor | None = None  # (B, T)
    entropies: Tensor | None = None  # (B, T)
    note: str = ""  # which of its paths ran
    divergences: Tensor | None = None  # (B, T)


Forward = Callable[[], Outcome]
Rows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]  # (n, H), (n,) -> log-probabilities, entropies (n,)


@dataclass(frozen=True)
class Provider:
    """Where an adapter is, and what can be said of it.

    Attributes:
        module: of this package.
        function: in it, ``function(inputs)``, or with `arguments` too.
        label: for readers, with "{}" for the version of `package`, a distribution.
        counted: its matrix products are torch's, so that torch can count their operations.
        compared: it has results to compare.
    """

    module: str
    function: str
    label: str = ""
    package: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    counted: bool = True
    compared: bool = True


PROVIDERS = {
    "ours": Provider("ours", "ours", "grpo_kernels"),
    "ours/torch": Provider("ours", "ours", "grpo_kernels, torch backend", arguments={"backend": "torch"}),
    "ours/one_pass": Provider("ours", "ours", "grpo_kernels, one pass", arguments={"engine": "one_pass"}),
    "ours/two_pass": Provider("ours", "ours", "grpo_kernels, two passes", arguments={"engine": "two_pass"}),
    "ours/lean": Provider("ours", "ours", "grpo_kernels, lean engine", arguments={"engine": "lean"}),
    "ours/score_dot": Provider(
        "ours", "ours", "grpo_kernels, score_dot", arguments={"engine": "score_dot"}, counted=False
    ),
    "ours/no_mask": Provider("ours", "ours", "grpo_kernels, no mask", arguments={"mask": "none"}),
    "ours/expected": Provider("ours", "expected", "grpo_kernels, linear_logprob"),
    "products": Provider("products", "products", "matrix products alone", compared=False),
    "eager": Provider("torch_heads", "eager", "all logits, log_softmax"),
    "eager/selective": Provider("torch_heads", "selective", "all logits, TRL's selective"),
    "compiled": Provider("torch_heads", "compiled", "all logits, torch.compile", counted=False),
    "linear_ce": Provider("torch_heads", "linear_ce", "torch {} linear_cross_entropy", "torch", counted=False),
    "trl": Provider("trl", "trl", "TRL {} fused head", "trl"),
    "liger_grpo": Provider("liger", "liger_grpo", "Liger {} fused GRPO loss", "liger-kernel"),
    "liger_grpo/uncompiled": Provider("liger", "uncompiled", "Liger {} fused GRPO loss, not compiled", "liger-kernel"),
    "liger_ce": Provider("liger", "liger_ce", "Liger {} scaled CE", "liger-kernel", counted=False),
    "liger_torch": Provider("liger", "liger_torch", "Liger {} scaled CE, torch", "liger-kernel"),
    "verl_torch": Provider("verl", "verl_torch", "verl {} torch head", "verl"),
    "verl_triton": Provider("verl", "verl_triton", "verl {} Triton head", "verl", counted=False),
    "unsloth": Provider("unsloth", "unsloth", "Unsloth {} fused log-probs", "unsloth_zoo", counted=False),
    "cce": Provider("cce", "cce", "Apple CCE {}", "cut-cross-entropy", counted=False),
    "quack": Provider("quack", "quack", "QuACK {} linear CE", "quack-kernels", counted=False),
    "quack/chunked": Provider(
        "quack", "chunked", "QuACK {} mean CE, no policy loss", "quack-kernels", counted=False, compared=False
    ),
}
DISTILLERS = {  # of a case that has a teacher
    "ours": Provider("divergence", "ours", "grpo_kernels"),
    "ours/torch": Provider("divergence", "ours", "grpo_kernels, torch backend", arguments={"backend": "torch"}),
    "products": PROVIDERS["products"],
    "eager": Provider("divergence", "eager", "all logits, log_softmax"),
    "compiled": Provider("divergence", "compiled", "all logits, torch.compile", counted=False),
    "trl": Provider("divergence", "trl", "TRL {} fused head", "trl"),
    "liger_jsd": Provider("divergence", "liger_jsd", "Liger {} chunked JSD loss, torch", "liger-kernel"),
    "liger_jsd/fused": Provider("divergence", "liger_fused", "Liger {} fused JSD, Triton", "liger-kernel"),
}


def named(name: str, *, distils: bool = False) -> Provider:
    """The provider `name`, of a policy loss or, if it `distils`, of a divergence, as far as it has one; ``ours@128`` is
    ours with a workspace of 128 MiB.

    Raises:
        ValueError: there is none of that name.
    """
    known = {**PROVIDERS, **DISTILLERS} if distils else {**DISTILLERS, **PROVIDERS}
    kind, _, mib = name.partition("@")
    if kind in known and (not mib or (known[kind].function == "ours" and mib.isdigit())):
        found = known[kind]
        return replace(found, arguments={**found.arguments, **({"workspace": mib} if mib else {})})
    raise ValueError(f"providers: expected some of {', '.join(known)}, or ours@MIB, got {name!r}")


def build(name: str, inputs: Inputs, backend: str = "auto") -> Forward:
    """The forward of the provider `name`, with `backend` for ours.

    Raises:
        Absence: it is not installed, or does not do this case.
        ValueError: there is no provider of that name.
    """
    distils = inputs.teacher is not None
    provider = named(name, distils=distils)
    if name.partition("@")[0] not in (DISTILLERS if distils else PROVIDERS):
        raise Absence("no divergence from a teacher" if distils else "no policy loss")
    arguments = {**({"backend": backend} if provider.function == "ours" else {}), **provider.arguments}
    try:
        function = getattr(importlib.import_module(f"benchmarks.providers.{provider.module}"), provider.function)
        forward = function(inputs, **arguments)
    except ImportError as error:
        raise Absence(f"{type(error).__name__}: {error}") from error
    return under_autocast(forward, inputs.hidden.device.type) if inputs.case.autocast else forward


def under_autocast(forward: Forward, device: str) -> Forward:
    """As a trainer calls it: head and loss inside, the backward outside."""

    def cast() -> Outcome:
        with torch.autocast(device, dtype=torch.bfloat16):
            return forward()

    return cast


def from_logps(inputs: Inputs, logps: Callable[[], tuple[Tensor, Tensor | None]], note: str = "") -> Forward:
    """A forward around differentiable log-probabilities (B, T), and entropies (B, T) or None."""

    def score() -> Outcome:
        with torch.no_grad():
            return Outcome(None, *logps(), note)

    def forward() -> Outcome:
        found, entropies = logps()
        return Outcome(policy_loss(inputs, found, entropies), found, entropies, note)

    return score if inputs.case.score else forward


def check_dtypes(inputs: Inputs) -> None:
    """Refuse a case in which autocast would have to bring hidden states and weight to one dtype.

    Raises:
        Absence: their dtypes differ.
    """
    if inputs.weight.dtype != inputs.hidden.dtype:
        raise Absence(
            f"takes hidden states and weight of one dtype, under autocast too; got {inputs.hidden.dtype} and"
            f" {inputs.weight.dtype}"
        )


def packed(inputs: Inputs, function: Rows) -> tuple[Tensor, Tensor | None]:
    """Apply `function` to the tokens that count, as trainers do that pack sequences.

    Returns:
        Log-probabilities (B, T), 0 where the mask is, and entropies (B, T) or None.
    """
    if not inputs.case.padding:
        logps, entropies = function(inputs.hidden.reshape(-1, inputs.case.h), inputs.ids.reshape(-1))
        return logps.view(inputs.ids.shape), None if entropies is None else entropies.view(inputs.ids.shape)
    counted = inputs.mask.bool()
    logps, entropies = function(inputs.hidden[counted], inputs.ids[counted])
    return _whole(logps, counted), None if entropies is None else _whole(entropies, counted)


def without_masked(inputs: Inputs, ignore_index: int) -> Tensor:
    """`ids` (B, T) with `ignore_index` where the mask is 0."""
    return inputs.ids.masked_fill(inputs.mask == 0, ignore_index) if inputs.case.padding else inputs.ids


def _whole(values: Tensor, counted: Tensor) -> Tensor:
    return values.new_zeros(counted.shape).masked_scatter(counted, values)


@contextmanager
def forgotten(package: str) -> Iterator[None]:
    """What is imported of `package` inside is not found again afterwards: others may want it whole."""
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - known:
            if name.partition(".")[0] == package:
                del sys.modules[name]


def without_init(*names: str) -> None:
    """Make packages importable without running their ``__init__``, which wants what a kernel does not (Ray, ...).

    Raises:
        ImportError: the first of them is not installed.
    """
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
    """Put a package into ``sys.modules`` that has nothing but the places of its modules."""
    module = types.ModuleType(name)
    module.__path__ = paths
    sys.modules[name] = module
