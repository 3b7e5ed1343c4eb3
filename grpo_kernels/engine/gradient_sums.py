"""The gradients of a head's tensors, summed over the groups of a sweep."""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.engine.chunks import Group
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.records import Gradients, NeedsGrad, Operands


class GradientSums:
    """The gradients of the head's tensors, summed over the groups."""

    def __init__(
        self, head: Operands, n: int, groups: list[Group], plan: HeadPlan, needs_grad: NeedsGrad
    ) -> None:
        self._head, self._n, self._dtype, self._wants = head, n, plan.accumulator, needs_grad
        self._backend = plan.backend
        self._padded = max((group.start + group.rows for group in groups), default=0)
        self._rows: list[
            Tensor | None
        ] = []  # per factor: (n, K), and padding, which the next group overwrites
        self._matrices: list[Tensor | None] = []  # (V, K)
        self._bias: Tensor | None = None  # (V,)
        self._fp16_scale: Tensor | None = (
            None  # () factor that matrices and bias carry, but the rows do not
        )

    def _allocate(self) -> None:
        """Allocate the sums: not before the first group's d logits are under way."""
        new, dtype, needs_grad = self._head.hidden, self._dtype, self._wants
        # the first group's product writes the matrices; without a group they are 0
        new_matrix = new.new_empty if self._n > 0 else new.new_zeros
        for (x, matrix), (needs_rows, needs_matrix) in zip(
            self._head.factors(), needs_grad.factors(), strict=False
        ):
            self._rows.append(
                new.new_empty(self._padded, x.shape[1], dtype=dtype) if needs_rows else None
            )
            self._matrices.append(new_matrix(matrix.shape, dtype=dtype) if needs_matrix else None)
        if needs_grad.bias:
            self._bias = new.new_zeros(self._head.weight.shape[0], dtype=dtype)

    def add(
        self,
        group: Group,
        products: list[Products],
        features: list[Tensor],
        d_logits: Tensor,
        fp16_scale: Tensor | None,
    ) -> None:
        """Add a group's gradient, from its operands (m, K) and d logits (m, V); these carry `fp16_scale` ()."""
        if not self._rows:
            self._allocate()
        if fp16_scale is not None and self._fp16_scale is not None:
            self._rescale(fp16_scale / self._fp16_scale)
        self._fp16_scale = fp16_scale
        for factor, x, rows, matrix in zip(
            products, features, self._rows, self._matrices, strict=True
        ):
            if rows is not None:
                factor.d_hidden(d_logits, rows[group.start : group.start + group.rows])
                if fp16_scale is not None:
                    rows[group.start : group.stop].div_(fp16_scale)
            if matrix is not None:
                factor.d_weight(d_logits, x, matrix, first=group.start == 0)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(dim=0, dtype=self._bias.dtype))

    def gradients(self) -> Gradients:
        if not self._rows:
            self._allocate()
        if self._fp16_scale is not None:
            self._rescale(1.0 / self._fp16_scale)
        rows = [None if x is None else x[: self._n] for x in self._rows]
        (hidden, lora_u), (weight, lora_b) = ((*x, None)[:2] for x in (rows, self._matrices))
        return Gradients(hidden, weight, self._bias, lora_u, lora_b)

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._matrices, self._bias):
            if x is not None:
                self._backend.scale(x, factor, x)
