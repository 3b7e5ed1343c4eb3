"""Our head, and heads of torch alone: all logits at once, compiled or not, and the products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.cases import EPSILON, Absence, Inputs, capped
from benchmarks.memory import MIB
from benchmarks.providers import Forward, Outcome, Scored, from_logps
from grpo_kernels import GRPOLoss, Head, Run, linear_logps
from grpo_kernels.backends import choose_backend

GRAPHS = 64  # a shape each; torch gives up past 8
SLICE = 1024


def ours(inputs: Inputs, *, backend: str, engine: str = "auto", workspace: str = "") -> Forward:
    """The library as it comes, or with one of its engines, a backend, a workspace in MiB."""
    case, run = inputs.case, _run(inputs, backend, engine, workspace)
    if case.score:

        def score() -> Scored:
            given, entropy = (inputs.hidden, _head(inputs), inputs.ids), case.wants_entropy
            scores = linear_logps(*given, entropy=entropy, run=run)
            return scores.logps, scores.entropies

        note = f"score, backend {run.backend}" if engine == "auto" else engine
        return from_logps(inputs, score, note)
    loss_fn = GRPOLoss(
        epsilon=EPSILON, beta=case.beta, use_bias_correction_kl=False,
        importance_sampling_level="sequence" if case.sequence else "token",
        top_entropy_quantile=case.top_entropy, run=run,
    )  # fmt: skip

    def forward() -> Outcome:
        given = inputs.hidden, _head(inputs), inputs.ids, inputs.mask, inputs.advantages
        out = loss_fn(*given, old_per_token_logps=inputs.old, ref_per_token_logps=inputs.ref)
        note = f"{out.engine}, backend {run.backend}"
        return Outcome(out.loss, out.logps, out.entropies, note)

    return forward


def _head(inputs: Inputs) -> Head:
    return Head(inputs.weight, final_logit_softcapping=inputs.case.softcap)


def _run(inputs: Inputs, backend: str, engine: str, workspace: str) -> Run:
    try:
        chosen = choose_backend(backend, inputs.hidden.device)
    except ValueError as error:
        raise Absence(str(error)) from error
    return Run(engine, chosen.name, int(workspace) * MIB if workspace else None)


# `compiled` is `torch.compile` of the eager step, the row work fused by inductor: 6 NVH, 4 with a
# frozen head. It is compiled in the first call of a shape, by the C++ compiler on a CPU and by
# Triton on a GPU. Masked positions are computed, as eager trainers do. A dispatch mode cannot count
# its operations: under one torch refuses to compile.


def eager(inputs: Inputs) -> Forward:
    return from_logps(inputs, lambda: _scores(*_operands(inputs)))


def compiled(inputs: Inputs) -> Forward:
    torch._dynamo.config.recompile_limit = GRAPHS
    function = torch.compile(_scores, fullgraph=True, dynamic=False)
    return from_logps(inputs, lambda: function(*_operands(inputs)), "fullgraph, dynamic=False")


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.hidden, inputs.weight, inputs.ids, inputs.case.softcap, inputs.case.wants_entropy


def _scores(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, wants_entropy: bool
) -> Scored:
    log_p = torch.log_softmax(capped(linear(hidden, weight), softcap).float(), dim=-1)
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
        why = "the CPU library's 16-bit products round their results, and exact ones are fp32's"
        raise Absence(f"no one limit: {why}")
    logits = hidden.new_empty(len(hidden), case.v, dtype=torch.float32)
    _mm(hidden, weight.t(), logits)
    runs = [(hidden, weight.t(), logits)]
    if not case.score:
        graded = round(len(hidden) * case.top_entropy) if case.top_entropy < 1 else case.graded
        # of realistic values: an easy operand would run at higher clocks
        d_logits = hidden.new_empty(graded, case.v)
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
