"""The log's line that says what the library runs on: one for each kind of device in a process."""

from __future__ import annotations

import logging

import torch

from grpo_kernels.call.options import Execution
from grpo_kernels.engine.engines import why_engine
from grpo_kernels.engine.request import Engine, Situation

_logger = logging.getLogger(__name__)
_said: set[tuple[str, ...]] = set()


def log_use(
    device: torch.device, backend: str, why_backend: str, engine: Engine, call: Situation, execution: Execution
) -> None:
    """Log which backend and engine serve a call, and why: the first of a kind of device at INFO, what differs at DEBUG.

    A line counts as said once somebody could read it. Reads no tensor, so nothing waits for the device.
    """
    kind = device.type
    level, key = (logging.DEBUG, (kind, backend, engine.name)) if (kind,) in _said else (logging.INFO, (kind,))
    if key in _said or not _logger.isEnabledFor(level):
        return
    _said.update({(kind,), (kind, backend, engine.name)})
    compiled = execution.needs_grad is not None  # an op of a graph is told its engine
    why = "chosen when the graph was compiled" if compiled else why_engine(engine, call, execution.engine)
    _logger.log(level, "on %s: backend %s (%s), engine %s (%s)", kind, backend, why_backend, engine.name, why)
