"""The three matrix products, by the vendor library: fp32 out of the accumulator, whatever the operands' dtype.

On CUDA, 16-bit operands go in as they are and fp32 comes out. On a CPU the library would round the result to 16 bits,
so the operands are converted to fp32 first, exactly, a slice of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Products:
    """The products of the head `weight` (V, H) with chunks of rows, in `compute_dtype` operands.

    Args:
        weight: (V, H), of any floating dtype.
        compute_dtype: what the operands are rounded to.
        accumulator: the dtype of the results.
        slice_bytes: how much of the weight is converted at a time, where it has to be.
    """

    def __init__(self, weight: Tensor, compute_dtype: torch.dtype, accumulator: torch.dtype, slice_bytes: int) -> None:
        self.weight, self.compute_dtype, self.accumulator = weight, compute_dtype, accumulator
        narrow = compute_dtype.itemsize < self.accumulator.itemsize
        self._mixed = narrow and weight.is_cuda  # 16-bit operands in, fp32 out
        self._operand_dtype = compute_dtype if self._mixed else self.accumulator
        copied = compute_dtype.itemsize if weight.dtype != compute_dtype else 0
        copied += self._operand_dtype.itemsize if compute_dtype != self._operand_dtype else 0
        self._slice_rows = weight.shape[0]
        if copied:
            self._slice_rows = min(self._slice_rows, max(1, slice_bytes // (weight.shape[1] * copied)))
        self.slice_bytes = self._slice_rows * weight.shape[1] * copied  # 0 if the weight is an operand as it is

    def _weights(self) -> Iterator[tuple[slice, Tensor]]:
        """(columns of the vocabulary, the head's rows for them as an operand)."""
        vocab = self.weight.shape[0]
        for start in range(0, vocab, self._slice_rows):
            columns = slice(start, min(start + self._slice_rows, vocab))
            yield columns, self.operand(self.weight[columns])

    def operand(self, x: Tensor) -> Tensor:
        """Hidden states or weights, rounded to the compute dtype, in the dtype that the product takes."""
        return x.to(self.compute_dtype).to(self._operand_dtype)

    def gradient_operand(self, d_logits: Tensor) -> Tensor:
        """d logits in the dtype that the product takes: rounded on CUDA if the operands have 16 bits, not on a CPU."""
        return d_logits.to(self._operand_dtype)

    def row_bytes(self) -> int:
        """What a row of a chunk takes: its logits, their gradient if that is a copy, and its hidden state."""
        vocab, width = self.weight.shape
        copies = self._operand_dtype.itemsize if self._mixed else 0
        return vocab * (self.accumulator.itemsize + copies) + width * self._operand_dtype.itemsize

    def logits(self, hidden: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``out = hidden @ weight.T + bias``: (n, H) operand -> (n, V)."""
        for columns, weight in self._weights():
            self._product(hidden, weight.t(), out[:, columns])
            del weight  # before the next slice is made
        if bias is not None:
            out.add_(bias)

    def d_hidden(self, d_logits: Tensor, out: Tensor) -> None:
        """``out = d_logits @ weight``: (n, V) -> (n, H)."""
        for columns, weight in self._weights():
            self._accumulate(out, d_logits[:, columns], weight, first=columns.start == 0)
            del weight  # before the next slice is made

    def d_weight(self, d_logits: Tensor, hidden: Tensor, out: Tensor, *, first: bool) -> None:
        """``out += d_logits.T @ hidden``: (n, V), (n, H) -> (V, H); ``=`` on the `first` chunk."""
        self._accumulate(out, d_logits.t(), hidden, first=first)

    def _accumulate(self, out: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
        if first:
            self._product(left, right, out)
        elif self._mixed:
            torch.addmm(out, left, right, out_dtype=self.accumulator, out=out)
        else:
            torch.addmm(out, left, right, out=out)

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if self._mixed:
            torch.mm(left, right, out_dtype=self.accumulator, out=out)
        else:
            torch.mm(left, right, out=out)
