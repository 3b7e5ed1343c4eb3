"""Only the matrix products that the case needs, whole, by the vendor's library: the limit that we compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import Absence, BenchCase, Inputs
from benchmarks.providers import Forward, Outcome

SLICE = 1024


def products(inputs: Inputs) -> Forward:
    """Logits of the counted rows in fp32, a teacher's too; d hidden and d weight of the rows that may carry gradient.

    Rows that clipping stops are among those: which they are is known from the logits alone.
    """
    case, counted = inputs.case, inputs.mask.reshape(-1).bool()
    pairs = [(inputs.hidden, inputs.weight)]
    pairs += [] if inputs.teacher is None else [(inputs.teacher.hidden, inputs.teacher.weight)]
    heads = [  # under autocast cast beforehand, the limit being the products
        (states.detach().reshape(-1, states.shape[-1])[counted], weight.detach().to(states.dtype))
        for states, weight in pairs
    ]
    hidden, weight = heads[0]
    graded = round(len(hidden) * case.top_entropy) if case.top_entropy < 1 else case.graded
    if not hidden.is_cuda and hidden.dtype != torch.float32:
        raise Absence("no one limit: the CPU library's 16-bit products round their results, and exact ones are fp32's")
    logits = hidden.new_empty(len(hidden), case.v, dtype=torch.float32)
    _mm(hidden, weight.t(), logits)
    gradients = (lambda: None) if case.score else _gradient_products(case, hidden, weight, logits, graded)

    def forward() -> Outcome:
        for states, head in heads:
            _mm(states, head.t(), logits)
        gradients()
        return Outcome()

    return forward


def _gradient_products(
    case: BenchCase, hidden: Tensor, weight: Tensor, logits: Tensor, graded: int
) -> Callable[[], None]:
    """The products for d hidden, and d weight unless it is frozen, of the last `graded` of the rows of `hidden`."""
    d_logits = hidden.new_empty(graded, case.v)  # of realistic values: an easy operand would run at higher clocks
    for rows in range(0, graded, SLICE):
        part = slice(rows, min(rows + SLICE, graded))
        d_logits[part] = torch.softmax(logits[part], dim=1) / case.n
    d_hidden = hidden.new_empty(graded, case.h)
    d_weight = None if case.frozen else weight.new_empty(case.v, case.h, dtype=torch.float32)

    def multiply() -> None:
        _mm(d_logits, weight, d_hidden)
        if d_weight is not None:
            _mm(d_logits.t(), hidden[len(hidden) - graded :], d_weight)

    return multiply


def _mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype != left.dtype:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out=out)
