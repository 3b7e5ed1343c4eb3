"""Liger's distillation losses with our engines: the Jensen-Shannon divergence of two heads, without their logits.

Liger has two classes for it, and both are here with the same constructor and call: ``LigerFusedLinearJSD`` of
``liger_kernel.transformers`` (with its function) and ``LigerFusedLinearJSDLoss`` of ``liger_kernel.chunked_loss``,
which adds a cross entropy. Liger's beta is ours too: 0 is KL(teacher || student), 1 is KL(student || teacher). Both
heads' logits are divided by the temperature, and the loss is not multiplied by any power of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import check_head, check_ids, check_number, check_tensor
from grpo_kernels.base.choices import BackendName, EngineName
from grpo_kernels.call.divergence import check_beta
from grpo_kernels.call.options import check_options
from grpo_kernels.divergence import linear_divergence_with
from grpo_kernels.head.module import gather_of
from grpo_kernels.logprob import linear_logprob_with


class LigerModule(nn.Module):
    """A loss with Liger's call, and with the options of our engines as attributes."""

    def __init__(self, engine: EngineName, backend: BackendName, workspace_bytes: int | None) -> None:
        super().__init__()
        check_options(engine, backend, workspace_bytes)
        self.engine, self.backend, self.workspace_bytes = engine, backend, workspace_bytes

    def execution(self, *head: Tensor | None) -> dict[str, Any]:
        """Return the options as keyword arguments, with the `gather` of the `head`'s tensors for the backward.

        ZeRO-3 partitions the weight again when the trainer's own gathering, around the call, has ended.
        """
        return {
            "engine": self.engine,
            "backend": self.backend,
            "workspace_bytes": self.workspace_bytes,
            "gather": gather_of(x for x in head if x is not None),
        }


class LigerFusedLinearJSD(LigerModule):
    """``liger_kernel.transformers.LigerFusedLinearJSD`` of liger-kernel 0.8.5, computed by `linear_divergence`.

    Args:
        jsd_beta: in [0, 1].
        ignore_index: the label of positions that do not count.
        temperature: divisor of both heads' logits.
        accum_dtype: not used: sums are fp32 (fp64 for fp64 inputs) and rounded once.
        engine, backend, workspace_bytes: *ours*; as in `linear_divergence_with`.

    All may be changed afterwards, as attributes.

    Raises:
        TypeError, ValueError: a value that the loss does not take.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        *,
        engine: EngineName = "auto",
        backend: BackendName = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        super().__init__(engine, backend, workspace_bytes)
        _check(jsd_beta, "jsd_beta", temperature)
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.accum_dtype = accum_dtype

    def forward(
        self,
        student_input: Tensor,  # (N, H)
        student_weight: Tensor,  # (V, H)
        teacher_input: Tensor,  # (N, H')
        teacher_weight: Tensor,  # (V, H')
        shift_labels: Tensor | None = None,  # (N,)
    ) -> Tensor:
        """Return the mean divergence () of the positions whose label is not `ignore_index`; without labels, of all.

        In fp32 (fp64 for fp64 inputs); 0 where no position counts. Gradients go to the student's tensors.

        Args:
            student_input, student_weight: (N, H) and (V, H).
            teacher_input, teacher_weight: (N, H') and (V, H').
            shift_labels: (N,).

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        counted = _counted("shift_labels", shift_labels, self.ignore_index, student_input, student_weight)
        _check_vocabulary(student_weight, teacher_weight)
        found = linear_divergence_with(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            mask=counted,
            temperature=self.temperature,
            divergence="jsd",
            beta=self.jsd_beta,
            **self.execution(student_weight),
        )["divergence"]
        return found.sum() / _number_of(counted, found)


def liger_fused_linear_jsd(
    student_input: Tensor,  # (N, H)
    student_weight: Tensor,  # (V, H)
    teacher_input: Tensor,  # (N, H')
    teacher_weight: Tensor,  # (V, H')
    shift_labels: Tensor | None = None,  # (N,)
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """``liger_kernel.transformers.functional.liger_fused_linear_jsd``: `LigerFusedLinearJSD` as a function.

    Shapes and errors are those of its forward.
    """
    module = LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    found: Tensor = module(student_input, student_weight, teacher_input, teacher_weight, shift_labels)
    return found


class LigerFusedLinearJSDLoss(LigerModule):
    """``liger_kernel.chunked_loss.LigerFusedLinearJSDLoss`` of liger-kernel 0.8.5.

    The labels' cross entropy has temperature 1, whatever `temperature` is. If `temperature` is 1 too, it comes from the
    divergence's pass, else from a pass of its own.

    Args:
        weight_hard_loss, weight_soft_loss: weights of the cross entropy and of the divergence.
        beta: in [0, 1].
        ignore_index: the label of positions that do not count.
        temperature: divisor of both heads' logits, for the divergence.
        compiled, chunk_size: not used: nothing here is compiled, and the engine plans its own chunks.
        return_soft_hard_loss: True to return both parts too.
        engine, backend, workspace_bytes: *ours*; as in `linear_divergence_with`.

    All may be changed afterwards, as attributes.

    Raises:
        TypeError, ValueError: a value that the loss does not take.
    """

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
        *,
        engine: EngineName = "auto",
        backend: BackendName = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        super().__init__(engine, backend, workspace_bytes)
        _check(beta, "beta", temperature)
        check_number("weight_hard_loss", weight_hard_loss)
        check_number("weight_soft_loss", weight_soft_loss)
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.compiled, self.chunk_size, self.return_soft_hard_loss = compiled, chunk_size, return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,  # (N, H)
        student_weight: Tensor,  # (V, H)
        teacher_input: Tensor,  # (N, H')
        teacher_weight: Tensor,  # (V, H')
        true_labels: Tensor,  # (N,)
        student_bias: Tensor | None = None,  # (V,)
        teacher_bias: Tensor | None = None,  # (V,)
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """``weight_hard_loss * cross entropy + weight_soft_loss * divergence``, (), each the mean over the positions
        whose label is not `ignore_index`.

        In fp32 (fp64 for fp64 inputs); 0 where no position counts. Gradients go to the student's tensors.

        Args:
            student_input, student_weight, student_bias: (N, H), (V, H) and (V,).
            teacher_input, teacher_weight, teacher_bias: (N, H'), (V, H') and (V,).
            true_labels: (N,).

        Returns:
            The loss; with `return_soft_hard_loss` the loss, and detached the divergence and the cross entropy.

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        counted = _counted("true_labels", true_labels, self.ignore_index, student_input, student_weight)
        _check_vocabulary(student_weight, teacher_weight)
        wants_hard = self.weight_hard_loss != 0 or self.return_soft_hard_loss
        together = wants_hard and self.temperature == 1.0
        head = {"mask": counted, "bias": student_bias, **self.execution(student_weight, student_bias)}
        found = linear_divergence_with(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            teacher_bias=teacher_bias,
            temperature=self.temperature,
            divergence="jsd",
            beta=self.beta,
            **(self._with_hard(true_labels) if together else {}),
            **head,
        )
        if wants_hard and not together:
            even = torch.ones(true_labels.shape, device=true_labels.device)
            found |= linear_logprob_with(student_input, student_weight, true_labels, outputs=(), expected=even, **head)
        number = _number_of(counted, found["divergence"])
        soft = found["divergence"].sum() / number
        hard = -found["logps"].sum() / number if wants_hard else torch.zeros_like(soft)
        loss = self.weight_hard_loss * hard + self.weight_soft_loss * soft
        return (loss, soft.detach(), hard.detach()) if self.return_soft_hard_loss else loss

    def _with_hard(self, labels: Tensor) -> dict[str, Any]:
        """Return the arguments that make a divergence call return the labels' log-probabilities too."""
        weights = (self.weight_soft_loss, -self.weight_hard_loss)
        expected = tuple(torch.full(labels.shape, float(x), device=labels.device) for x in weights)
        return {"outputs": ("logps",), "ids": labels, "expected": expected}


def _check(beta: Any, name: str, temperature: Any) -> None:
    check_beta(name, beta)
    check_number("temperature", temperature, 0.0)


def _counted(name: str, labels: Tensor | None, ignore_index: int, hidden: Tensor, weight: Tensor) -> Tensor | None:
    """Mask (N,) of the positions that count; None: all."""
    check_head(hidden, weight, None)
    if labels is None:
        return None
    check_ids(name, labels, hidden)
    return labels != ignore_index


def _check_vocabulary(student_weight: Tensor, teacher_weight: Tensor) -> None:
    check_tensor("teacher_weight", teacher_weight, like=student_weight, floating=True)
    if teacher_weight.shape[:1] != student_weight.shape[:1]:
        raise ValueError(
            f"teacher_weight: expected the {student_weight.shape[0]} rows that student_weight has, got "
            f"{tuple(teacher_weight.shape)}; linear_divergence compares the ids that both have"
        )


def _number_of(counted: Tensor | None, like: Tensor) -> Tensor | int:
    """Return the number of positions to divide by, at least 1."""
    return max(1, like.numel()) if counted is None else counted.sum().clamp(min=1).to(like.dtype)
