"""The three matrix products, by the vendor library: fp32 out of the accumulator, whatever the operands' dtype.

On CUDA, 16-bit operands go in as they are and fp32 comes out. On a CPU (and on ROCm) the library would round the result
to 16 bits, so the operands are converted to fp32 first, exactly, a slice of the vocabulary at a time. The same is done
in the two backward products for fp16: d logits in fp16 would underflow before a loss scale reaches them.
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
        mixed = weight.is_cuda and torch.version.hip is None and compute_dtype.itemsize < accumulator.itemsize
        self._forward = compute_dtype if mixed else accumulator  # dtypes of the operands
        self._backward = compute_dtype if mixed and compute_dtype == torch.bfloat16 else accumulator
        copied = max(self._copied(self._forward), self._copied(self._backward))
        self._slice_rows = weight.shape[0]
        if copied:
            self._slice_rows = min(self._slice_rows, max(1, slice_bytes // (weight.shape[1] * copied)))
        self.slice_bytes = self._slice_rows * weight.shape[1] * copied  # 0 if the weight is an operand as it is

    def _copied(self, dtype: torch.dtype) -> int:
        """Bytes of an element of the weight that making it an operand in `dtype` takes."""
        rounded = 0 if self.weight.dtype == self.compute_dtype else self.compute_dtype.itemsize
        return rounded + (0 if self.compute_dtype == dtype else dtype.itemsize)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What d logits are rounded to for the backward products: the accumulator's dtype, or bf16 on CUDA."""
        return self._backward

    def hidden_bytes(self) -> int:
        """What a row of hidden states takes as an operand of all three products."""
        copies = self._forward.itemsize + (0 if self._backward == self._forward else self._backward.itemsize)
        return self.weight.shape[1] * copies

    def operand(self, hidden: Tensor) -> Tensor:
        """Hidden states rounded to the compute dtype, in the dtype that the forward product takes."""
        return hidden.to(self.compute_dtype).to(self._forward)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """``out = hidden @ weight.T``: (n, H) operand -> (n, V)."""
        for columns, weight in self._weights(self._forward):
            _product(hidden, weight.t(), out[:, columns])
            del weight  # before the next slice is made

    def d_hidden(self, d_logits: Tensor, out: Tensor, *, first: bool = True) -> None:
        """``out = d_logits @ weight``: (n, V) in `gradient_dtype` -> (n, H); all but the `first` add to it."""
        for columns, weight in self._weights(self._backward):
            _product(d_logits[:, columns], weight, out, add=columns.start > 0 or not first)
            del weight  # before the next slice is made

    def d_weight(self, d_logits: Tensor, hidden: Tensor, out: Tensor, *, first: bool) -> None:
        """``out += d_logits.T @ hidden``: (n, V) in `gradient_dtype`, (n, H) operand -> (V, H); the `first` writes."""
        _product(d_logits.t(), hidden.to(self._backward), out, add=not first)

    def _weights(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """(columns of the vocabulary, the head's rows for them as an operand)."""
        vocab = self.weight.shape[0]
        for start in range(0, vocab, self._slice_rows):
            columns = slice(start, min(start + self._slice_rows, vocab))
            yield columns, self.weight[columns].to(self.compute_dtype).to(dtype)


def _product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``out = left @ right``, or ``+=``, accumulated in the dtype of `out`."""
    if left.dtype != out.dtype:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)
