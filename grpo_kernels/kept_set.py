"""Log-probabilities renormalised over the ids that a truncating sampler kept (top-k, top-p, min-p).

A sampler that cuts the distribution draws y from softmax over its kept set S. The policy trained on y has the same
support only if its own log-probabilities are taken over S too (https://arxiv.org/abs/2512.02556, keep sampling mask)::

    logp = z_y - log sum_{j in S} exp z_j        d logp / d z_j = 1[j = y] - p_j        j in S

Only the head's rows of S are read: they are gathered for some positions at a time and multiplied with those positions'
hidden states. With N positions of K ids, a product is 2NKH floating point operations: one forward, one for d hidden,
one for d weight. Positions are sorted by falling size of their sets, so that short sets get little padding. An id that
is alone in its set has log-probability 0 whatever its logit is, and costs nothing.
"""

from __future__ import annotations

import bisect
import operator
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_budget, check_ids, check_mask, check_shape, check_tensor
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.options import HeadOptions
from grpo_kernels.engine.kept_sets import KeptSetLogprob, KeptSets, stages_of
from grpo_kernels.engine.products import accumulator_of
from grpo_kernels.head.lm_head import LMHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import KeptSetKeywords

WORKSPACE_BYTES = 64 * 2**20  # by default: more at a time is no faster
ENTRY_BYTES = 64  # of one kept id, besides its row of the head, while sets are sorted and reduced


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor,
    *,
    entropy: Literal[True] = ...,
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor,
    *,
    entropy: Literal[False],
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, None]: ...


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor,
    *,
    entropy: bool,
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, Tensor | None]: ...


def kept_set_logprob(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (...)
    kept_ids: Tensor,  # (..., K)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = True,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z[S])[id]`` and the entropy of ``softmax(z[S])``, S the kept set of each position.

    ``z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature`` as in `linear_logprob`. Both results are
    differentiable, once, in hidden, weight and bias. The only tensor of the vocabulary's size is the accumulator for
    the gradient of a weight that trains: V x H in fp32 (fp64), once per backward (and V for the bias).

    Args:
        hidden, weight, ids, bias, mask: (..., H), (V, H), (...), (V,) and (...), as in `linear_logprob`.
        temperature, final_logit_softcapping, logit_scale, entropy: likewise. Operands are used as stored (under
            autocast rounded to its dtype), products are fp32.
        kept_ids: (..., K) signed integers, the ids that the sampler kept, padded with -1; read only where the mask
            counts. Their order does not matter, and a repeated id counts once. Each set must hold the sampled id.
        workspace_bytes: bound on temporary memory, exceeded only if it is too small to sort one position's set (64 K
            bytes). None: 64 MiB. Besides it, 12 bytes for each (position, kept id) stay from forward to backward (16 in
            fp64 or with a soft-cap, 24 with both).

    Returns:
        logps (...) and entropies (...), fp32 (fp64 for fp64 inputs), 0 where masked; the second None if not asked for.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done. On a CPU that
            includes a kept id that is neither -1 nor in [0, V), and a sampled id outside its set; on other devices that
            position's results are NaN.

    The host reads the sizes of the sets. Under torch.compile the graph breaks here.
    """
    head = LMHead(hidden, weight, bias)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale)
    if torch.compiler.is_compiling():
        from grpo_kernels.call import compiled  # not at import: it loads the compiler

        return compiled.eagerly(_score, head, ids, kept_ids, mask, options, entropy, workspace_bytes)
    return _score(head, ids, kept_ids, mask, options, entropy, workspace_bytes)


def _score(
    head: LMHead,
    ids: Tensor,
    kept_ids: Tensor,
    mask: Tensor | None,
    options: HeadOptions,
    entropy: bool,
    workspace_bytes: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, look at the sets, and run one forward, eagerly."""
    hidden = head.hidden
    head.check()
    check_ids("ids", ids, hidden)
    if mask is not None:
        check_mask("mask", mask, ids)
    check_tensor("kept_ids", kept_ids, like=hidden)
    if kept_ids.dtype not in (torch.int64, torch.int32, torch.int16):
        raise TypeError(f"kept_ids: expected signed integer ids of 16, 32 or 64 bits, got {kept_ids.dtype}")
    width = kept_ids.shape[-1] if kept_ids.dim() else 0
    check_shape("kept_ids", kept_ids, ("(*ids.shape, K)", (*ids.shape, width)))
    budget = WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    check_budget(budget)
    options = options.checked()
    kept = kept_ids.detach().reshape(ids.numel(), width)
    sets = _read_sets(head, ids, kept, mask, options, entropy, budget)
    logps, entropies = KeptSetLogprob.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, kept, sets)
    return logps.view(ids.shape), None if entropies is None else entropies.view(ids.shape)


def _read_sets(
    head: LMHead,
    ids: Tensor,
    kept: Tensor,  # (N, K)
    mask: Tensor | None,
    options: HeadOptions,
    entropy: bool,
    budget: int,
) -> KeptSets:
    """Look at the sets and plan the work."""
    dtype, (vocab, width) = head.compute_dtype(), head.weight.shape
    positions = counted_positions("mask", mask, ids)
    inv_t = options.inv_temperature(ids, positions, accumulator_of(dtype))
    sizes, invalid = _survey(ids.detach(), kept, positions, vocab, budget)
    sizes, order = sizes.sort(descending=True, stable=True)
    on_host = sizes.tolist()  # waits for the device: how much there is to do depends on it
    projected = bisect.bisect_right(on_host, -2, key=operator.neg)
    order = order[:projected]
    entry_bytes = width * sum(x.itemsize for x in stages_of(head.weight, dtype))
    row_bytes = kept.shape[1] * ENTRY_BYTES + 2 * width * accumulator_of(dtype).itemsize
    rows = positions[order]
    return KeptSets(
        rows=rows,
        ids=ids.detach().reshape(-1)[rows].long().clamp(0, vocab - 1),
        blocks=_plan_blocks(on_host[:projected], budget, entry_bytes, row_bytes),
        entries=max(1, budget // entry_bytes),
        invalid=invalid,
        needs_grad=head.needs_grad(),
        entropy=entropy,
        compute_dtype=dtype,
        scale=float(options.logit_scale),
        softcap=options.final_logit_softcapping,
        inv_temperature=inv_t[order] if isinstance(inv_t, Tensor) else inv_t,
    )


def _survey(ids: Tensor, kept: Tensor, positions: Tensor, vocab: int, budget: int) -> tuple[Tensor, Tensor | None]:
    """Return the size of each counted position's set, duplicates included, (n,), and the positions that cannot be
    scored, (N,) bool; None on a CPU.

    Raises:
        ValueError: on a CPU, a kept id that does not exist, or a sampled id that is not in its set.
    """
    sizes, flags = positions.new_zeros(positions.shape), torch.zeros_like(positions, dtype=torch.bool)
    step = max(1, budget // max(1, kept.shape[1] * ENTRY_BYTES))
    for start in range(0, positions.shape[0], step):
        part = slice(start, start + step)
        some, sampled = kept[positions[part]], ids.reshape(-1)[positions[part]]
        outside = ((some < -1) | (some >= vocab)).any(dim=1)
        missing = (some != sampled[:, None]).all(dim=1) | (sampled < 0)
        sizes[part], flags[part] = (some >= 0).sum(dim=1), outside | missing
        if ids.device.type == "cpu" and bool(flags[part].any()):
            i = int(flags[part].nonzero()[0])
            at = tuple(int(x) for x in torch.unravel_index(positions[part][i], ids.shape))
            if bool(outside[i]):
                bad = some[i][(some[i] < -1) | (some[i] >= vocab)][0].item()
                raise ValueError(f"kept_ids: expected ids in [0, V) = [0, {vocab}) or -1, got {bad} at position {at}")
            raise ValueError(
                f"ids: expected an id of the position's kept set, got {sampled[i].item()} at position {at}"
            )
    if ids.device.type == "cpu":
        return sizes, None
    return sizes, torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_put_((positions,), flags)


def _plan_blocks(sizes: list[int], budget: int, entry_bytes: int, row_bytes: int) -> list[tuple[slice, int]]:
    """Return blocks (rows, width) of falling `sizes` that fit the budget, each set at least half as long as the width.

    Padding then costs at most as much as the sets themselves.
    """
    blocks, start = [], 0
    while start < len(sizes):
        width = sizes[start]
        most = max(1, budget // (width * entry_bytes + row_bytes))
        stop = bisect.bisect_right(sizes, -width / 2, lo=start, hi=min(len(sizes), start + most), key=operator.neg)
        blocks.append((slice(start, stop), width))
        start = stop
    return blocks
