"""Counts of the rows of TRL's head calls, in a trainer's log: they show that our head is at work.

Logged while training, for this process alone, as means over the calls since the last log:

- ``rows/projected``: the share of positions that went through the head's product, out of the completions' positions if
  the trainer says which they are (`FusedGRPOTrainer`, `FusedDistillationTrainer`), else out of those that TRL passes;
- ``rows/gradient``: the share of projected rows whose log-probability, entropy or divergence got a nonzero gradient.

Calls without gradient (old log-probabilities, a reference, evaluation) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import warn_once
from grpo_kernels.integrations.patching import Patches

try:
    from trl.trainer.base_trainer import _BaseTrainer
except ImportError:  # another TRL: nothing is logged then
    _BaseTrainer = None


class RowCount:
    """Counter on the device; only `take` waits for it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again at 0."""
        self._positions = 0
        self._projected: Tensor | int = 0
        self._graded: Tensor | int = 0

    def add(self, positions: int, mask: Tensor | None, results: Sequence[Tensor | None]) -> None:
        """Count a call.

        Args:
            positions: number of positions of the call.
            mask: (rows,), True where a row was projected; None: all were, one row per position.
            results: (rows,) each; hooks on those with a graph count the rows that get a gradient.
        """
        attached = [x for x in results if x is not None and x.requires_grad]
        if not attached:
            return
        self._positions += positions
        self._projected = _sum(self._projected, positions if mask is None else mask.sum())

        def look(gradients: Sequence[Tensor | None]) -> None:
            graded = torch.stack([x != 0 for x in gradients if x is not None]).any(dim=0)
            self._graded = _sum(self._graded, (graded if mask is None else graded & mask).sum())

        torch.autograd.graph.register_multi_grad_hook(attached, look)

    def take(self) -> dict[str, float]:
        """Return the shares since the last `take`, by name; empty if there was no call."""
        positions, projected, graded = self._positions, int(self._projected), int(self._graded)
        self.reset()
        if positions == 0:
            return {}
        return {"rows/projected": projected / positions, "rows/gradient": graded / max(1, projected)}


def _sum(total: Tensor | int, x: Tensor | int) -> Tensor | int:
    return total + (x.to(total.device) if isinstance(total, Tensor) and isinstance(x, Tensor) else x)


PATCHED = RowCount()  # count for the trainers that `patch_trl` has changed
_current: ContextVar[RowCount] = ContextVar("grpo_kernels_trl_row_count", default=PATCHED)


def current() -> RowCount:
    """Return the counter of the running head call."""
    return _current.get()


@contextmanager
def counting(count: RowCount) -> Iterator[None]:
    """Inside, head calls are counted by `count`."""
    token = _current.set(count)
    try:
        yield
    finally:
        _current.reset(token)


class LogsRows:
    """Part of a trainer, in front of TRL's class, that logs the rows of its head calls, counted in `_row_count`."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._row_count = RowCount()
        super().__init__(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the row counts of this process."""
        if self.model.training:
            logs.update(self._row_count.take())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def patch(patches: Patches) -> None:
    """Have every TRL trainer log `PATCHED`, the count of this process: no rank waits for another.

    It begins at 0, whatever was counted under an earlier patch and never logged.
    """
    PATCHED.reset()
    if _BaseTrainer is not None:
        patches.replace(_BaseTrainer, "log", _log)


def _log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log as transformers does, with the row counts; warn if a training step had no rows."""
    if self.model.training:
        found = PATCHED.take()
        if not found and "loss" in logs and not hasattr(self, "_row_count"):
            _warn_not_reached(type(self).__name__)
        logs.update(found)
    super(_BaseTrainer, self).log(logs, *args, **kwargs)


def _warn_not_reached(trainer: str) -> None:
    warn_once(
        f"patch_trl: {trainer} has trained a step without TRL's fused head, so nothing of it is computed by "
        "grpo_kernels. It makes all logits itself, as TRL's GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT and SDPO "
        "trainers do; for the first two there are FusedGKDTrainer and FusedIWOPDTrainer, for the others "
        "attach(model.lm_head) in a loss of your own",
        RuntimeWarning,
    )
