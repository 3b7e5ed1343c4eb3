"""Attention along the paths of a prefix tree, over any attention implementation of transformers.

Queries of a segment see the keys of its path, up to themselves. Keys and values are gathered along
the paths, and the model's own implementation computes the rest, with its windows, soft-caps, sinks,
groups of heads and dropout.

    flash          one call per layer, with ``cu_seq_lens_q`` and ``cu_seq_lens_k``
    sdpa on CUDA   `torch.nn.attention.varlen`, one call per layer, in 16 bits, without dropout
    sdpa, eager    one call for several segments at a time (`group`)

A wrapper replaces the implementation in transformers' table, and does nothing without the keyword
argument ``segments``. That argument reaches the attention through the model's ``**kwargs``, so it
is also present when activation checkpointing recomputes a layer after the model's call has ended.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils import _pytree as pytree
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from grpo_kernels.base.tensors import cut, places

# Floating-point operations of attention that a device computes in the time of one more call,
# forward and backward. A CPU core: 120 us at 20 GFLOP/s (measured with AVX2). A GPU: five launches
# of 5 us at 100 TFLOP/s (estimated).
_CALL_FLOPS = {"cpu": 2.5e6}
_CALL_FLOPS_ON_A_GPU = 2.5e9
_VARLEN_ROWS = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
_VARLEN_PARAMETERS = {
    *("query", "key", "value", "scale", "window_size", "enable_gqa", *_VARLEN_ROWS)
}
ENDS, LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_EAGER = "eager_attention_forward"
# Arguments of attention that stay valid along a path: positions (unused here) and sinks.
_OF_PATHS = {"position_ids", "s_aux", "sinks"}


@dataclass(frozen=True)
class Paths:
    """The S segments of a tree in token order. A token sees its path up to itself."""

    tokens: Tensor  # (S, k), tokens of each path, with arbitrary padding on the right
    lengths: Tensor  # (S,), number of tokens in each path
    new: Tensor  # (S,), number of tokens at the end of each path that form the segment

    @property
    def contexts(self) -> Tensor:
        """(S,): number of tokens before each segment on its path."""
        return self.lengths - self.new

    @property
    def starts(self) -> Tensor:
        """(S,): each segment's first token."""
        return self.new.cumsum(0) - self.new


class NotAlongPaths(Exception):
    """A model passes something to its attention that cannot follow the paths of a tree."""


def group(paths: Paths, call_cells: float) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The cheapest calls that cover all segments, and each token's place in their queries.

    A causal call with all queries of n paths of at most k tokens computes n k^2 / 2 cells (query
    times key). With only the last q queries of each path, a call needs a mask and computes n q k
    cells; all its paths have the same number of tokens before the q. So a segment is computed with
    its whole path if its context is not longer than the segment. Each call costs `call_cells` more.

    A call is (queries (n, q), keys (n, k)): tokens of the layout, padded on the right.
    """
    contexts = torch.where(paths.contexts <= paths.new, 0, paths.contexts)
    order = paths.lengths.argsort(stable=True)
    calls, owned = [], []
    for context in contexts.unique().tolist():
        members = order[contexts[order] == context]
        lengths = paths.lengths[members].tolist()
        cells = [k * k / 2 if context == 0 else (k - context) * k for k in lengths]
        for first, end in cut(cells, call_cells):
            part = members[first:end]
            length = paths.lengths[part, None]
            columns = torch.arange(int(length.amax()), device="cpu")
            keys = paths.tokens[part].gather(1, columns.minimum(length - 1))
            calls.append((keys[:, context:], keys))
            own = (columns >= paths.contexts[part, None]) & (columns < length)  # the segments'
            owned.append((keys[:, context:], own[:, context:]))
    return calls, places(owned)


class Segments:
    """Value of the keyword argument ``segments``: the paths of one forward's tokens.

    With `varlen`, `torch.nn.attention.varlen` computes attention without dropout and without a
    window shorter than a path.
    """

    def __init__(self, paths: Paths, *, varlen: bool) -> None:
        self.paths, self.varlen = paths, varlen
        self.consumed = 0  # calls along the paths so far, of attention and of layers with a state
        self.chunk = 0  # tokens that a recurrence computes at a time; 0: none called yet
        self._kept: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], Any], device: torch.device) -> Any:
        """The result of `make`, with tensors moved to `device`; computed once for all layers."""
        if (key, device) not in self._kept:
            moved = functools.partial(torch.Tensor.to, device=device, non_blocking=True)
            self._kept[key, device] = pytree.tree_map_only(Tensor, moved, make())
        return self._kept[key, device]

    @torch.compiler.disable
    def attend(
        self,
        inner: Callable[..., Any],
        name: str,
        module: nn.Module,
        query: Tensor,  # (1, heads, n, d), like key and value
        key: Tensor,
        value: Tensor,
        attention_mask: Any,  # some layers pass it by this name
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention (1, n, heads, d) along the paths, using `inner`, named `name`."""
        _, heads, tokens, size = query.shape
        if not isinstance(attention_mask, Tensor) or (attention_mask.numel() != 1 and tokens > 1):
            is_tensor = isinstance(attention_mask, Tensor)
            found = tuple(attention_mask.shape) if is_tensor else attention_mask
            raise NotAlongPaths(f"its attention has a mask of its own ({found})")
        for argument, x in [*enumerate(args), *kwargs.items()]:
            is_number = x is None or isinstance(x, bool | int | float | str)
            is_of_heads = isinstance(x, Tensor) and tokens not in x.shape
            if not (is_number or is_of_heads or argument in _OF_PATHS):
                raise NotAlongPaths(
                    f"its attention gets an argument {argument!r} that may be of each token"
                )
        self.consumed += 1
        window, device = kwargs.get("sliding_window"), query.device
        longest = int(self.paths.lengths.amax())
        is_plain = not args and not kwargs.get("dropout") and (window or longest) >= longest
        if is_flash(name):
            paths, *lengths = self.kept("lengths", self._lengths, device)
            named = dict(zip((*ENDS, *LONGEST), lengths, strict=True))
            along = [x.index_select(2, paths) for x in (key, value)]
            return inner(module, query, *along, None, *args, **{**kwargs, **named})[0], None
        rows = [x.transpose(1, 2)[0] for x in (query, key, value)]
        if self.varlen and is_plain:
            from torch.nn.attention.varlen import varlen_attn

            paths, *lengths = self.kept("lengths", self._lengths, device)
            of_rows: dict[str, Any] = dict(zip(_VARLEN_ROWS, lengths, strict=True))
            of_rows |= {"scale": kwargs.get("scaling"), "window_size": (-1, 0)}
            of_rows |= {"enable_gqa": heads != key.shape[1]}
            keys, values = (x.index_select(0, paths) for x in rows[1:])
            of_varlen: Any = varlen_attn(rows[0], keys, values, **of_rows)
            return of_varlen[None], None
        groups, back = self.kept(
            "groups", lambda: group(self.paths, call_cells(heads * size, device)), device
        )
        results = []
        for queries, keys in groups:
            parts = [
                x.index_select(0, i.reshape(-1)).unflatten(0, i.shape)
                for x, i in zip(rows, (queries, keys, keys), strict=True)
            ]
            own_mask = self._mask(queries.shape[1], keys.shape[1], window, parts[0], name)
            output = inner(module, *(x.transpose(1, 2) for x in parts), own_mask, *args, **kwargs)
            results.append(output[0].flatten(0, 1))
        return torch.cat(results).index_select(0, back)[None], None

    def _lengths(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """(all paths concatenated, segment ends, path ends, longest segment, longest path)."""
        counts = torch.stack([self.paths.new, self.paths.lengths])
        of_segments, of_paths = nn.functional.pad(counts.cumsum(1), (1, 0)).to(torch.int32)
        columns = torch.arange(self.paths.tokens.shape[1], device="cpu")
        paths = self.paths.tokens[columns < self.paths.lengths[:, None]]
        new, length = counts.amax(1).tolist()
        return paths, of_segments, of_paths, new, length

    def _mask(self, queries: int, keys: int, window: int | None, like: Tensor, name: str) -> Any:
        """Mask for the last `queries` of `keys` tokens; None means plain causal attention."""
        cut = keys if window is None else min(window, keys)
        if name != _EAGER and cut == keys:
            if queries in (1, keys):  # a single query sees all keys
                return None
            if like.is_cuda:
                return causal_lower_right(queries, keys)

        def make() -> Tensor:  # in the dtype of the hidden states, shared by all layers
            columns = torch.arange(keys, device=like.device)
            ahead = columns[keys - queries :, None] - columns
            blank = torch.zeros(1, 1, queries, keys, dtype=like.dtype, device=like.device)
            return blank.masked_fill((ahead < 0) | (ahead >= cut), torch.finfo(like.dtype).min)

        return self.kept((queries, keys, cut, like.dtype), make, like.device)


def has_varlen(implementation: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True if `torch.nn.attention.varlen` can replace `implementation`.

    It needs sdpa, CUDA, a 16-bit dtype and the parameters that this module passes.
    """
    if implementation != "sdpa" or device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {*inspect.signature(varlen_attn).parameters} >= _VARLEN_PARAMETERS


def call_cells(width: int, device: torch.device) -> float:
    """Cells (query times key) that heads of total `width` compute in the time of one more call."""
    return _CALL_FLOPS.get(device.type, _CALL_FLOPS_ON_A_GPU) / (4 * width)


def is_flash(implementation: str) -> bool:
    """True for flash attention, from a package or a kernel repository ("org/kernel")."""
    return "flash" in implementation or "/" in implementation


def install(implementation: str, trunk: nn.Module) -> None:
    """Make the attention `implementation` follow the paths of ``segments``.

    Transformers' table has one function per implementation. The exception is "eager", a function in
    the file of each model.
    """
    if implementation == "eager":
        wrap_in_files(trunk, [_EAGER], Segments.attend)
        return
    inner = ALL_ATTENTION_FUNCTIONS.get(implementation, None)
    if inner is not None and not hasattr(inner, "_takes_segments"):
        wrapped = _taking_segments(inner, implementation, Segments.attend)
        AttentionInterface.register(implementation, wrapped)


def wrap_in_files(trunk: nn.Module, names: Iterable[str], along: Callable[..., Any]) -> None:
    """Make functions `names` in the files of the trunk's modules accept ``segments``."""
    for file in {sys.modules[cls.__module__] for x in trunk.modules() for cls in type(x).__mro__}:
        for name in names:
            inner = vars(file).get(name)
            if inner is not None and not hasattr(inner, "_takes_segments"):
                setattr(file, name, _taking_segments(inner, name, along))


def _taking_segments(
    inner: Callable[..., Any], name: str, along: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap `inner` to call `along`(segments, inner, name, ...) if it is passed ``segments``."""

    @functools.wraps(inner)
    def function(*args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        if segments is None:
            return inner(*args, **kwargs)
        return along(segments, inner, name, *args, **kwargs)

    function._takes_segments = True  # type: ignore[attr-defined]
    return function
