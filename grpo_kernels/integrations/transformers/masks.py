"""Checks of an attention mask and of how it fits the tokens that count."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_kernels.base.checks import check_shape, check_tensor, warn_once


def check_attention_mask(attention_mask: Any, input_ids: Tensor) -> None:
    """Raise unless `attention_mask` is None or has the shape (B, L) of `input_ids`.

    Masks of four dimensions and dicts of them, which transformers makes and takes too, are left to the model.

    Raises:
        TypeError, ValueError: not a tensor, or another shape.
    """
    if attention_mask is None or isinstance(attention_mask, dict):
        return
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 4:
        check_shape("attention_mask", attention_mask, ("(B, L)", tuple(input_ids.shape)))


def check_attended(attention_mask: Any, needed: Tensor, *, has_positions: bool) -> None:
    """Look at the values of an `attention_mask` (B, L), which waits for the device.

    An error is a token that counts in padding. One warning each: a first token behind padding that counts, which
    nothing predicts; zeros between ones, behind which positions are off. The token after the last 1 may count: it is
    the end token where that is the padding token too.

    Args:
        attention_mask: as `check_attention_mask` leaves it; only one of two dimensions is looked at.
        needed: (B, L) bool, the columns whose hidden states predict a token that counts.
        has_positions: True if the caller gives position_ids.

    Raises:
        ValueError: a token counts in padding.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return
    attended = attention_mask.to(needed.device) != 0
    unseen = needed[:, :-1] & ~attended[:, :-1]
    in_padding = (unseen & ~attended[:, 1:]).nonzero()
    if len(in_padding):
        row, column = in_padding[0].tolist()
        raise ValueError(
            "completion_mask: expected 0 where attention_mask is 0, got a token that counts in column "
            f"{column + 1} of sequence {row}, with attention_mask 0 there and before"
        )
    if bool(unseen.any()):
        warn_once(
            "completion_mask: it counts a token whose column before has attention_mask 0: nothing predicts the first "
            "token of a sequence, so give it 0"
        )
    begun, goes_on = attended.cumsum(1) > 0, attended.flip(1).cumsum(1).flip(1) > 0
    if not has_positions and bool((begun & goes_on & ~attended).any()):
        warn_once(
            "attention_mask: it has zeros between ones, and a model without position_ids counts them as positions. Pad "
            "prompts on the left and completions on the right, or pass position_ids = (attention_mask.cumsum(1) - "
            "1).clamp(min=0)"
        )
