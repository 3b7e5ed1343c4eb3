"""Attention along the paths of a prefix tree, over any attention implementation of transformers.

The queries of a segment see the keys of its path, up to themselves: keys and values are gathered
along the paths, and the model's own implementation computes the rest, with its windows, soft-caps,
sinks, groups of heads and dropout.

    flash          one call a layer, with ``cu_seq_lens_q`` and ``cu_seq_lens_k``
    sdpa on CUDA   `torch.nn.attention.varlen`, one call a layer, in 16 bits and without dropout
    sdpa, eager    a call for several segments at a time (`group`)

The wrapper stands in transformers' table in place of the implementation, and does nothing without
the keyword argument ``segments``. That argument reaches the attention through the model's
``**kwargs``: so it is there again where activation checkpointing recomputes a layer, after the call
of the model has ended.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils import _pytree as pytree
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from grpo_kernels.body.layout import Paths

# Floating-point operations of attention in the time that one more call takes, forward and backward:
# 120 us at 20 GFLOP/s on a CPU core (measured, AVX2); on a GPU five launches of 5 us at 100 TFLOP/s
# (reckoned).
_CALL_FLOPS = {"cpu": 2.5e6}
_CALL_FLOPS_ON_A_GPU = 2.5e9
_VARLEN_PARAMETERS = {
    *("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
    *("scale", "window_size", "enable_gqa"),
}
_EAGER = "eager_attention_forward"
# Arguments of attention that hold along a path: positions, which no function reads here, and sinks.
_OF_PATHS = {"position_ids", "s_aux", "sinks"}


class NotAlongPaths(Exception):
    """What a model hands its attention that cannot be carried along the paths of a tree."""


def group(paths: Paths, call_cells: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Divide the segments of `paths` into calls of least cost.

    A call of n paths of at most k tokens computes n k^2 / 2 cells (query times key) if all queries
    of the paths are in it, causal. With the last q queries of each path alone it computes n q k,
    since it needs a mask; there as many tokens lie before the q in all of them. So a segment is in
    a whole call where its context is its shorter part. Each call costs `call_cells` besides.

    Returns:
        of each call (queries (n, q), keys (n, k), own (n, q) bool): tokens of the layout, padded on
        the right, and the queries whose results are read, the segments'.
    """
    contexts = torch.where(paths.contexts <= paths.new, 0, paths.contexts)
    order = paths.lengths.argsort(stable=True)
    found = []
    for context in contexts.unique().tolist():
        members = order[contexts[order] == context]
        lengths = paths.lengths[members].tolist()
        cells = [k * k / 2 if context == 0 else (k - context) * k for k in lengths]
        for first, end in cut(cells, call_cells):
            part = members[first:end]
            length = paths.lengths[part, None]
            columns = torch.arange(int(length.amax()), device="cpu")
            keys = paths.tokens[part].gather(1, columns.minimum(length - 1))
            own = (columns >= paths.contexts[part, None]) & (columns < length)
            found.append((keys[:, context:], keys, own[:, context:]))
    return found


def cut(costs: Sequence[float], overhead: float) -> list[tuple[int, int]]:
    """Divide ascending `costs` into parts (first, end) of least cost.

    A part costs its size times its largest member, and `overhead`. A dynamic programme over where
    the last part begins: with the largest member c of a part that begins at `first`, the cost is a
    line in c, ``least[first] - first * c``. Slopes fall and c rises, so that a line once beaten
    stays beaten: `lines` holds the others, the best one first.
    """
    least, begin, lines = [0.0], [0], deque[int]()

    def crossing(one: int, other: int) -> float:
        return (least[other] - least[one]) / (other - one)

    for end, cost in enumerate(costs, start=1):
        new = end - 1
        while len(lines) > 1 and crossing(lines[-1], new) <= crossing(lines[-2], lines[-1]):
            lines.pop()
        lines.append(new)
        while len(lines) > 1 and crossing(lines[0], lines[1]) < cost:
            lines.popleft()
        begin.append(lines[0])
        least.append(least[lines[0]] + (end - lines[0]) * cost + overhead)
    parts, end = [], len(costs)
    while end > 0:
        parts.append((begin[end], end))
        end = begin[end]
    return parts[::-1]


class Segments:
    """Value of the keyword argument ``segments``: the paths of one forward's tokens.

    Attributes:
        consumed: number of calls of attention and of layers with a state that have gone along the
            paths so far.
        chunk: tokens that a recurrence computes at a time; 0: none has been called.
    """

    def __init__(self, paths: Paths, *, varlen: bool) -> None:
        """`varlen`: True to take `torch.nn.attention.varlen` where it serves."""
        self.paths, self.varlen = paths, varlen
        self.consumed = self.chunk = 0
        self._kept: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], Any], device: torch.device) -> Any:
        """What `make` returns, with its tensors on `device`, made once for all layers."""
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
        states: Sequence[Tensor],  # query, key and value (1, heads, n, d)
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention's output (1, n, heads, d)."""
        tokens = states[0].shape[2]
        if not isinstance(mask, Tensor) or (mask.numel() != 1 and tokens > 1):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else mask
            raise NotAlongPaths(f"its attention has a mask of its own ({shape})")
        for key, x in [*enumerate(args), *kwargs.items()]:
            is_number = x is None or isinstance(x, bool | int | float | str)
            is_of_heads = isinstance(x, Tensor) and tokens not in x.shape
            if not (is_number or is_of_heads or key in _OF_PATHS):
                raise NotAlongPaths(
                    f"its attention gets an argument {key!r} that may be of each token"
                )
        window = kwargs.get("sliding_window")
        self.consumed += 1
        if is_flash(name):
            query, key, value = states
            paths, *lengths = self._lengths(query.device)
            names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
            named = dict(zip(names, lengths, strict=True))
            along = [x.index_select(2, paths) for x in (key, value)]
            return inner(module, query, *along, None, *args, **{**kwargs, **named})[0], None
        if self.varlen and not args and self._fits_varlen(window, kwargs):
            return self._by_varlen(states, kwargs.get("scaling")), None
        rows = [x.transpose(1, 2)[0] for x in states]
        groups, back = self._groups(rows[0])
        results = []
        for queries, keys in groups:
            parts = [
                x.index_select(0, i.reshape(-1)).unflatten(0, i.shape)
                for x, i in zip(rows, (queries, keys, keys), strict=True)
            ]
            mask = self._mask(queries.shape[1], keys.shape[1], window, parts[0], name)
            output = inner(module, *(x.transpose(1, 2) for x in parts), mask, *args, **kwargs)[0]
            results.append(output.flatten(0, 1))
        return torch.cat(results).index_select(0, back)[None], None

    def _groups(self, query: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """(queries and keys of each call; of each token its place among all calls' queries).

        `query` (n, heads, d) is of the first layer that asks.
        """

        def make() -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
            groups = group(self.paths, call_cells(query.shape[1] * query.shape[2], query.device))
            back, used = torch.empty(int(self.paths.new.sum()), dtype=torch.int64, device="cpu"), 0
            for queries, _, own in groups:
                back[queries[own]] = used + own.reshape(-1).nonzero().squeeze(1)
                used += own.numel()
            return [(queries, keys) for queries, keys, _ in groups], back

        found: tuple[list[tuple[Tensor, Tensor]], Tensor] = self.kept("groups", make, query.device)
        return found

    def _lengths(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """(all paths one after the other; ends of segments and of paths; the longest of each)."""

        def make() -> tuple[Tensor, Tensor, Tensor, int, int]:
            counts = torch.stack([self.paths.new, self.paths.lengths])
            of_segments, of_paths = nn.functional.pad(counts.cumsum(1), (1, 0)).to(torch.int32)
            columns = torch.arange(self.paths.tokens.shape[1], device="cpu")
            paths = self.paths.tokens[columns < self.paths.lengths[:, None]]
            most = counts.amax(1).tolist()
            return paths, of_segments, of_paths, most[0], most[1]

        found: tuple[Tensor, Tensor, Tensor, int, int] = self.kept("lengths", make, device)
        return found

    def _mask(self, queries: int, keys: int, window: int | None, like: Tensor, name: str) -> Any:
        """The mask of the last `queries` of `keys` tokens; None: plain causal attention."""
        cuts = window is not None and window < keys
        if name != "eager" and not cuts:
            if queries in (1, keys):  # a single query sees all keys
                return None
            if like.is_cuda:
                return causal_lower_right(queries, keys)
        key = queries, keys, window if cuts else None, like.dtype, like.device
        if key not in self._kept:  # in the states' dtype: all layers share it, and none converts it
            columns = torch.arange(keys, device=like.device)
            ahead = columns[keys - queries :, None] - columns
            seen = (ahead >= 0) & (ahead < window) if cuts and window is not None else ahead >= 0
            blank = torch.zeros(1, 1, queries, keys, dtype=like.dtype, device=like.device)
            self._kept[key] = blank.masked_fill(~seen, torch.finfo(like.dtype).min)
        return self._kept[key]

    def _fits_varlen(self, window: int | None, kwargs: dict[str, Any]) -> bool:
        longest = int(self.paths.lengths.amax())
        return not kwargs.get("dropout") and (window or longest) >= longest

    def _by_varlen(self, states: Sequence[Tensor], scale: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (x.transpose(1, 2)[0] for x in states)
        paths, *lengths = self._lengths(query.device)
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        named: dict[str, Any] = dict(zip(names, lengths, strict=True))
        named |= {"scale": scale, "window_size": (-1, 0)}
        named |= {"enable_gqa": query.shape[1] != key.shape[1]}
        output: Any = varlen_attn(
            query, key.index_select(0, paths), value.index_select(0, paths), **named
        )
        return output[None]


def has_varlen(implementation: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True if `torch.nn.attention.varlen` may serve: on CUDA, in 16 bits, as we know it."""
    if implementation != "sdpa" or device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {*inspect.signature(varlen_attn).parameters} >= _VARLEN_PARAMETERS


def call_cells(width: int, device: torch.device) -> float:
    """Cells (query times key, all heads) that `device` computes in the time of one more call.

    `width` is the size of all heads of a token.
    """
    return _CALL_FLOPS.get(device.type, _CALL_FLOPS_ON_A_GPU) / (4 * width)


def is_flash(implementation: str) -> bool:
    """Flash attention, of a package or of a kernel repository ("kernels-community/...")."""
    return "flash" in implementation or "/" in implementation


def install(implementation: str, trunk: nn.Module) -> None:
    """Wrap the attention `implementation` for ``segments``, unless it is wrapped.

    Transformers' table has one function for each implementation, except "eager": that is a function
    in the file of each model.
    """
    if implementation != "eager":
        inner = ALL_ATTENTION_FUNCTIONS.get(implementation, None)
        if inner is not None and not hasattr(inner, "_takes_segments"):
            AttentionInterface.register(implementation, _wrapped(inner, implementation))
        return
    for file in {sys.modules[cls.__module__] for x in trunk.modules() for cls in type(x).__mro__}:
        inner = vars(file).get(_EAGER)
        if inner is not None and not hasattr(inner, "_takes_segments"):
            setattr(file, _EAGER, _wrapped(inner, implementation))


def _wrapped(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(inner)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> Any:
        states = query, key, value
        if segments is None:
            return inner(module, *states, attention_mask, *args, **kwargs)
        return segments.attend(inner, name, module, states, attention_mask, *args, **kwargs)

    attention._takes_segments = True  # type: ignore[attr-defined]
    return attention
