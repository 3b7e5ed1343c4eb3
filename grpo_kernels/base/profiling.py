"""Named ranges that show the phases of a call in the traces of profilers.

torch.profiler records them, as do NVIDIA's profilers under ``torch.autograd.profiler.emit_nvtx``. torch itself records
the autograd Functions by name: ``LinearLogprob``, and the backwards ``PolicyLossBackward`` and
``LinearLogprobBackward``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function

Phase = Literal[
    "loss",  # the first pass of a loss; the other phases lie in it, and in all other passes
    "logits",  # matrix products that make logits
    "rows",  # row kernels, which read the logits
    "gradients",  # matrix products that make gradients
]
_NOTHING = nullcontext()


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Return the range ``grpo_kernels::<name>`` for a ``with`` statement; one that does nothing without a profiler."""
    # torch has no public test for a profiler, and a `record_function` costs time without one, too
    return (
        record_function(f"grpo_kernels::{name}")
        if torch._C._autograd._profiler_enabled()
        else _NOTHING
    )
