"""The release of TRL whose trainers are known, and what stands for ours with another one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import trl
from trl import DistillationTrainer, GRPOTrainer

from grpo_kernels.base.checks import warn_once

SUPPORTED = "1.16"  # one minor version
IS_KNOWN = trl.__version__.startswith(f"{SUPPORTED}.")
_MESSAGE = (
    f"expected trl {SUPPORTED}, got trl {trl.__version__}, which works as without grpo_kernels"
)
# Options of `FusedLossMixin` that change no result
_OF_COST = (
    *("fused_sampling_correction", "zero_advantage", "layout", "regroup", "tokens_per_forward"),
    *("engine", "backend", "workspace_bytes"),
)
_OF_RESULTS = {"kl_estimator": "k3", "sampling_mask": None}

if not IS_KNOWN:
    warnings.warn(f"grpo_kernels: {_MESSAGE}", stacklevel=2)


class Patch(int):
    """1 if TRL is patched, 0 if it was left alone. As a context manager it undoes what it did."""

    undo: Callable[[], None] | None

    def __new__(cls, is_patched: bool, undo: Callable[[], None] | None = None) -> Patch:
        found = super().__new__(cls, is_patched)
        found.undo = undo
        return found

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.undo is not None:
            self.undo()


class FusedLossMixin:
    """Takes our options in front of a trainer of an unknown TRL, which runs as it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warn_once(_MESSAGE)
        for name, default in _OF_RESULTS.items():
            if kwargs.pop(name, default) != default:
                raise ValueError(f"{name}: expected {default!r} with trl {trl.__version__}")
        super().__init__(*args, **{x: y for x, y in kwargs.items() if x not in _OF_COST})


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """TRL's trainer as it is."""


FusedDistillationTrainer = DistillationTrainer


def patch_trl(**_: Any) -> Patch:
    """Warn: this TRL is left alone."""
    warn_once(_MESSAGE)
    return Patch(False)


def unpatch_trl() -> None:
    """Change nothing."""
