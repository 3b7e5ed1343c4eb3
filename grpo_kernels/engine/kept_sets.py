"""The products of kept sets: hidden states times the head's rows for each position's kept ids, which are gathered.

The sets of a block of r positions are ids (r, w), padded. Forward: gather (r, w, H), multiply with hidden states (r, H)
to z (r, w), reduce. Backward: d z from the saved tensors; gather again and multiply with d z for d hidden; the outer
product of d z and hidden states, added to the ids' rows of d weight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.products import accumulator_of
from grpo_kernels.engine.records import NeedsGrad


@dataclass(frozen=True)
class KeptSets:
    """The positions to project, those with the largest sets first, and how to project them.

    A position whose set is one id is not among them: its log-probability and entropy are 0, and so is their gradient.
    """

    rows: Tensor  # (m,) int64, indices into the flattened ids
    ids: Tensor  # (m,) int64, in [0, V)
    blocks: list[tuple[slice, int]]  # slices of `rows`, each with the size of its largest set
    entries: int  # (position, kept id) pairs that are gathered at a time
    invalid: Tensor | None  # (N,) bool: positions whose results are NaN; None: none
    needs_grad: NeedsGrad
    entropy: bool
    compute_dtype: torch.dtype
    scale: float
    softcap: float | None
    inv_temperature: float | Tensor  # a number, or (m, 1)

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_of(self.compute_dtype)

    def inv_t(self, rows: slice | Tensor) -> float | Tensor:
        """1 / temperature of some of the rows."""
        return self.inv_temperature[rows] if isinstance(self.inv_temperature, Tensor) else self.inv_temperature

    def operand(self, hidden: Tensor) -> Tensor:
        """Hidden states rounded to the compute dtype, in the dtype of the products."""
        return hidden.to(self.compute_dtype).to(self.accumulator)


def stages_of(weight: Tensor, dtype: torch.dtype) -> list[torch.dtype]:
    """Return the stages of a gathered row: as stored, rounded to the compute dtype, as an operand of fp32 products."""
    dtypes = [weight.dtype, dtype, accumulator_of(dtype)]
    return [x for i, x in enumerate(dtypes) if i == 0 or x != dtypes[i - 1]]


class _HeadRows:
    """Gather the head's rows for kept ids, into memory that every call uses again."""

    def __init__(self, weight: Tensor, sets: KeptSets) -> None:
        largest = max(((rows.stop - rows.start) * width for rows, width in sets.blocks), default=0)
        self._weight, self._entries = weight.detach(), min(sets.entries, largest)
        dtypes = stages_of(weight, sets.compute_dtype)
        self._stages = [weight.new_empty(self._entries, weight.shape[1], dtype=dtype) for dtype in dtypes]

    def pieces(self, rows: int, width: int) -> list[slice]:
        """Return slices of a (rows, width) block's columns that fit in memory; several only if one row is too long."""
        step = max(1, self._entries // max(1, rows))
        return [slice(start, min(start + step, width)) for start in range(0, width, step)]

    def of(self, kept: Tensor) -> Tensor:
        """Gather (r, w) ids -> (r, w, H); valid until the next call."""
        n = kept.numel()
        torch.index_select(self._weight, 0, kept.reshape(-1), out=self._stages[0][:n])
        for x, y in itertools.pairwise(self._stages):
            y[:n].copy_(x[:n])
        return self._stages[-1][:n].view(*kept.shape, self._weight.shape[1])

    def outer(self, d_raw: Tensor, hidden: Tensor) -> Tensor:
        """(r, w) and (r, H) -> (r w, H): d weight of each entry; valid until the next call."""
        out = self._stages[-1][: d_raw.numel()]
        torch.bmm(d_raw[:, :, None], hidden[:, None, :], out=out.view(*d_raw.shape, out.shape[1]))
        return out


def _in_order(kept: Tensor, ids: Tensor, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return (r, K) sets as (r, width) ids, and a mask of the padding; padding repeats the sampled id, with gradient 0.

    So NaN in a position's hidden state reaches the gradient of no id outside of its set.
    """
    kept = torch.where(kept < vocab, kept, -1).long().sort(dim=1, descending=True).values[:, :width]
    padding = kept < 0
    padding[:, 1:] |= kept[:, 1:] == kept[:, :-1]
    return torch.where(padding, ids[:, None], kept), padding


class _Block(NamedTuple):
    """Tensors of a block of rows that the forward saves."""

    kept: Tensor  # (r, w) ids, in order
    log_probs: Tensor  # (r, w), -inf in the padding
    hot: Tensor  # (r, 1): column of the sampled id
    slope: Tensor | None  # (r, w), the soft-cap's derivative


@first_order
class KeptSetLogprob(torch.autograd.Function):
    """``forward(ctx, hidden, weight, bias, kept, sets)`` -> logps (N,), entropies (N,) or None; `kept` (N, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        kept: Tensor,  # (N, K)
        sets: KeptSets,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        logps = hidden.new_zeros(hidden.shape[0], dtype=sets.accumulator)
        entropies = torch.zeros_like(logps) if sets.entropy else None
        saved: list[Tensor | None] = []
        with torch.autocast(hidden.device.type, enabled=False):
            head = _HeadRows(weight, sets)
            for rows, width in sets.blocks:
                positions, ids = sets.rows[rows], sets.ids[rows]
                some, padding = _in_order(kept[positions], ids, width, weight.shape[0])
                z, slope = _logits(head, sets.operand(hidden[positions]), some, bias, sets, rows)
                z.masked_fill_(padding, -torch.inf)
                log_probs = z - z.amax(dim=1, keepdim=True)
                log_probs -= torch.logsumexp(log_probs, dim=1, keepdim=True)
                hot = ((some == ids[:, None]) & ~padding).to(torch.uint8).argmax(dim=1, keepdim=True)
                logps[positions] = log_probs.gather(1, hot)[:, 0]
                if entropies is not None:
                    entropies[positions] = _entropies(log_probs)
                if sets.needs_grad.hidden or sets.needs_grad.head:
                    saved += _Block(some, log_probs, hot, slope)
        if sets.invalid is not None:
            for x in (logps, entropies):
                if x is not None:
                    x.masked_fill_(sets.invalid, torch.nan)
        ctx.sets, ctx.bias_dtype = sets, None if bias is None else bias.dtype
        ctx.save_for_backward(hidden, weight, *saved)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        sets, (hidden, weight, *saved) = ctx.sets, ctx.saved_tensors
        needs_grad, new = sets.needs_grad, hidden.new_zeros
        if d_logps is None and d_entropies is None:
            return None, None, None, None, None
        d_hidden = torch.zeros_like(hidden) if needs_grad.hidden else None
        d_weight = new(weight.shape, dtype=sets.accumulator) if needs_grad.weight else None
        d_bias = new(weight.shape[0], dtype=sets.accumulator) if needs_grad.bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = _HeadRows(weight, sets)
            for i, (rows, _) in enumerate(sets.blocks):
                g, h = (None if x is None else x[sets.rows[rows]] for x in (d_logps, d_entropies))
                block = _Block(*saved[len(_Block._fields) * i :][: len(_Block._fields)])
                d_raw, grad_rows = _d_raw(block, g, h, sets, rows)
                some, positions = block.kept[grad_rows], sets.rows[rows][grad_rows]
                states = sets.operand(hidden[positions])
                d_states = torch.zeros_like(states)
                for columns in head.pieces(*some.shape):
                    index, part = some[:, columns], d_raw[:, columns]
                    if d_hidden is not None:
                        d_states += torch.bmm(part[:, None, :], head.of(index))[:, 0]
                    if d_weight is not None:
                        d_weight.index_add_(0, index.reshape(-1), head.outer(part, states))
                if d_hidden is not None:
                    d_hidden[positions] = d_states.to(d_hidden.dtype)
                if d_bias is not None:
                    d_bias.index_add_(0, some.reshape(-1), d_raw.reshape(-1))
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(ctx.bias_dtype),
            None,
            None,
        )


def _logits(
    head: _HeadRows, states: Tensor, some: Tensor, bias: Tensor | None, sets: KeptSets, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """z (r, w) of the ids `some` (r, w), and the soft-cap's derivative 1 - tanh^2, or None without one."""
    z = states.new_empty(some.shape)
    for columns in head.pieces(*some.shape):
        z[:, columns] = torch.bmm(head.of(some[:, columns]), states[:, :, None])[..., 0]
    if bias is not None:
        z += bias.detach()[some].to(z.dtype)
    z *= sets.scale
    slope = None
    if sets.softcap is not None:
        z = torch.tanh(z / sets.softcap)
        slope = 1 - z * z
        z = z * sets.softcap
    return z * sets.inv_t(rows), slope


def _entropies(log_probs: Tensor) -> Tensor:
    """-sum p log p of each row, over the ids with p > 0."""
    probs = log_probs.exp()
    return -torch.where(probs > 0, probs * log_probs, 0.0).sum(dim=1)


def _d_raw(block: _Block, g: Tensor | None, h: Tensor | None, sets: KeptSets, rows: slice) -> tuple[Tensor, Tensor]:
    """Return d loss / d (raw projection), (m, w), of the block's rows with gradient, and their indices (m,).

    d z_j = g (1[j = y] - p_j) - h p_j (log p_j + entropy), g = d loss / d logp and h = d loss / d entropy.
    """
    _, log_probs, hot, slope = block
    moves = [x != 0 for x in (g, h) if x is not None]
    grad_rows = (moves[0] if len(moves) == 1 else moves[0] | moves[1]).nonzero()[:, 0]
    log_probs, hot = log_probs[grad_rows], hot[grad_rows]
    probs = log_probs.exp()
    d_raw = torch.zeros_like(probs)
    if g is not None:
        g = g[grad_rows, None]
        d_raw = (-g * probs).scatter_add_(1, hot, g)
    if h is not None:
        away = torch.where(probs > 0, log_probs + _entropies(log_probs)[:, None], 0.0)
        d_raw -= h[grad_rows, None] * probs * away
    inv_t = sets.inv_t(rows)
    d_raw *= sets.scale * (inv_t[grad_rows] if isinstance(inv_t, Tensor) else inv_t)
    return (d_raw if slope is None else d_raw * slope[grad_rows]), grad_rows
