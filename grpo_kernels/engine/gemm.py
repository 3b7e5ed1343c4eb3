"""The three matrix products, by the vendor library.

Results are the accumulators, unrounded, for all operand dtypes. CUDA multiplies 16-bit operands
into fp32 results, with d logits rounded to the same 16 bits. Elsewhere torch would round the result
to 16 bits, so the operands are first converted to fp32, exactly, a slice of the vocabulary at a
time, and d logits stay in fp32.

The range of fp16 is too small for d logits, since no loss scale has multiplied them yet. So fp16 d
logits carry a power of two, the same for all rows of a product, and the accumulated results are
divided by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, LogitTransform, RowStats
from grpo_kernels.base.tensors import map_tensors
from grpo_kernels.engine.workspace import device_of

HIGHEST_FP16 = 2.0**12  # bound of scaled d logits, 1/16 of the largest fp16
ENTROPY_BOUND = 16.0  # bound of |p_j (log p_j + entropy)|, for V up to e^15


class Product:
    """The product of chunks of rows with one matrix of a head, and those of its backward.

    Args:
        weight: the matrix (V, H), of any floating dtype.
        operand_dtype: dtype that the operands are rounded to.
        accumulator_dtype: dtype of the results.
        slice_bytes: bytes of the weight to convert at a time, if it must be converted.
    """

    def __init__(
        self,
        weight: Tensor,
        operand_dtype: torch.dtype,
        accumulator_dtype: torch.dtype,
        slice_bytes: int,
    ) -> None:
        self.weight, self.operand_dtype = weight, operand_dtype
        narrow = (operand_dtype.itemsize, accumulator_dtype.itemsize) == (2, 4)
        mixed = narrow and device_of(weight.device).mixed_products
        if mixed:
            _check_accumulation(operand_dtype)
        # of both operands of the backward products: d logits are rounded to it
        self.d_logits_dtype = operand_dtype if mixed else accumulator_dtype
        # bytes copied per element of the weight
        copied = 0 if weight.dtype == operand_dtype else operand_dtype.itemsize
        copied += 0 if self.d_logits_dtype == operand_dtype else self.d_logits_dtype.itemsize
        vocab, width = weight.shape
        most = max(1, slice_bytes // (width * copied)) if copied else vocab
        self._slice_rows = min(vocab, most)
        self.slice_bytes = self._slice_rows * width * copied  # 0: the weight needs no copy

    def hidden_bytes(self) -> int:
        """Bytes of one row of hidden states as an operand."""
        return self.weight.shape[1] * self.d_logits_dtype.itemsize

    def operand(self, hidden: Tensor) -> Tensor:
        """Round hidden states to `operand_dtype`, then convert them to the dtype of the product."""
        return hidden.to(self.operand_dtype).to(self.d_logits_dtype)

    @property
    def needs_fp16_scale(self) -> bool:
        """True if d logits carry a factor that `with_fp16_scale` chooses."""
        return self.d_logits_dtype == torch.float16

    def with_fp16_scale(
        self,
        coefficients: Coefficients,
        stats: RowStats,
        transform: LogitTransform,
    ) -> tuple[Coefficients, Tensor | None]:
        """Multiply the rows' coefficients by a power of two that brings d logits into range.

        Returns the coefficients, with a d_logp that is not None, and the power (). The power is 1
        if a coefficient is not finite, so NaN and inf reach the gradient; it is None if d logits
        need no scale.
        """
        d_logp, d_entropy, d_divergence, d_topk = coefficients
        d_logp = torch.zeros_like(stats.logps) if d_logp is None else d_logp
        coefficients = coefficients._replace(d_logp=d_logp)
        if not self.needs_fp16_scale or d_logp.numel() == 0:
            return coefficients, None
        inv_t = transform.inv_temperature
        size = d_logp.abs() if d_entropy is None else d_logp.abs() + ENTROPY_BOUND * d_entropy.abs()
        if d_divergence is not None:  # |k_v| is at most 1 + D
            divergence = stats.divergence
            assert divergence is not None
            size = size + d_divergence.abs() * (
                1.0 + divergence.value.abs() + divergence.sum_k.abs()
            )
        if d_topk is not None:  # at most |g_k| + p_k |G|
            size = size + 2.0 * d_topk.abs().sum(dim=1)
        size = size * abs(transform.scale) * (inv_t[:, 0] if isinstance(inv_t, Tensor) else inv_t)
        power = torch.floor(torch.log2(HIGHEST_FP16 / size.amax().clamp(min=1e-30)))
        fp16_scale = torch.where(torch.isfinite(size).all(), torch.exp2(power), 1.0)
        return map_tensors(fp16_scale.mul, coefficients), fp16_scale

    def logits(self, hidden: Tensor, out: Tensor, *, add: bool = False) -> None:
        """``out = hidden @ weight.T``: (n, H) operand -> (n, V); ``+=`` if `add`.

        On a GPU, the vendor library chooses its kernel by the number of rows, and fp32 kernels
        differ in the order of their sums. So an fp32 product takes one tile of rows at a time, and
        the bits of a row do not depend on other rows.
        """
        is_fp32 = self.d_logits_dtype == torch.float32
        tile = device_of(self.weight.device).fp32_rows if is_fp32 else None
        at_once = tile or max(1, hidden.shape[0])
        for columns, weight in self._weights():
            for start in range(0, hidden.shape[0], at_once):
                rows = slice(start, start + at_once)
                _multiply(hidden[rows], weight.t(), out[rows, columns], add=add)
            del weight  # before the next slice is made

    def d_hidden(self, d_logits: Tensor, out: Tensor, *, add: bool = False) -> None:
        """``out = d_logits @ weight``: (n, V) -> (n, H); ``+=`` if `add`."""
        for columns, weight in self._weights():
            weight = weight.to(d_logits.dtype)  # an adapter's weight may be more precise
            _multiply(d_logits[:, columns], weight, out, add=columns.start > 0 or add)
            del weight  # before the next slice is made

    def d_weight(self, d_logits: Tensor, hidden: Tensor, out: Tensor, *, add: bool) -> None:
        """``out = d_logits.T @ hidden``, or ``+=`` if `add`.

        (n, V) in `d_logits_dtype` and an (n, H) operand -> (V, H).
        """
        _multiply(d_logits.t(), hidden.to(d_logits.dtype), out, add=add)

    def _weights(self) -> Iterator[tuple[slice, Tensor]]:
        vocab = self.weight.shape[0]
        for start in range(0, vocab, self._slice_rows):
            columns = slice(start, min(start + self._slice_rows, vocab))
            yield columns, self.weight[columns].to(self.operand_dtype).to(self.d_logits_dtype)


def _check_accumulation(operands: torch.dtype) -> None:
    # cuBLAS has no product that sums in fp16 and returns fp32
    if operands == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise RuntimeError(
            "torch.backends.cuda.matmul.allow_fp16_accumulation: expected False for a head in "
            "torch.float16, whose products are summed in float32, got True, for which cuBLAS has "
            "no such product; set it to False for this call and its backward, or use "
            "torch.bfloat16, which it does not affect"
        )


def mixed_mm(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
    """``out = left @ right``, or ``+=``: 16-bit operands, a result in fp32."""
    if add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    if left.dtype != out.dtype:
        mixed_mm(left, right, out, add=add)
    elif add:
        torch.addmm(out, left, right, out=out)
    else:
        torch.mm(left, right, out=out)
