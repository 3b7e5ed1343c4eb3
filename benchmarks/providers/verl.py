"""verl's two fused heads, each of which always gives log-probabilities and entropies. For 0.9.1;
Triton not yet run.

Used packed, as its trainers do by default (``use_remove_padding``). Both compute the gradient of a
frozen weight and drop it: 8 NVH always. verl's own ``__init__`` wants Ray and more, which the heads
do not: their files are imported into a package of our own, with their siblings, since the Triton
head says ``from . import kernels`` in every call.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.providers import Forward, Scored, empty_package, forgotten, from_rows, without_init

TEMPERATURE = 1.0
APART = "verl_apart"  # stays in sys.modules, where verl does not
SIBLINGS = {
    "linear_cross_entropy": ("kernels",)
}  # what a file imports beside itself, not before it is called


def verl_torch(inputs: Inputs) -> Forward:
    """`FusedLinearForPPO`: torch, 512 tokens at a time; logits and entropies are rounded."""
    function = module("experimental", "torch_functional").FusedLinearForPPO()

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        return function(hidden, inputs.weight, ids, temperature=TEMPERATURE)

    return from_rows(inputs, rows, f"chunk_size={function.chunk_size}")


def verl_triton(inputs: Inputs) -> Forward:
    """`linear_cross_entropy`: Triton for the logits, torch for the gradients' products."""
    function = module("kernel", "linear_cross_entropy").linear_cross_entropy

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        return function(hidden, inputs.weight, ids, TEMPERATURE, "none")

    return from_rows(inputs, rows, "linear_cross_entropy")


@functools.cache
def module(folder: str, name: str) -> ModuleType:
    """verl/utils/<folder>/<name>.py, with its siblings; verl itself is as it was afterwards."""
    with forgotten("verl"):
        without_init("verl", "verl.utils", f"verl.utils.{folder}")
        empty_package(APART, [])
        empty_package(f"{APART}.{folder}", list(sys.modules[f"verl.utils.{folder}"].__path__))
        for sibling in SIBLINGS.get(name, ()):
            importlib.import_module(f"{APART}.{folder}.{sibling}")
        return importlib.import_module(f"{APART}.{folder}.{name}")
