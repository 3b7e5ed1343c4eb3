"""Divergences from a teacher: ours, all logits in torch, TRL's kernel, Liger's two.

TRL's is what its distillation trainer calls, `_chunked_divergence_loss` over `ChunkedDivergenceFunction`; tested with
1.16: the logits of both heads again in the backward, 12 NVH, and once more in the forward of a JSD, 16. Liger's
`LigerFusedLinearJSDLoss` is torch, in chunks of some 1,024 tokens, gradients in the forward, 8 NVH, scoring too; its
`LigerFusedLinearJSD` has a Triton kernel and smaller chunks. Tested with 0.8.5; the Triton one has not been run. Either
gives a mean alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from benchmarks.cases import Absence, Inputs, Teacher, capped, counted_mean
from benchmarks.memory import MIB
from benchmarks.providers import Forward, Outcome, without_masked
from grpo_kernels import Head, Run, linear_divergence
from grpo_kernels.backends import choose_backend

IGNORE = -100
GRAPHS = 64  # a shape each; torch gives up past 8


def ours(inputs: Inputs, *, backend: str = "auto", workspace: str = "") -> Forward:
    """`linear_divergence`, and the mean over the counted tokens, which is what it expects."""
    case, (teacher, beta) = inputs.case, _task(inputs)
    try:
        name = choose_backend(backend, inputs.hidden.device)[0].name
    except ValueError as error:
        raise Absence(str(error)) from error
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    run = Run(backend=name, workspace_bytes=int(workspace) * MIB if workspace else None)

    def divergences() -> Tensor:
        return linear_divergence(
            inputs.hidden,
            Head(inputs.weight, final_logit_softcapping=case.softcap),
            teacher.hidden,
            Head(teacher.weight, final_logit_softcapping=case.softcap),
            mask=inputs.mask,
            divergence=kind,
            beta=beta if kind == "jsd" else None,
            run=run,
        ).divergence

    return _from_divergences(inputs, divergences, f"linear_divergence, backend {name}")


def eager(inputs: Inputs) -> Forward:
    """All logits of both heads at once, and torch's `kl_div` of their `log_softmax`, in fp32."""
    return _from_divergences(inputs, lambda: _of_all_logits(*_operands(inputs)), "kl_div of log_softmax")


def compiled(inputs: Inputs) -> Forward:
    """torch.compile of the same: a graph for the forward and one for the backward, for these shapes alone."""
    torch._dynamo.config.recompile_limit = GRAPHS
    function = torch.compile(_of_all_logits, fullgraph=True, dynamic=False)
    return _from_divergences(inputs, lambda: function(*_operands(inputs)), "fullgraph, dynamic=False")


def trl(inputs: Inputs) -> Forward:
    """The loss of its distillation trainer, or where that cannot be imported, the function under it."""
    case, (teacher, beta) = inputs.case, _task(inputs)
    try:
        function = importlib.import_module("trl.trainer.distillation_trainer")._chunked_divergence_loss
    except Exception as error:  # the trainer's needs are many; the function's are few
        why = f"trl.kernels alone, without the trainer ({type(error).__name__}: {error})"[:300]
        return _from_divergences(inputs, _trl_alone(inputs, teacher, beta), why)

    def loss() -> Tensor:
        found: Tensor = function(
            inputs.hidden,
            teacher.hidden,
            inputs.weight,
            teacher.weight,
            inputs.mask,
            beta,
            student_final_logit_softcapping=case.softcap,
            teacher_final_logit_softcapping=case.softcap,
        )[0]
        return found

    return _from_loss(inputs, loss, "_chunked_divergence_loss")


def _trl_alone(inputs: Inputs, teacher: Teacher, beta: float) -> Callable[[], Tensor]:
    """The divergences (B, T) of `ChunkedDivergenceFunction`."""
    from benchmarks.providers.trl import stand_in_for_the_trainer

    stand_in_for_the_trainer()
    op = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    case, counted = inputs.case, inputs.mask.bool()

    def divergences() -> Tensor:
        student = (inputs.hidden[counted], inputs.weight, None)
        of_teacher = (teacher.hidden[counted], teacher.weight, None)
        found, _ = op.apply(*student, *of_teacher, beta, 1.0, 1.0, case.softcap, 1.0, case.softcap)
        return found.new_zeros(counted.shape).masked_scatter(counted, found)

    return divergences


def liger_jsd(inputs: Inputs) -> Forward:
    """`LigerFusedLinearJSDLoss` without its hard loss: torch, on a GPU compiled, as it comes."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    on_gpu = inputs.hidden.is_cuda
    _, beta = _task(inputs)
    loss_fn = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=on_gpu)
    return _liger(inputs, loss_fn, f"chunk_size={loss_fn.chunk_size}, compiled={on_gpu}")


def liger_fused(inputs: Inputs) -> Forward:
    """`LigerFusedLinearJSD`, by its own choice of kernel and of chunks."""
    if not inputs.hidden.is_cuda:
        raise Absence("its Triton kernel serves GPUs only")
    from liger_kernel.transformers import LigerFusedLinearJSD

    return _liger(inputs, LigerFusedLinearJSD(jsd_beta=_task(inputs)[1]), "jsd_loss_and_grad")


def _liger(inputs: Inputs, function: Callable[..., Any], note: str) -> Forward:
    """Its module on the tokens in one row; it makes the gradients in the forward, of a frozen head too."""
    teacher, _ = _task(inputs)
    if inputs.case.softcap is not None:
        raise Absence("no soft-cap")
    labels = without_masked(inputs, IGNORE).reshape(-1)

    def loss() -> Tensor:
        hidden, of_teacher = (x.reshape(-1, x.shape[-1]) for x in (inputs.hidden, teacher.hidden))
        found: Tensor = function(hidden, inputs.weight, of_teacher, teacher.weight, labels)
        return found

    return _from_loss(inputs, loss, note)


def _task(inputs: Inputs) -> tuple[Teacher, float]:
    """The teacher, and which divergence from it."""
    assert inputs.teacher is not None and inputs.case.divergence is not None
    return inputs.teacher, inputs.case.divergence


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    teacher, beta = _task(inputs)
    return inputs.hidden, inputs.weight, teacher.hidden, teacher.weight, beta, inputs.case.softcap


def _of_all_logits(
    hidden: Tensor,  # (B, T, H)
    weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (B, T, H')
    teacher_weight: Tensor,  # (V, H')
    beta: float,
    softcap: float | None,
) -> Tensor:
    """Divergences (B, T)."""
    log_p = torch.log_softmax(capped(linear(hidden, weight), softcap).float(), dim=-1)
    log_q = torch.log_softmax(capped(linear(teacher_hidden, teacher_weight), softcap).float(), dim=-1)
    if beta == 0.0:
        return kl_div(log_p, log_q, reduction="none", log_target=True).sum(dim=-1)
    if beta == 1.0:
        return kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    shares = torch.tensor([1.0 - beta, beta], device=hidden.device).log()
    log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])
    of_student = kl_div(log_m, log_p, reduction="none", log_target=True).sum(dim=-1)
    of_teacher = kl_div(log_m, log_q, reduction="none", log_target=True).sum(dim=-1)
    return (1.0 - beta) * of_student + beta * of_teacher


def _from_divergences(inputs: Inputs, divergences: Callable[[], Tensor], note: str) -> Forward:
    """A forward around differentiable divergences (B, T)."""

    def forward() -> Outcome:
        with torch.set_grad_enabled(not inputs.case.score):
            found = divergences()
            return Outcome(counted_mean(found, inputs), note=note, divergences=found)

    return forward


def _from_loss(inputs: Inputs, loss: Callable[[], Tensor], note: str) -> Forward:
    """A forward around the mean over the counted tokens."""

    def forward() -> Outcome:
        with torch.set_grad_enabled(not inputs.case.score):
            return Outcome(loss(), note=note)

    return forward
