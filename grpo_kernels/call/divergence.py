"""One call for divergences: its arguments checked, its engine chosen, what is expected of its gradient read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import FusedRowBackend, RowStats
from grpo_kernels.base.agreement import check_same, described
from grpo_kernels.base.checks import check_gather, check_ids, check_mask, check_number
from grpo_kernels.base.choices import DivergenceName, DivergenceOutput, choices
from grpo_kernels.base.records import take
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.expected import KIND, Expectation, ExpectedRows, even_or_given, read_expected
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.projection import PlannedHead, plan_head
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Coupling, Engine, Request, Stored
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.token_loss.record import Coefficients, TokenLoss

DIVERGENCES = choices(DivergenceName)
OUTPUTS = choices(DivergenceOutput)


def beta_of(divergence: Any, beta: Any) -> float:
    """The number that says which divergence it is, see `backends.interface.Teacher`.

    Raises:
        TypeError, ValueError: no such divergence, a wrong `beta`, or one that has no use.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: expected one of {', '.join(DIVERGENCES)}, got {divergence!r}")
    if divergence != "jsd":
        if beta is not None:
            raise ValueError(f"beta: expected None with divergence = {divergence!r}, which has none, got {beta!r}")
        return 1.0 if divergence == "reverse_kl" else 0.0
    beta = 0.5 if beta is None else beta
    check_beta("beta", beta)
    return float(beta)


def check_beta(name: str, beta: Any) -> None:
    """Raise unless `beta` is a number in [0, 1]."""
    check_number(name, beta, 0.0, inclusive=True)
    if beta > 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {beta!r}")


@dataclass(frozen=True, eq=False)
class DivergenceInputs:
    """The arguments of `linear_divergence_with` that are about positions, and what of each is asked."""

    beta: float  # which divergence
    ids: Tensor | None  # (...)
    mask: Tensor | None  # (...)
    outputs: tuple[str, ...]
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None  # (...)


def plan_divergence(
    inputs: DivergenceInputs, head: LMHead, execution: Execution, options: HeadOptions
) -> tuple[LMHead, Request]:
    """Check the arguments of `linear_divergence_with` and plan its call: the tensors to multiply, and what is asked.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, "linear_divergence") as values:
        check_gather(execution.gather)
        options = options.checked()
        planned, rows, expected = _checked(inputs, head.local(), execution, options)
        if head.process_group is not None:
            values |= planned.described_rows() | _described(inputs, planned, rows, expected)
            values |= options.described(rows.inv_temperature)
    planned = planned.divided(values)
    rows = planned.read_rows("ids", rows)
    engine = _engine(planned, expected)
    request = Request(
        rows=rows,
        plan=planned.plan,
        needs_grad=planned.needs_grad,
        engine=engine,
        entropy="entropy" in inputs.outputs,
        gathered_weight=execution.gather or nullcontext,
    )
    if engine.stores is Stored.GRADIENT:
        request = _with_expected(request, expected)
    return planned.head, request


def _described(
    inputs: DivergenceInputs, planned: PlannedHead, rows: Rows, expected: Coefficients | ExpectedRows
) -> dict[str, Any]:
    """Return which positions are asked for what, and the gradient expected of each, for the ranks to compare."""
    if isinstance(expected, ExpectedRows):
        of_gradient = expected.described()
    elif expected.d_logp is None:
        of_gradient = {KIND: "a tensor", "expected": expected.d_divergence}
    else:
        of_gradient = {KIND: "two tensors", "expected": expected.d_divergence, "expected[1]": expected.d_logp}
    return {
        "beta": inputs.beta,
        "outputs": inputs.outputs,
        "whether there are ids": inputs.ids is not None,
        "hidden": described(planned.head.hidden),
        **planned.execution.described(),
        "mask": rows.positions,
        "ids": rows.ids,
        **of_gradient,
    }


def _engine(planned: PlannedHead, expected: Coefficients | ExpectedRows) -> Engine:
    # what came cannot be compared with what was expected while a CUDA graph is captured, which cannot wait
    captured = device_of(planned.head.hidden.device).is_capturing()
    if isinstance(expected, Coefficients):
        coupling = Coupling.CROSS_TOKEN if captured else Coupling.KNOWN
        return planned.choose_engine(coupling, entropy_gradient=False, mixed_gradient=expected.d_logp is not None)
    coupling = Coupling.of(known=False, coupled=captured or expected.coefficients is None)
    return planned.choose_engine(coupling, entropy_gradient=expected.of_entropy, mixed_gradient=True)


def _checked(
    inputs: DivergenceInputs, head: LMHead, execution: Execution, options: HeadOptions
) -> tuple[PlannedHead, Rows, Coefficients | ExpectedRows]:
    """The rows, and up to a factor the gradient expected of each one (n,): of divergence and log-probability, or of all
    that is asked.
    """
    ids, mask, expected, hidden = inputs.ids, inputs.mask, inputs.expected, head.hidden
    head.check()
    unknown = set(inputs.outputs) - {*OUTPUTS}
    if unknown:
        raise ValueError(f"outputs: expected some of {', '.join(OUTPUTS)}, got {sorted(unknown)}")
    if ids is None and "logps" in inputs.outputs:
        raise ValueError("ids: expected a tensor since outputs has 'logps', got None")
    if ids is not None:
        check_ids("ids", ids, hidden)
        if "logps" not in inputs.outputs:
            raise ValueError("ids: expected None, since nothing but 'logps' in outputs reads them, got a tensor")
    like = hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1]) if ids is None else ids
    if mask is not None:
        check_mask("mask", mask, like)
    planned = plan_head(head, execution, options, jsd_beta=inputs.beta)
    dtype, positions = planned.plan.accumulator, counted_positions("mask", mask, like)
    inv_t = options.inv_temperature(like, positions, dtype)
    rows = Rows(positions, like.detach().reshape(-1)[positions].long(), inv_t)
    if isinstance(expected, Expectation):
        entropy = "entropy" in inputs.outputs
        return planned, rows, read_expected(expected, like, positions, dtype, entropy=entropy, divergence=True)
    pair = expected if isinstance(expected, tuple) else (expected,)
    if len(pair) not in ((1, 2) if "logps" in inputs.outputs else (1,)):
        raise ValueError(f"expected: expected a tensor, or with 'logps' in outputs two, got a tuple of {len(pair)}")
    names = ("expected", "expected[1]")
    found = [even_or_given(name, x, hidden, positions, dtype) for name, x in zip(names, pair, strict=False)]
    return planned, rows, Coefficients(d_logp=found[1] if len(found) == 2 else None, d_divergence=found[0])


def _with_expected(request: Request, expected: Coefficients | ExpectedRows) -> Request:
    """`request` with the gradient expected of its rows; as a loss, for a backend that fuses."""
    if isinstance(expected, ExpectedRows):
        return replace(request, coefficients=expected.coefficients, may_have_grad=expected.may_have_grad)
    weights = expected.d_divergence
    assert weights is not None

    def coefficients(index: Tensor, _: RowStats) -> Coefficients:
        return take(expected, index)

    token_loss = None
    # a sharded head joins its ranks between a row's statistics and its gradient
    if isinstance(request.plan.backend, FusedRowBackend) and request.plan.shard is None:
        token_loss = TokenLoss(
            surrogate="constant",
            constants=(),
            kl="full",
            corrects_kl=False,
            advantages=None,
            d_logps=torch.zeros_like(weights) if expected.d_logp is None else expected.d_logp,
            weights=weights,
            old=None,
            ref=None,
            gate=None,
            beta=1.0,
            d_entropy=0.0,
        )
    return replace(request, coefficients=coefficients, token_loss=token_loss)
