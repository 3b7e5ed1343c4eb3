"""Options of a call: those that change only time and memory, and those of the head's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from grpo_kernels.backends import check_backend
from grpo_kernels.base.checks import check_budget, check_shape, check_tensor
from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.config import LossConfig
from grpo_kernels.engine.engines import check_engine
from grpo_kernels.engine.records import NeedsGrad
from grpo_kernels.engine.request import Gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Project = Callable[[Tensor, Tensor], Tensor]  # (n, H) and (H, V) -> (n, V)
Projection = Literal["library", "dispatch"] | Project


def check_options(engine: Any, backend: Any, workspace_bytes: Any) -> None:
    """Check the options' types and ranges; whether an engine can serve a call is checked when it is planned."""
    check_engine(engine)
    check_backend(backend)
    if workspace_bytes is not None:
        check_budget(workspace_bytes)


@dataclass(frozen=True, eq=False)
class Execution:
    """Options of how a call is computed; as in `grpo_loss`, except where said."""

    engine: str = "auto"
    backend: str = "auto"
    workspace_bytes: int | None = None
    gather: Gather | None = None
    sequence_group: ProcessGroup | None = None
    needs_grad: NeedsGrad | None = None  # gradients to compute; None: those of the tensors that train
    dtype: torch.dtype | None = None  # of the products' operands; None: `LMHead.compute_dtype`
    projection: Projection = "library"  # as in `linear_logprob`, the only call that has it

    def described(self) -> dict[str, Any]:
        """Return the options that must be equal on all ranks."""
        return {"engine": self.engine, "backend": self.backend, "workspace_bytes": self.workspace_bytes}


@dataclass(frozen=True, eq=False)
class HeadOptions:
    """``z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, as in `linear_logprob`."""

    temperature: float | Tensor = 1.0  # a number, or one per position
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    logits_dtype: LogitsDtype = "float32"

    @staticmethod
    def of(config: LossConfig) -> HeadOptions:
        """Return the options of a loss."""
        return HeadOptions(config.temperature, config.final_logit_softcapping, config.logit_scale, config.logits_dtype)

    def checked(self) -> HeadOptions:
        """Return these options, checked, in Python's own types.

        Raises:
            TypeError, ValueError: as `LossConfig` does for its fields of these names.
        """
        per_position = isinstance(self.temperature, Tensor)
        found = HeadOptions.of(
            LossConfig(
                temperature=1.0 if per_position else self.temperature,  # type: ignore[arg-type]
                final_logit_softcapping=self.final_logit_softcapping,
                logit_scale=self.logit_scale,
                logits_dtype=self.logits_dtype,
            )
        )
        return replace(found, temperature=self.temperature) if per_position else found

    def inv_temperature(self, ids: Tensor, positions: Tensor, dtype: torch.dtype) -> float | Tensor:
        """1 / temperature of the rows at `positions` (n,) of `ids`: a number, or (n, 1).

        Raises:
            TypeError, ValueError: a tensor that does not fit the ids, or, on a CPU, has wrong numbers.
        """
        temperature = self.temperature
        if not isinstance(temperature, Tensor):
            return 1.0 / temperature
        check_tensor("temperature", temperature, like=ids, floating=True)
        check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
        rows = temperature.detach().reshape(-1)[positions].to(dtype)
        bad = ~((rows > 0) & torch.isfinite(rows))
        if rows.device.type == "cpu" and bool(bad.any()):
            got = rows[bad][0].item()
            raise ValueError(f"temperature: expected finite numbers > 0 where the mask counts, got {got}")
        return (1.0 / rows)[:, None]

    def described(self, inv_temperature: float | Tensor) -> dict[str, Any]:
        """Return the options that must be equal on all ranks; `inv_temperature` is that of the rows."""
        one_each = isinstance(inv_temperature, Tensor)
        return {
            "temperature": "one per position" if one_each else self.temperature,
            "final_logit_softcapping": self.final_logit_softcapping,
            "logit_scale": self.logit_scale,
            "logits_dtype": self.logits_dtype,
            **({"temperatures": inv_temperature} if one_each else {}),
        }
