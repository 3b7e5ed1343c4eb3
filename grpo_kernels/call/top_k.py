"""One call for divergences from a teacher's K listed ids: its arguments checked, its engine chosen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.agreement import check_same, described
from grpo_kernels.base.checks import check_gather, check_mask, check_number, check_shape, check_tensor
from grpo_kernels.base.choices import TopKDivergenceName, TopKOutput, choices
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.expected import even_or_given
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.projection import PlannedHead, plan_head
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Coupling, Request
from grpo_kernels.engine.top_k import Measure, TopKTeacher
from grpo_kernels.engine.vocab_parallel import Shard
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.token_loss.record import Coefficients

DIVERGENCES = choices(TopKDivergenceName)
OUTPUTS = choices(TopKOutput)


def measure_of(
    divergence: Any, tail: Any, log_prob_min_clamp: Any, loss_max_clamp: Any, dtypes: tuple[torch.dtype, ...]
) -> Measure:
    """The divergence that the arguments of these names say, of logits and log-probabilities of `dtypes`.

    Raises:
        TypeError, ValueError: no such divergence, or options that do not go together.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: expected one of {', '.join(DIVERGENCES)}, got {divergence!r}")
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
class TopKInputs:
    """The arguments of `topk_divergence_with` that are about positions, and what of each is asked."""

    teacher_ids: Tensor  # (..., K)
    teacher_logps: Tensor  # (..., K)
    mask: Tensor | None  # (...)
    outputs: tuple[str, ...]
    expected: Tensor | None  # (...)
    divergence: str
    tail: bool | None
    log_prob_min_clamp: float | None
    loss_max_clamp: float | None


def plan_top_k(inputs: TopKInputs, head: LMHead, execution: Execution, options: HeadOptions) -> tuple[LMHead, Request]:
    """Check the arguments of `topk_divergence_with` and plan its call: the tensors to multiply, and what is asked.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, "topk_divergence") as values:
        check_gather(execution.gather)
        options = options.checked()
        planned, rows, weights = _checked(inputs, head.local(), execution, options)
        if head.process_group is not None:
            values |= planned.described_rows() | _described(inputs, planned, rows, weights)
            values |= options.described(rows.inv_temperature)
    planned = planned.divided(values)
    # what came cannot be compared with what was expected while a CUDA graph is captured, which cannot wait
    captured = device_of(planned.head.hidden.device).is_capturing()
    coupling = Coupling.CROSS_TOKEN if captured else Coupling.KNOWN
    request = Request(
        rows=_read(rows, planned),
        plan=planned.plan,
        needs_grad=planned.needs_grad,
        engine=planned.choose_engine(coupling, entropy_gradient=False, only_logps=False),
        entropy=False,
        extras=OUTPUTS,
        coefficients=_expecting(weights),
        gathered_weight=execution.gather or nullcontext,
    )
    return planned.head, request


def _expecting(weights: Tensor) -> Any:
    def coefficients(index: Tensor, _: RowStats) -> Coefficients:
        return Coefficients(d_divergence=weights[index])

    return coefficients


def _checked(
    inputs: TopKInputs, head: LMHead, execution: Execution, options: HeadOptions
) -> tuple[PlannedHead, Rows, Tensor]:
    """The rows with the teacher's ids as they came, and the gradient expected of each one's divergence (n,)."""
    ids, logps, hidden, expected = inputs.teacher_ids, inputs.teacher_logps, head.hidden, inputs.expected
    head.check()
    check_tensor("teacher_ids", ids, like=hidden)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise TypeError(f"teacher_ids: expected signed integer ids of 16, 32 or 64 bits, got {ids.dtype}")
    width = ids.shape[-1] if ids.dim() else 0
    shape = (*hidden.shape[:-1], max(1, width))
    check_shape("teacher_ids", ids, ("(*that of hidden without H, K), K > 0", shape))
    check_tensor("teacher_logps", logps, like=hidden, floating=True)
    check_shape("teacher_logps", logps, ("that of teacher_ids", shape))
    unknown = set(inputs.outputs) - {*OUTPUTS}
    if unknown:
        raise ValueError(f"outputs: expected some of {', '.join(OUTPUTS)}, got {sorted(unknown)}")
    like = hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])
    if inputs.mask is not None:
        check_mask("mask", inputs.mask, like)
    planned = plan_head(head, execution, options)
    dtype, positions = planned.plan.accumulator, counted_positions("mask", inputs.mask, like)
    clamps = inputs.log_prob_min_clamp, inputs.loss_max_clamp
    measure = measure_of(inputs.divergence, inputs.tail, *clamps, (dtype, logps.dtype))
    listed = (x.detach().reshape(-1, width)[positions] for x in (ids, logps))
    teacher = TopKTeacher(next(listed).long(), next(listed).double(), measure)
    inv_t = options.inv_temperature(like, positions, dtype)
    rows = Rows(positions, torch.zeros_like(positions), inv_t, top_k=teacher)
    return planned, rows, even_or_given("expected", expected, hidden, positions, dtype)


def _described(inputs: TopKInputs, planned: PlannedHead, rows: Rows, weights: Tensor) -> dict[str, Any]:
    """Return which positions are compared with what, and how, for the ranks to compare."""
    teacher = rows.top_k
    assert teacher is not None
    return {
        "hidden": described(planned.head.hidden),
        "outputs": inputs.outputs,
        **planned.execution.described(),
        "divergence": teacher.measure,
        "K": teacher.ids.shape[1],
        "mask": rows.positions,
        "teacher_ids": teacher.ids,
        "expected": weights,
        "teacher_logps": teacher.logps,
    }


def _read(rows: Rows, planned: PlannedHead) -> Rows:
    """`rows`, once the teacher's ids have been looked at: in order, padding marked, repetitions among it.

    Raises:
        ValueError: on a CPU, an id is neither -1 nor in [0, V).
    """
    shard: Shard | None = planned.plan.shard
    vocab, start = (planned.head.weight.shape[0], 0) if shard is None else (shard.vocab, shard.start)
    teacher = rows.top_k
    assert teacher is not None
    ids, logps = teacher.ids, teacher.logps
    outside = (ids < -1) | (ids >= vocab)
    if ids.device.type == "cpu" and bool(outside.any()):
        bad = ids[outside][0].item()
        raise ValueError(
            f"teacher_ids: expected ids in [0, V) = [0, {vocab}), or -1 for padding, where the mask counts, got {bad}"
        )
    ids = torch.where(logps == -torch.inf, -1, ids)  # counts for nothing, and so hides no repetition
    ids, order = ids.sort(dim=1, stable=True)
    logps = logps.gather(1, order)
    padding = ids == -1
    padding[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    logps = logps.masked_fill(padding, -torch.inf).masked_fill(outside.any(dim=1, keepdim=True), torch.nan)
    return replace(rows, ids=rows.ids - start, top_k=TopKTeacher(ids - start, logps, teacher.measure))
