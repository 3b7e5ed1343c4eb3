"""Kept sets in one flat list: the ids that a truncating sampler kept at each position.

Such a sampler is top-k, top-p or min-p.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor

from grpo_kernels.base import OnMissingSet
from grpo_kernels.base.checks import (
    check_choice,
    check_shape,
    check_signed_ids,
    check_tensor,
    hints_names,
)

_INT32 = torch.iinfo(torch.int32)


@hints_names
@dataclass(frozen=True, eq=False)
class KeptIds:
    """Kept sets of N positions: the ids that a truncating sampler (top-k, top-p, min-p) kept there.

    The set of position i is ``ids[offsets[i] : offsets[i + 1]]`` (CSR). Position i is entry i of
    ``completion_ids.flatten()``, masked entries included. Within a position, the order does not
    matter, a repeated id counts once, and -1 is padding. A position without ids has no set.

    Args:
        ids: (M,) signed integers of 16, 32 or 64 bits.
        offsets: (N + 1,) int32 or int64, non-decreasing from 0 to M.
    """

    ids: Tensor
    offsets: Tensor

    @staticmethod
    @hints_names
    def from_rows(rows: Sequence[Sequence[Any]], completion_mask: Tensor) -> KeptIds:
        """Build the sets from lists of kept ids, as vLLM and SGLang return them.

        vLLM returns these lists in ``output.sampling_mask.token_ids``, and SGLang in
        ``meta_info["output_token_sampling_mask"]``.

        Args:
            rows: one list per sequence. For each sampled token, this list contains a list, tensor
                or array of ids, or None if there is no set.
            completion_mask: (B, T), bool or number, non-zero at the sampled tokens, in the same
                order as in `rows`. Other positions get no set.

        Raises:
            TypeError, ValueError: a wrong argument, or a number of lists that differs from the
                number of sequences or tokens; the message names the argument.
        """
        _check_lists(rows)
        wanted = f"(B, T) with B = {len(rows)}, as rows"
        check_tensor("completion_mask", completion_mask, (wanted, (len(rows), None)))
        sampled = completion_mask.detach().cpu() != 0
        for i, (lists, wanted) in enumerate(zip(rows, sampled.sum(dim=1).tolist(), strict=True)):
            if len(lists) != wanted:
                raise ValueError(
                    f"rows: expected {wanted} lists of ids for sequence {i}, one for each unmasked "
                    f"position, got {len(lists)}"
                )
        ids, of_each = joined_ids("rows", itertools.chain.from_iterable(rows))
        counts = torch.zeros(completion_mask.shape, dtype=torch.int64)
        counts[sampled] = of_each
        return KeptIds.from_counts(ids, counts).to(completion_mask.device)

    @staticmethod
    @hints_names
    def from_logprobs(
        rows: Sequence[Sequence[Mapping[int, Any] | None]], completion_mask: Tensor
    ) -> KeptIds:
        """Build the sets from vLLM's log-probabilities (``output.logprobs``): all ids above -inf.

        The sets are complete if the sampler keeps at most k ids and returns k log-probabilities. To
        get this, sample with ``SamplingParams(top_k=k, logprobs=k)`` and start the engine with
        ``max_logprobs=k`` and ``logprobs_mode="processed_logprobs"``.

        Args:
            rows: one list per sequence. For each sampled token, this list contains a mapping from
                ids to log-probabilities (numbers or vLLM's ``Logprob``), or None if there is no
                set.
            completion_mask: as in `from_rows`.

        Raises:
            TypeError, ValueError: as in `from_rows`.
        """

        _check_lists(rows)

        def kept(token: Any) -> list[int] | None:
            if token is None:
                return None
            if not isinstance(token, Mapping):
                raise TypeError(
                    "rows: expected, for each sequence, a list of mappings from ids to "
                    f"log-probabilities, got {type(token).__name__} in one"
                )
            numbers: dict[int, Any] = {i: getattr(x, "logprob", x) for i, x in token.items()}
            return [i for i, x in numbers.items() if x > -math.inf]

        return KeptIds.from_rows([[kept(token) for token in row] for row in rows], completion_mask)

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor) -> KeptIds:
        """Build the sets from one list of all ids and the number of ids at each position.

        prime-rl and SkyRL return this form.

        Args:
            ids: (M,) signed integers, one position after the other.
            counts: (...) integers, shaped like the call's `completion_ids`; 0 means no set.
        """
        check_tensor("counts", counts, like=ids)
        if counts.is_floating_point() or counts.dtype == torch.bool:
            raise TypeError(f"counts: expected integers, got {counts.dtype}")
        return KeptIds(ids, torch.nn.functional.pad(counts.detach().reshape(-1).cumsum(0), (1, 0)))

    @staticmethod
    def from_padded(kept: Tensor) -> KeptIds:
        """Build the sets from a tensor (..., K), padded with -1 anywhere, without a copy."""
        check_signed_ids("kept", kept, like=kept)
        if kept.dim() == 0:
            raise ValueError("kept: expected shape (..., K), got ()")
        bounds = torch.arange(kept.shape[:-1].numel() + 1, device=kept.device) * kept.shape[-1]
        return KeptIds(kept.reshape(-1), bounds)

    def at(self, positions: Tensor) -> KeptIds:
        """Select the sets at `positions`, (n,) int64, where -1 means no set.

        The host waits for the device.
        """
        inside = positions.clamp(min=0)
        counts = self.offsets.diff()[inside].masked_fill(positions < 0, 0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        moved = torch.repeat_interleave(self.offsets[inside] - offsets[:-1], counts)
        place = torch.arange(int(offsets[-1]), device=positions.device)
        return KeptIds(self.ids[place + moved], offsets)

    def to(self, device: Any) -> KeptIds:
        """Copy the sets to `device`."""
        return KeptIds(self.ids.to(device), self.offsets.to(device))


def _check_lists(rows: Any) -> None:
    """Require a list with a list for each sequence."""
    for x in (rows, *(rows if hasattr(rows, "__len__") else ())):
        if not hasattr(x, "__len__"):
            got = type(x).__name__
            raise TypeError(f"rows: expected a list with a list for each sequence, got {got}")


def joined_ids(name: str, lists: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Concatenate the ids of all `lists` (M,), in int32 if they fit; and count the ids of each.

    Args:
        lists: lists of integers, tensors (k,) or arrays (k,); None has no id.

    Raises:
        TypeError: an id is not an integer; the message calls the lists `name`.
    """
    rows = [[] if x is None else x.tolist() if hasattr(x, "tolist") else x for x in lists]
    alone = next((x for x in rows if not hasattr(x, "__len__")), None)
    if alone is not None:
        raise TypeError(f"{name}: expected a list of ids for each token, got {alone!r} as one")
    flat = [*itertools.chain.from_iterable(rows)]
    wrong = next((x for x in flat if isinstance(x, bool) or not isinstance(x, Integral)), None)
    if wrong is not None:
        raise TypeError(f"{name}: expected lists of integer ids, got one with {wrong!r}")
    ids = torch.tensor([int(x) for x in flat], dtype=torch.int64)
    fits = not len(ids) or (ids.max() <= _INT32.max and ids.min() >= _INT32.min)
    return ids.int() if fits else ids, torch.tensor([len(x) for x in rows], dtype=torch.int64)


def read_kept_ids(kept_ids: Any, ids: Tensor, on_missing_set: Any) -> KeptIds:
    """Check the sets of the positions of `ids` (...); convert bounds to int64 and detach the ids.

    Raises:
        TypeError, ValueError: `kept_ids` is neither a tensor (..., K) nor `KeptIds`, or does not
            fit the ids; or `on_missing_set` is not one of its choices, or not "error" without sets.
    """
    if kept_ids is None:
        raise ValueError(f"on_missing_set: expected kept_ids with {on_missing_set!r}, got none")
    check_choice("on_missing_set", on_missing_set, get_args(OnMissingSet))
    if not isinstance(kept_ids, KeptIds):
        if isinstance(kept_ids, list):
            raise TypeError("kept_ids: expected a tensor, got list; pass KeptIds.from_rows(...)")
        if getattr(kept_ids, "dtype", None) == torch.bool:
            hint = "pass KeptIds.from_counts(kept_ids.nonzero()[:, -1], kept_ids.sum(-1))"
            raise TypeError(f"kept_ids: expected ids, got torch.bool; {hint}")
        check_signed_ids("kept_ids", kept_ids, ids)
        width = kept_ids.shape[-1] if kept_ids.dim() else 0
        check_shape("kept_ids", kept_ids, ("(*completion_ids.shape, K)", (*ids.shape, width)))
        return KeptIds.from_padded(kept_ids.detach())
    kept, offsets = kept_ids.ids, kept_ids.offsets
    check_signed_ids("kept_ids.ids", kept, ids)
    check_shape("kept_ids.ids", kept, ("(M,)", (kept.numel(),)))
    check_tensor("kept_ids.offsets", offsets, like=ids)
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"kept_ids.offsets: expected int32 or int64, got {offsets.dtype}")
    check_shape("kept_ids.offsets", offsets, ("(N + 1,), N positions", (ids.numel() + 1,)))
    wrong = (offsets[0] != 0) | (offsets[-1] != kept.numel()) | (offsets.diff() < 0).any()
    if bool(wrong):  # waits for the device: wrong offsets would read other memory
        raise ValueError(
            f"kept_ids.offsets: expected non-decreasing numbers from 0 to M = {kept.numel()}, got "
            f"numbers from {offsets[0].item()} to {offsets[-1].item()}"
        )
    return KeptIds(kept.detach(), offsets.detach().long())
