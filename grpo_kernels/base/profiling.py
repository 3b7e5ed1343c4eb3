"""Ranges of a call's phases in traces of torch.profiler, and of NVIDIA's under ``torch.autograd.profiler.emit_nvtx``.

A call itself is there as ``grpo_kernels::loss``, or by the name of its autograd Function (``LinearLogprob``), and so is
its backward (``PolicyLossBackward``, ``LinearLogprobBackward``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function

# a loss's first pass; in it, and in other passes: products to logits, row kernels, products to gradients
Phase = Literal["loss", "logits", "rows", "gradients"]
_NOTHING = nullcontext()


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Return the range ``grpo_kernels::<name>`` for a ``with`` statement; one that does nothing without a profiler."""
    return record_function(f"grpo_kernels::{name}") if torch._C._autograd._profiler_enabled() else _NOTHING
