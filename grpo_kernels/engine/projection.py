"""Logits of some rows on some columns of the vocabulary: the student's and, where there is one, the teacher's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, Teacher
from grpo_kernels.base.records import take
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.records import HeadTensors, Index, Operands, Rows, row_bias


class Projection:
    """The products that make logits, chunk after chunk.

    Attributes:
        products: one for each pair of `HeadTensors.factors`, on these columns.
        first_id: the id of the first column.
    """

    def __init__(self, head: Operands, plan: HeadPlan, columns: slice = slice(None)) -> None:
        self._plan, self.first_id = plan, columns.start or 0
        self._hidden = [x for x, _ in head.factors()]
        self.products, self._bias = plan.all_products(head, columns), _part(head, plan, columns)
        self._teacher = None if head.teacher is None or plan.teacher is None else head.teacher
        if self._teacher is not None and plan.teacher is not None:
            self._of_teacher = plan.teacher.products(self._teacher.weight[columns])
            self._teacher_bias = _part(self._teacher, plan.teacher, columns)

    @property
    def in_place(self) -> bool:
        """True if d logits take the place of the logits."""
        return self.products[0].gradient_dtype == self._plan.accumulator

    def operands(self, positions: Index) -> tuple[list[Tensor], Tensor | None]:
        """Return the operands of m positions, (m, K) for each product, and the teacher's hidden states, (m, H')."""
        selected = [x[positions] for x in self._hidden]
        of_teacher = None if self._teacher is None else self._teacher.hidden[positions]
        return [
            product.operand(x) for product, x in zip(self.products, selected, strict=True)
        ], of_teacher

    def new_logits(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return memory for the logits of this many rows, and for the teacher's if there is one."""
        return self._new(rows, self._plan.accumulator), (
            None if self._teacher is None else self._new(rows, self._plan.accumulator)
        )

    def new_d_logits(self, rows: int) -> Tensor:
        """Return memory for the d logits of this many rows, in the dtype of the backward products."""
        return self._new(rows, self.products[0].gradient_dtype)

    def _new(self, rows: int, dtype: torch.dtype) -> Tensor:
        like, columns = self._hidden[0], self.products[0].weight.shape[0]
        return like.new_empty(rows, device_of(like.device).row_width(columns), dtype=dtype)[
            :, :columns
        ]

    def project(
        self,
        operands: tuple[list[Tensor], Tensor | None],
        part: slice,
        rows: Rows,
        index: Index,
        out: tuple[Tensor, Tensor | None],
    ) -> tuple[Chunk, Rows]:
        """Project `part`; return its chunk and its rows, the latter with the logits of a `TopKTeacher` gathered.

        Args:
            operands: those of a group of rows.
            part: the rows to project, among those of the group.
            rows, index: the rows of the sweep, and the index of the chunk's rows among them.
            out: memory for the logits, and for the teacher's.
        """
        (of_rows, of_teacher), (logits, teacher_logits), plan = operands, out, self._plan
        for i, (product, x) in enumerate(zip(self.products, of_rows, strict=True)):
            product.logits(x[part], logits, first=i == 0)
        rows, teacher = take(rows, index), None
        transform = plan.transform(self._bias, rows.inv_temperature)
        if plan.teacher is not None and of_teacher is not None and teacher_logits is not None:
            teacher = self._project_teacher(plan.teacher, of_teacher[part], teacher_logits, rows)
        if rows.top_k is not None:
            rows = replace(rows, top_k=rows.top_k.gathered(logits, transform, self.first_id))
        plan.backend.prepare_(logits, transform)
        return Chunk(logits, rows.ids, transform, self.first_id, teacher), rows

    def _project_teacher(self, plan: HeadPlan, hidden: Tensor, out: Tensor, rows: Rows) -> Teacher:
        self._of_teacher.logits(self._of_teacher.operand(hidden), out)
        transform = plan.transform(self._teacher_bias, rows.inv_temperature)
        plan.backend.prepare_(out, transform)
        return Teacher(out, transform, self._plan.jsd_beta)


def _part(head: HeadTensors[Tensor], plan: HeadPlan, columns: slice) -> Tensor | None:
    """Return the bias on `columns`, as row backends read it."""
    return None if head.bias is None else row_bias(head.bias[columns], plan.accumulator)
