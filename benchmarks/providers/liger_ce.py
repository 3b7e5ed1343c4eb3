"""Liger's per-token cross-entropy with entropies, `LigerFusedLinearScaledCrossEntropyFunction`. Tested with 0.8.5.

verl calls it with ``impl_backend="liger"``: packed, always with the entropy. 8 NVH, with a frozen head too. On Hopper
it is a CuTe DSL kernel for bf16; elsewhere torch, 512 tokens at a time, entropies in the dtype of the operands.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.harness.events import Absence
from benchmarks.providers import Forward, check_dtypes, from_logps
from benchmarks.providers.packing import packed

TEMPERATURE, IGNORE, TILES = 1.0, -100, 1  # as verl passes them


def liger_ce(inputs: Inputs) -> Forward:
    """By its own choice of kernel for the device."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    chosen = module._resolve_implementation(inputs.hidden.device)  # on Hopper: its CuTe DSL kernel, or ImportError
    function, entropy = module.LigerFusedLinearScaledCrossEntropyFunction, _wants_entropy(inputs)

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, TEMPERATURE, IGNORE, TILES, entropy)

    return _forward(inputs, apply, chosen.__name__)


def liger_torch(inputs: Inputs) -> Forward:
    """What it runs where it has no kernel of its own."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction as function

    entropy = _wants_entropy(inputs)

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, TEMPERATURE, IGNORE, entropy)

    return _forward(inputs, apply, function.__name__)


def _wants_entropy(inputs: Inputs) -> bool:
    return inputs.case.wants_entropy or not inputs.case.score


def _forward(inputs: Inputs, apply: Callable[[Tensor, Tensor], object], note: str) -> Forward:
    if inputs.case.softcap is not None:
        raise Absence("no soft-cap")
    check_dtypes(inputs)

    def rows(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        found = apply(hidden, ids)
        nll, entropies = found if isinstance(found, tuple) else (found, None)
        return -nll, entropies

    return from_logps(inputs, lambda: packed(inputs, rows), note)
