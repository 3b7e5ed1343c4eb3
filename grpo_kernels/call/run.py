"""Options that change only how a call is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from grpo_kernels.backends import check_backend
from grpo_kernels.base.checks import check_budget, check_gather
from grpo_kernels.base.choices import BackendName, EngineName
from grpo_kernels.engine.engines import check_engine
from grpo_kernels.engine.request import Gather


@dataclass(frozen=True, eq=False)
class Run:
    """Options of how a call is computed; the results are the same up to rounding.

    Args:
        engine: one of `grpo_kernels.typing.EngineName`.
        backend: one of `grpo_kernels.typing.BackendName`.
        workspace_bytes: bound on temporary memory, whatever the number of tokens. None: 512 MiB, over kept sets 64 MiB;
            on a GPU up to 3 GiB, by the size of the head and the free memory.
        gather: makes a context in which the weight is whole (DeepSpeed ZeRO-3), for a backward that reads it again.

    Wrong values raise TypeError or ValueError in the call, before any work is done.
    """

    engine: EngineName = "auto"
    backend: BackendName = "auto"
    workspace_bytes: int | None = None
    gather: Gather | None = None


_OF_RUN = [x.name for x in fields(Run)]


@dataclass(frozen=True, eq=False)
class Execution(Run):
    """A `Run` in a call, with further options that decide how it is computed."""

    run: Any = field(
        default=None, kw_only=True
    )  # the argument `run`; `check` raises if it is no `Run`

    @staticmethod
    def of(run: Any) -> Execution:
        """Return the options `run` (None: the defaults) of a call; `check` checks them."""
        options = run if isinstance(run, Run) else Run()
        return Execution(*[getattr(options, name) for name in _OF_RUN], run=run)

    def check(self) -> None:
        """Raise TypeError unless the argument `run` is None or a `Run` whose `gather` is a function."""
        if self.run is not None and not isinstance(self.run, Run):
            raise TypeError(f"run: expected a Run, got {type(self.run).__name__}")
        check_gather(self.gather)


def check_run(run: Run) -> None:
    """Check the types and ranges of a run's options. Planning a call checks that its engine serves it."""
    check_engine(run.engine)
    check_backend(run.backend)
    if run.workspace_bytes is not None:
        check_budget(run.workspace_bytes)
