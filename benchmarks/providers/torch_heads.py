"""Heads of torch alone: all logits at once, compiled or not, and the limit: the matrix products by
themselves.

`compiled` is `torch.compile` of the eager step, the row work fused by inductor: 6 NVH, 4 with a
frozen head. It is compiled in the first call of a shape, by the C++ compiler on a CPU and by Triton
on a GPU. Masked positions are computed, as eager trainers do. A dispatch mode cannot count its
operations: under one torch refuses to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.cases import Absence, Inputs, capped
from benchmarks.providers import Forward, Outcome, Scored, from_logps

GRAPHS = 64  # a shape each; torch gives up past 8
SLICE = 1024


def eager(inputs: Inputs) -> Forward:
    """`torch.log_softmax` of the logits in fp32, and the tokens' picked from that."""
    return from_logps(inputs, lambda: _scores(*_operands(inputs)))


def compiled(inputs: Inputs) -> Forward:
    """One graph for the forward and one for the backward, for these shapes alone."""
    function = _compiled(_scores)
    return from_logps(inputs, lambda: function(*_operands(inputs)), "fullgraph, dynamic=False")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = GRAPHS
    return torch.compile(function, fullgraph=True, dynamic=False)


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.hidden, inputs.weight, inputs.ids, inputs.case.softcap, inputs.case.wants_entropy


def _log_p(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """(B, T, V), in fp32."""
    return torch.log_softmax(capped(linear(hidden, weight), softcap).float(), dim=-1)


def _scores(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, wants_entropy: bool
) -> Scored:
    """Log-probabilities (B, T), and where wanted entropies (B, T) without gradient."""
    log_p = _log_p(hidden, weight, softcap)
    fixed = log_p.detach()
    entropies = -(fixed.exp() * fixed).sum(dim=-1) if wants_entropy else None
    return log_p.gather(-1, ids[..., None])[..., 0], entropies


def products(inputs: Inputs) -> Forward:
    """Only the matrix products that the case needs, whole, by the vendor's library: the limit that
    we compare with.

    Logits of the counted rows in fp32; d hidden and d weight of the rows that may carry gradient.
    Rows that clipping stops are among those: which they are is known from the logits alone.
    """
    case, counted = inputs.case, inputs.mask.reshape(-1).bool()
    hidden = inputs.hidden.detach().reshape(-1, case.h)[counted]
    weight = inputs.weight.detach().to(hidden.dtype)  # under autocast cast beforehand
    if not hidden.is_cuda and hidden.dtype != torch.float32:
        raise Absence(
            "no one limit: the CPU library's 16-bit products round their results, and exact ones "
            "are fp32's"
        )
    logits = hidden.new_empty(len(hidden), case.v, dtype=torch.float32)
    _mm(hidden, weight.t(), logits)
    runs = [(hidden, weight.t(), logits)]
    if not case.score:
        graded = round(len(hidden) * case.top_entropy) if case.top_entropy < 1 else case.graded
        d_logits = hidden.new_empty(
            graded, case.v
        )  # of realistic values: an easy operand would run at higher clocks
        for source, target in zip(logits.split(SLICE), d_logits.split(SLICE), strict=False):
            target.copy_(torch.softmax(source[: len(target)], dim=1) / case.n)
        runs.append((d_logits, weight, hidden.new_empty(graded, case.h)))
        if not case.frozen:
            d_weight = weight.new_empty(case.v, case.h, dtype=torch.float32)
            runs.append((d_logits.t(), hidden[len(hidden) - graded :], d_weight))

    def forward() -> Outcome:
        for left, right, out in runs:
            _mm(left, right, out)
        return Outcome()

    return forward


def _mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype != left.dtype:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out=out)
