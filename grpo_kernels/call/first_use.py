"""Log lines about backend and engine, at the first call on a kind of device and at the first that trains."""

from __future__ import annotations

import logging

import torch

from grpo_kernels.call.run import Execution
from grpo_kernels.engine.engines import why_engine
from grpo_kernels.engine.request import Engine, Situation

_logger = logging.getLogger(__name__)
_logged: set[tuple[str, ...]] = set()


def log_use(
    device: torch.device,
    backend: str,
    why_backend: str,
    engine: Engine,
    call: Situation,
    execution: Execution,
) -> None:
    """Log which backend and engine serve a call, and why: at INFO the first call on a kind of device and, if that only
    scores, the first that trains; at DEBUG each other pair of backend and engine.

    Each line is logged once, at the first call with its level enabled. No tensor is read: nothing waits for the device.
    """
    kind, use = device.type, "scores" if call.no_gradient else "trains"
    is_known = (kind, "trains") in _logged or (kind, use) in _logged
    level, key = (
        (logging.DEBUG, (kind, backend, engine.name)) if is_known else (logging.INFO, (kind, use))
    )
    if key in _logged or not _logger.isEnabledFor(level):
        return
    _logged.update({(kind, use), (kind, backend, engine.name)})
    why = why_engine(engine, call, execution.engine)
    _logger.log(
        level,
        "on %s: backend %s (%s), engine %s (%s)",
        kind,
        backend,
        why_backend,
        engine.name,
        why,
    )
