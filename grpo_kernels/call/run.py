"""Options of a call that change only how it is computed, and its temperature."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.backends import check_backend
from grpo_kernels.base.checks import check_budget, check_gather, check_number, check_shape, check_tensor
from grpo_kernels.base.choices import BackendName, EngineName
from grpo_kernels.engine.engines import check_engine
from grpo_kernels.engine.records import NeedsGrad
from grpo_kernels.engine.request import Gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Run:
    """How a call is computed; the results are the same up to rounding.

    Args:
        engine: one of `grpo_kernels.typing.EngineName`. (Under torch.compile ``"auto"`` is never ``"lean"``.)
        backend: one of `grpo_kernels.typing.BackendName`.
        workspace_bytes: bound on temporary memory, whatever the number of tokens. None: 512 MiB, over kept sets 64 MiB;
            on a GPU up to 3 GiB, by the size of the head and the free memory.
        gather: makes a context in which the weight is whole (DeepSpeed ZeRO-3), for a backward that reads it again.
            Breaks the graph of torch.compile.

    Wrong values raise TypeError or ValueError in the call, before any work is done.
    """

    engine: EngineName = "auto"
    backend: BackendName = "auto"
    workspace_bytes: int | None = None
    gather: Gather | None = None


_OF_RUN = [x.name for x in fields(Run)]


@dataclass(frozen=True, eq=False)
class Execution(Run):
    """A `Run` in a call, with what else decides how it is computed."""

    sequence_group: ProcessGroup | None = field(default=None, kw_only=True)  # as in `grpo_loss`
    needs_grad: NeedsGrad | None = field(default=None, kw_only=True)  # None: of the tensors that train
    dtype: torch.dtype | None = field(default=None, kw_only=True)  # of the operands; None: `LMHead.compute_dtype`
    given: Any = field(default=None, kw_only=True)  # as the caller gave it; `check` says if it is no `Run`

    @staticmethod
    def of(run: Any, *, sequence_group: ProcessGroup | None = None) -> Execution:
        """Return the options `run` (None: the defaults) of a call; `check` checks them."""
        own = run if isinstance(run, Run) else Run()
        return Execution(*[getattr(own, name) for name in _OF_RUN], sequence_group=sequence_group, given=run)

    def check(self) -> None:
        """Raise unless the caller gave a `Run` whose `gather` is a function.

        Raises:
            TypeError: it is none.
        """
        if self.given is not None and not isinstance(self.given, Run):
            raise TypeError(f"run: expected a Run, got {type(self.given).__name__}")
        check_gather(self.gather)

    def described(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks."""
        return {"engine": self.engine, "backend": self.backend, "workspace_bytes": self.workspace_bytes}


def check_run(run: Run) -> None:
    """Check the types and ranges of a run's options; whether an engine serves a call is checked when it is planned."""
    check_engine(run.engine)
    check_backend(run.backend)
    if run.workspace_bytes is not None:
        check_budget(run.workspace_bytes)


def inv_temperature(temperature: float | Tensor, ids: Tensor, positions: Tensor, dtype: torch.dtype) -> float | Tensor:
    """1 / temperature of the rows at `positions` (n,) of `ids`: a number, or (n, 1) if there is one per position.

    Raises:
        TypeError, ValueError: a number that is not > 0; a tensor that does not fit the ids, or, on a CPU, has wrong
            numbers.
    """
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0.0)
        return 1.0 / float(temperature)
    check_tensor("temperature", temperature, like=ids, floating=True)
    check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
    rows = temperature.detach().reshape(-1)[positions].to(dtype)
    bad = ~((rows > 0) & torch.isfinite(rows))
    if rows.device.type == "cpu" and bool(bad.any()):
        got = rows[bad][0].item()
        raise ValueError(f"temperature: expected finite numbers > 0 where the mask counts, got {got}")
    return (1.0 / rows)[:, None]


def described_temperature(temperature: float | Tensor, inverse: float | Tensor) -> dict[str, Any]:
    """Return what must be equal on all ranks; `inverse` is that of the rows."""
    if not isinstance(temperature, Tensor):
        return {"temperature": float(temperature)}
    return {"temperature": "one per position", "temperatures": inverse}
