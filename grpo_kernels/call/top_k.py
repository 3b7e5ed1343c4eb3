"""A call of `topk_divergence`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number, check_shape, check_tensor
from grpo_kernels.base.choices import TopKDivergenceName, choices
from grpo_kernels.call.expected import ExpectedRows, divergence_weights
from grpo_kernels.call.planned_head import PlannedHead
from grpo_kernels.call.scores import ScoreCall
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.special.top_k import Measure, TopKTeacher
from grpo_kernels.token_loss.record import Coefficients

DIVERGENCES = choices(TopKDivergenceName)


def measure_of(
    divergence: Any,
    tail: Any,
    log_prob_min_clamp: Any,
    loss_max_clamp: Any,
    dtypes: tuple[torch.dtype, ...],
) -> Measure:
    """Return the divergence that these arguments describe; `dtypes`: those of the result and of the teacher's logps.

    Raises:
        TypeError, ValueError: an unknown divergence, or options that do not go together.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(
            f"divergence: expected one of {', '.join(DIVERGENCES)}, got {divergence!r}"
        )
    reverse = divergence == "reverse_kl"
    if tail is not None and not isinstance(tail, bool):
        raise TypeError(f"tail: expected a bool or None, got {tail!r}")
    if reverse and tail is False:
        raise ValueError(
            "tail: expected True or None with divergence = 'reverse_kl', got False: over the listed ids alone it is "
            "least where the student gives them nothing"
        )
    tail = reverse if tail is None else tail
    if log_prob_min_clamp is not None:
        check_number("log_prob_min_clamp", log_prob_min_clamp)
        if tail:
            raise ValueError(
                f"log_prob_min_clamp: expected None with a tail, got {log_prob_min_clamp!r}; it is of the forward KL "
                "over the listed ids alone"
            )
    if loss_max_clamp is not None:
        check_number("loss_max_clamp", loss_max_clamp, 0.0)
    least_rest = max(torch.finfo(dtype).eps for dtype in dtypes) if tail else None
    return Measure(reverse, least_rest, log_prob_min_clamp, loss_max_clamp)


@dataclass(frozen=True, eq=False)
class TopKCall(ScoreCall):
    """The teacher's ids and their log-probabilities, (..., K), and the divergence from them to compute."""

    teacher_ids: Tensor = field(kw_only=True)
    teacher_logps: Tensor = field(kw_only=True)
    divergence: str = field(kw_only=True)
    tail: bool | None = field(kw_only=True)
    log_prob_min_clamp: float | None = field(kw_only=True)
    loss_max_clamp: float | None = field(kw_only=True)

    function = "topk_divergence"

    @property
    def extras(self) -> tuple[str, ...]:
        """The student's mass on the teacher's ids, which costs nothing."""
        return ("student_mass",)

    def check_positions(self, hidden: Tensor) -> None:
        """Raise unless the teacher's tensors fit the hidden states."""
        ids, logps = self.teacher_ids, self.teacher_logps
        check_tensor("teacher_ids", ids, like=hidden)
        if ids.dtype not in (torch.int64, torch.int32, torch.int16):
            raise TypeError(
                f"teacher_ids: expected signed integer ids of 16, 32 or 64 bits, got {ids.dtype}"
            )
        shape = (*hidden.shape[:-1], max(1, ids.shape[-1] if ids.dim() else 0))
        check_shape("teacher_ids", ids, ("(*that of hidden without H, K), K > 0", shape))
        check_tensor("teacher_logps", logps, like=hidden, floating=True)
        check_shape("teacher_logps", logps, ("that of teacher_ids", shape))

    def read(self, planned: PlannedHead) -> tuple[Rows, ExpectedRows]:
        """Return the rows, with the teacher's unsorted ids, and their expected gradient."""
        rows, expected = super().read(planned)
        clamps, dtypes = (
            (self.log_prob_min_clamp, self.loss_max_clamp),
            (planned.plan.accumulator, self.teacher_logps.dtype),
        )
        measure = measure_of(self.divergence, self.tail, *clamps, dtypes)
        ids, logps = (
            x.detach().flatten(0, -2)[rows.positions]
            for x in (self.teacher_ids, self.teacher_logps)
        )
        return replace(rows, top_k=TopKTeacher(ids.long(), logps.double(), measure)), expected

    def expectation(self, hidden: Tensor, positions: Tensor, dtype: torch.dtype) -> ExpectedRows:
        """Return the expected gradient in the divergences."""
        weights = divergence_weights("expected", self.expected, hidden, positions, dtype)
        return ExpectedRows.of(Coefficients(d_divergence=weights))

    def check_range(self, planned: PlannedHead, rows: Rows) -> Rows:
        """Return the rows with the teacher's ids sorted; padding and repeated ids get the log-probability -inf.

        Raises:
            ValueError: on a CPU, an id is neither -1 nor in [0, V).
        """
        shard, teacher = planned.plan.shard, rows.top_k
        vocab, start = (
            (planned.head.weight.shape[0], 0) if shard is None else (shard.vocab, shard.start)
        )
        assert teacher is not None
        ids, logps = teacher.ids, teacher.logps
        outside = (ids < -1) | (ids >= vocab)
        if ids.device.type == "cpu" and bool(outside.any()):
            bad = ids[outside][0].item()
            raise ValueError(
                f"teacher_ids: expected ids in [0, V) = [0, {vocab}), or -1 for padding, where the mask counts, "
                f"got {bad}"
            )
        ids = torch.where(
            logps == -torch.inf, -1, ids
        )  # padding, which must not be the first of a repeated id
        ids, order = ids.sort(dim=1, stable=True)
        logps = logps.gather(1, order)
        padding = ids == -1
        padding[:, 1:] |= ids[:, 1:] == ids[:, :-1]
        logps = logps.masked_fill(padding, -torch.inf).masked_fill(
            outside.any(dim=1, keepdim=True), torch.nan
        )
        return replace(
            rows, ids=rows.ids - start, top_k=TopKTeacher(ids - start, logps, teacher.measure)
        )
