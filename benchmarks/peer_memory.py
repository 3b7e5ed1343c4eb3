"""Memory that other heads allocate, by formulas read off their source as released; a test compares
them with counts.

A tile is the part of the logits that a head projects at a time. On a CPU it lives in several
copies, since each operation of torch makes one; TRL's Triton kernels work in place on a GPU.
Figures are after ``loss.backward()``, without gradients of an earlier micro-batch.
"""

from __future__ import annotations

from grpo_kernels.commands.memory import FP32, Need, Size

TRL_ROWS, TRL_COLUMNS = 4096, 32768  # a tile of TRL 1.16's head
LIGER_ROWS, LIGER_COLUMNS = 2048, 4096  # of Liger 0.8.5's loss, a sequence after the other


def estimate(size: Size, *, softcap: bool = False, length: int = 1024) -> list[Need]:
    """The needs of all logits, TRL and Liger, for sequences of `length` tokens; Liger's loss has no
    soft-cap, and gives no log-probabilities without a loss."""
    liger_ = [] if size.score or softcap else [liger(size, min(length, size.rows))]
    return [all_logits(size, softcap), trl(size, softcap), *liger_]


def all_logits(size: Size, softcap: bool) -> Need:
    """``log_softmax`` of the logits in fp32, kept for the backward, where its gradient and that of
    the logits are beside it."""
    logits = size.rows * size.vocab
    capped = logits * size.dtype.itemsize if softcap else 0  # kept by tanh
    forward, kept = 2 * FP32 * logits + capped, FP32 * logits + capped
    if size.score:
        return Need("all logits, log_softmax", forward, 0, 0)
    of_weight = logits * size.dtype.itemsize + size.returned  # while d weight is made
    return Need(
        "all logits, log_softmax", max(3 * FP32 * logits + capped, of_weight), size.returned, kept
    )


def trl(size: Size, softcap: bool) -> Need:
    """TRL 1.16's fused head, which projects again in the backward.

    On a CPU it is given every position; a tile has the buffer of the product and copies in fp32:
    three in the forward, seven and a mask of bytes in the backward, and one more with a soft-cap.
    On a GPU it is given the positions that count, and there is the buffer alone; at the end the
    sums, in fp32, are cast while all of them are alive.
    """
    in_place = size.on_gpu
    positions = size.counted if in_place else size.rows
    rows, columns = min(positions, TRL_ROWS), min(size.vocab, TRL_COLUMNS)
    buffer, tile = rows * TRL_COLUMNS * size.dtype.itemsize, rows * columns * FP32
    forward = buffer + (0 if in_place else 3 * tile)
    if size.score:
        return Need("TRL 1.16 fused head", forward, 0, 0)
    gradients = (positions + (0 if size.frozen else size.vocab)) * size.hidden
    narrow, row_work, converted = size.dtype.itemsize < FP32, 0, 0
    if not in_place:
        row_work = (8 if softcap else 7) * tile + tile // FP32
        # operands of d hidden, d weight
        converted = tile + max(columns, rows) * size.hidden * FP32 if narrow else 0
    returned = gradients * size.dtype.itemsize
    backward = buffer + gradients * FP32 + max(row_work, converted, returned if narrow else 0)
    return Need("TRL 1.16 fused head", max(forward, backward), returned, 0)


def liger(size: Size, length: int) -> Need:
    """Liger 0.8.5's fused GRPO loss, which has the gradients in the forward, of all positions; each
    sequence's own, in fp32, are added to those that are returned."""
    rows, columns = min(length, LIGER_ROWS), min(size.vocab, LIGER_COLUMNS)
    # a slab of the weight, or of its gradient
    tile, slab = rows * columns * FP32, columns * size.hidden * FP32
    narrow, of_rows = size.dtype.itemsize < FP32, rows * size.hidden * FP32
    products = 3 * tile + (slab if narrow or not size.frozen else 0)
    products += of_rows if narrow or size.frozen else 0
    of_sequence = (length + (0 if size.frozen else size.vocab)) * size.hidden
    rounded = of_sequence * size.dtype.itemsize if narrow else 0
    # else two are there while the next is made
    alone = size.vocab <= LIGER_COLUMNS and length <= LIGER_ROWS
    row_work = (3 if alone else 5) * tile
    in_sequence = size.returned + of_sequence * FP32 + max(row_work, products, rounded)
    d_hidden = size.rows * size.hidden * size.dtype.itemsize  # of all sequences, concatenated
    joined = size.returned + d_hidden
    return Need(
        "Liger 0.8.5 fused GRPO loss", max(in_sequence, joined), size.returned, size.returned
    )
