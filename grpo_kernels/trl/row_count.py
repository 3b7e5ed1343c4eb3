"""Counts of the rows of TRL's head calls, in a trainer's log: they show that our head is at work.

Logged while training, for this process alone, as means over the calls since the last log:

- ``rows/projected``: the share of positions that went through the head's product, out of the completions' positions if
  the trainer says which they are (`FusedGRPOTrainer`, `FusedDistillationTrainer`), else out of those that TRL passes;
- ``rows/gradient``: the share of projected rows whose log-probability, entropy or divergence got a nonzero gradient.

Calls without gradient (old log-probabilities, a reference, evaluation) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import warn_once
from grpo_kernels.host import Patches, Shares
from grpo_kernels.trl.scoring import PATCHED

try:
    from trl.trainer.base_trainer import _BaseTrainer
except ImportError:  # another TRL: nothing is logged then
    _BaseTrainer = None


def count_rows(
    shares: Shares, positions: int, mask: Tensor | None, results: Sequence[Tensor | None]
) -> None:
    """Count a head call.

    Args:
        shares: the counts to add to.
        positions: number of positions of the call.
        mask: (rows,), True where a row was projected; None: all were, one row per position.
        results: (rows,) each; hooks on those with a graph count the rows that get a gradient.
    """
    attached = [x for x in results if x is not None and x.requires_grad]
    if not attached:
        return
    projected = positions if mask is None else mask.sum()
    shares.add("rows/projected", projected, positions)
    shares.add("rows/gradient", 0, projected)

    counted = torch.zeros_like(attached[0], dtype=torch.bool)

    def look(
        gradient: Tensor | None,
    ) -> None:  # no hook on several tensors: torch's holds their nodes, which hold it
        nonlocal counted
        if gradient is None:  # of a result that nothing reads, where its node made several
            return
        graded = (gradient != 0) if mask is None else (gradient != 0) & mask
        shares.add("rows/gradient", (graded & ~counted).sum(), 0)
        counted = counted | graded

    for x in attached:
        x.register_hook(look)


class LogsRows:
    """Part of a trainer, in front of TRL's class, that logs its `_shares`: those of rows, and others that it counts."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shares = Shares()
        super().__init__(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the shares of this process since the last log."""
        if self.model.training:
            logs.update(self._shares.take())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def patch(patches: Patches) -> None:
    """Have every TRL trainer log the shares of `PATCHED`, of this process: no rank waits for another."""
    if _BaseTrainer is not None:
        patches.replace(_BaseTrainer, "log", _log)


def _log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log as transformers does, with the row counts; warn if a training step had no rows."""
    if self.model.training:
        shares = PATCHED.shares.take()
        if not shares and "loss" in logs and not hasattr(self, "_shares"):
            _warn_not_reached(type(self).__name__)
        logs.update(shares)
    super(_BaseTrainer, self).log(logs, *args, **kwargs)


def _warn_not_reached(trainer: str) -> None:
    warn_once(
        f"patch_trl: {trainer} has trained a step without TRL's fused head, so nothing of it is computed by "
        "grpo_kernels. It makes all logits itself, as TRL's GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT and SDPO "
        "trainers do; in a loss of your own, linear_divergence and linear_logprob take the place of logits: "
        "examples/gkd_trl.py",
        RuntimeWarning,
    )
