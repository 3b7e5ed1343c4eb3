"""The caller's batch, reduced to the tokens that count.

Everything after this module works on n rows, one per counted token. Values at masked positions are
never read, so none of them, not even NaN, can reach a result. From here on, padded (B, T) and
packed (N,) batches look the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from grpo_kernels.base.checks import (
    check_mask,
    check_mask_values,
    check_not_swapped,
    check_shape,
    check_tensor,
)
from grpo_kernels.base.tensors import sequences_of


@dataclass(frozen=True)
class Layout:
    """Places of the counted tokens in the batch, ordered by sequence."""

    positions: Tensor  # (n,) int64: in the flattened batch
    sequence: Tensor  # (n,) int64: index of its sequence, in [0, B)
    column: Tensor  # (n,) int64: place within its sequence
    batch: int  # B
    longest: int  # T, or the longest packed sequence
    shape: tuple[int, ...]  # of the caller's per-token tensors, (B, T) or (N,)

    @cached_property
    def lengths(self) -> Tensor:
        """Counted tokens of each sequence, (B,) int64."""
        counts = torch.zeros(self.batch, dtype=torch.long, device=self.sequence.device)
        return counts.index_add_(0, self.sequence, torch.ones_like(self.sequence))

    @property
    def total(self) -> int:
        """Counted tokens of all sequences."""
        return self.positions.shape[0]

    def dense(self, x: Tensor) -> Tensor:
        """(n,) -> (B, T), 0 where masked."""
        full = x.new_zeros(self.batch, self.longest)
        full[self.sequence, self.column] = x
        return full

    def sequence_sum(self, x: Tensor) -> Tensor:
        """(n,) -> (B,): the sum over each sequence's tokens.

        A packed batch needs no (B, longest) tensor for it.
        """
        assert len(x) == self.total, "a sum over sequences needs all tokens, not those of Tokens.at"
        if len(self.shape) == 2:
            return self.dense(x).sum(dim=1)
        return torch.segment_reduce(x.double(), "sum", lengths=self.lengths, unsafe=True).to(
            x.dtype
        )

    def scatter(self, x: Tensor) -> Tensor:
        """(n,) -> the caller's shape, 0 where masked; a tensor of its own, not a view."""
        full = x.new_zeros(self.shape)
        full.view(-1)[self.positions] = x
        return full


@dataclass(frozen=True)
class Tokens:
    """Per-token inputs of the loss; None where absent.

    Every tensor is (n,), in the accumulator's dtype, and detached. The sampler's K most likely
    ids have (n, K) log-probabilities, with -inf as padding.
    """

    layout: Layout
    advantages: Tensor
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    importance_sampling_ratio: Tensor | None = None
    sampling_topk_logps: Tensor | None = None
    # (B,): importance_sampling_ratio, if the caller passed one per sequence
    sampling_ratio_per_sequence: Tensor | None = None
    advantages_per_sequence: bool = False  # True if the caller passed (B,)

    def at(self, index: Tensor) -> Tokens:
        """Select the tokens at `index` (m,), for numbers of each token alone.

        The layout and numbers per sequence stay those of all tokens.
        """
        whole = ("layout", "sampling_ratio_per_sequence", "advantages_per_sequence")
        values = vars(self).items()
        return Tokens(**{k: x if x is None or k in whole else x[index] for k, x in values})

    def __len__(self) -> int:
        return self.advantages.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.advantages.dtype


def counted_positions(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Indices (n,) into the flattened `mask` where it is not 0; all indices if it is None.

    Waits for the device once, to count them. Warns once of values other than 0 and 1.

    Raises:
        ValueError: the mask contains NaN.
    """
    if mask is None:
        return torch.arange(ids.numel(), device=ids.device)
    mask = mask.detach().reshape(-1)
    counts, on_cpu = mask.ne(0), mask.device.type == "cpu"
    # integers only on a CPU, since on a GPU the search takes 4 launches
    searched = mask.dtype != torch.bool and (on_cpu or mask.is_floating_point())
    if mask.numel() == 0 or not searched:
        return counts.nonzero()[:, 0]
    has_other_value = mask.ne(counts).any()  # than 0 and 1
    if on_cpu:
        positions, warns = counts.nonzero()[:, 0], bool(has_other_value)
    else:
        # Such a value sets all flags and one extra flag. The host reads the number of indices
        # anyway, and a number above the size of the mask reveals the value.
        flags = torch.cat([counts, has_other_value[None]]) | has_other_value
        positions = flags.nonzero()[:, 0]
        warns = positions.shape[0] > mask.shape[0]
    if not warns:
        return positions
    check_not_swapped("completion_ids", ids, "completion_mask", mask)
    check_mask_values(mask)
    return counts.nonzero()[:, 0]


def read_tokens(
    like: Tensor,
    completion_mask: Tensor | None,
    advantages: Tensor,
    dtype: torch.dtype,
    *,
    cu_seqlens: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    **logps: Tensor | None,
) -> Tokens:
    """Check the per-token arguments of a loss and select the counted tokens, numbers in `dtype`.

    Args:
        like: checked ids, or another tensor (B, T) or (N,); the other arguments must have its shape
            and device.
        logps: log-probabilities of other policies, by name.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape or device; the message names it.
    """
    if completion_mask is not None:
        check_mask("completion_mask", completion_mask, like)
    batch, longest, locate = sequences_of(like, cu_seqlens)
    shape = tuple(like.shape)
    per_token = ("(B, T)" if cu_seqlens is None else "(N,)", shape)
    for name, x in logps.items():
        if x is not None:
            check_tensor(name, x, per_token, like=like, floating=True)
    check_tensor("advantages", advantages, like=like)
    if advantages.dtype == torch.bool:
        raise TypeError("advantages: expected numbers, got torch.bool")
    hint = "; pass advantages[:, 0]" if advantages.shape == (batch, 1) else ""
    check_shape("advantages", advantages, ("(B,)", (batch,)), per_token, hint=hint)
    ratio = importance_sampling_ratio
    if ratio is not None:
        name = "importance_sampling_ratio"
        shapes = per_token, ("(B, 1)", (batch, 1)), ("(B,)", (batch,))
        check_tensor(name, ratio, *shapes, like=like, floating=True)

    positions = counted_positions(completion_mask, like)
    layout = Layout(positions, *locate(positions), batch, longest, shape)

    def per_sequence(x: Tensor) -> bool:
        # if B = N, (B,) is per sequence; if T = 1, (B, 1) is per token
        return x.shape == (batch,) or x.shape != shape

    def rows(x: Tensor, index: Tensor) -> Tensor:
        return x.detach().reshape(-1)[index].to(dtype)

    def either(x: Tensor) -> Tensor:
        return rows(x, layout.sequence if per_sequence(x) else positions)

    sampling_ratio_per_sequence = None
    if ratio is not None and per_sequence(ratio):
        # a sequence without a counted token has ratio 1, like a computed ratio; its value is unread
        ratio_per_sequence = ratio.detach().reshape(-1).to(dtype)
        sampling_ratio_per_sequence = torch.where(layout.lengths > 0, ratio_per_sequence, 1.0)
    return Tokens(
        layout=layout,
        advantages=either(advantages),
        advantages_per_sequence=per_sequence(advantages),
        importance_sampling_ratio=None if ratio is None else either(ratio),
        sampling_ratio_per_sequence=sampling_ratio_per_sequence,
        **{name: None if x is None else rows(x, positions) for name, x in logps.items()},
    )
