"""The layers of a trunk along the paths of a prefix tree.

A wrapper replaces each function that these layers call: attention in transformers' table, others in
the file of their model. It does nothing without the keyword argument ``segments``. That argument
reaches the layers through the model's ``**kwargs``, so it is also present when activation
checkpointing recomputes a layer after the model's call has ended.

**Attention.** Queries of a segment see the keys of its path, up to themselves. Keys and values are
gathered along the paths, and the model's own implementation computes the rest, with its windows,
soft-caps, sinks, groups of heads and dropout.

    flash          one call per layer, with ``cu_seq_lens_q`` and ``cu_seq_lens_k``
    sdpa on CUDA   `torch.nn.attention.varlen`, one call per layer, in 16 bits, without dropout
    sdpa, eager    one call for several segments at a time (`group`)

**Layers with a state that passes from token to token.** A causal convolution of K taps starts from
the last K - 1 tokens of the path before a segment. A recurrence starts from its parent's final
state: segments are cut into *runs* where a child branches off, and runs with the same number of
runs before them on their path (their *depth*) are computed together. A group of completions has two
depths, its prompt and the rest.

    convolution    one call per layer, and one for the first K - 1 tokens of the segments
    recurrence     for each depth, one call for several runs at a time, padded on the right
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.bias import causal_lower_right
from torch.utils import _pytree as pytree
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_VARLEN_ROWS = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
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
        for first, end in _cut(cells, call_cells):
            part = members[first:end]
            length = paths.lengths[part, None]
            columns = torch.arange(int(length.amax()), device="cpu")
            keys = paths.tokens[part].gather(1, columns.minimum(length - 1))
            calls.append((keys[:, context:], keys))
            own = (columns >= paths.contexts[part, None]) & (columns < length)  # the segments'
            owned.append((keys[:, context:], own[:, context:]))
    return calls, _places(owned)


def _cut(costs: Sequence[float], overhead: float) -> list[tuple[int, int]]:
    """Divide ascending `costs` into parts (first, end) of least total cost.

    A part costs its size times its largest member c, plus `overhead`. `least` and `begin` hold, for
    each end, the least cost up to there and the start of the last part. If this part starts at i,
    the cost is ``least[i] - i * c``, a line in c, plus terms without i. Later starts have steeper
    slopes, and c rises, so a line that is beaten once stays beaten. `lines` holds the starts whose
    lines are not, best first.
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


def _places(calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Find each token's place in the concatenated `calls`, (tokens, bool) each.

    A call owns the tokens where its bool is True; exactly one call owns each token.
    """
    tokens = torch.cat([tokens[own] for tokens, own in calls])
    found = torch.cat([own.flatten() for _, own in calls]).nonzero().squeeze(1)
    return found[tokens.argsort()]


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
        """Compute attention (1, n, heads, d) along the paths with `inner`, called `name`."""
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
            paths, *lengths = self.kept("lengths", self._lengths, device)
            of_rows: dict[str, Any] = dict(zip(_VARLEN_ROWS, lengths, strict=True))
            of_rows |= {"scale": kwargs.get("scaling"), "window_size": (-1, 0)}
            of_rows |= {"enable_gqa": heads != key.shape[1]}
            keys, values = (x.index_select(0, paths) for x in rows[1:])
            of_varlen: Any = torch_varlen.varlen_attn(rows[0], keys, values, **of_rows)
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
    """True if `torch.nn.attention.varlen` may replace `implementation`; a trial decides."""
    return implementation == "sdpa" and device.type == "cuda" and dtype.itemsize == 2


def call_cells(width: int, device: torch.device) -> float:
    """Cells (query times key) that heads of total `width` compute in the time of one more call."""
    # Forward and backward. A CPU core: 120 us at 20 GFLOP/s (measured with AVX2). A GPU: five
    # launches of 5 us at 100 TFLOP/s (estimated).
    operations = 2.5e6 if device.type == "cpu" else 2.5e9
    return operations / (4 * width)


def is_flash(implementation: str) -> bool:
    """True for flash attention, from a package or a kernel repository ("org/kernel")."""
    return "flash" in implementation or "/" in implementation


_CHUNK = 64  # tokens that a recurrence computes at a time, unless its call says otherwise
# A recurrence's time per token, relative to the token's matrix products: 0.15, measured on a CPU
# with 4 heads of size 128 and width 512, and with 16 heads and width 1024. And the factor by which
# gathering tokens lengthens a tree's forward.
_SHARE, _GATHERED = 0.15, 1.08


class Recurrence(NamedTuple):
    """How transformers' layers call a recurrence."""

    of_tokens: tuple[int | str, ...]  # arguments (1, n, ...), by position or name
    first: str  # argument for the initial state
    wants_last: str  # argument that requests the last state


_DELTA_RULE = Recurrence((0, 1, 2, "g", "beta"), "initial_state", "output_final_state")
RECURRENCES = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Recurrence((0, 1, 3, 4), "initial_states", "return_final_states"),
}
_CONVOLUTION = "causal_conv1d_fn"
# This computes a whole Mamba-2 layer. If it returns None, the layer calls the functions above.
_WHOLE = "mamba2_split_conv1d_scan_combined"
_KNOWN = {
    *RECURRENCES,
    *(_CONVOLUTION, _WHOLE),
    # these need a cache, so they do not run
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule"),
    *("recurrent_kimi_delta_attention", "mamba2_selective_state_update"),
}


def with_a_state(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Select the layers that have a state; they are recognized by their convolution."""
    return [x for x in layers if any(isinstance(y, nn.Conv1d) for y in x.children())]


def reason_against(layers: Iterable[nn.Module]) -> str | None:
    """Say why the state of one of `layers` cannot follow paths; None if all can."""
    for layer in with_a_state(layers):
        names = inspect.unwrap(type(layer).forward).__code__.co_names
        file = vars(sys.modules[type(layer).__module__])
        others = [x for x in names if hasattr(file.get(x), "__wrapped__") and x not in _KNOWN]
        if _CONVOLUTION not in names or others:
            what = f" ({', '.join(others)})" if others else ""
            return f"{type(layer).__name__} has a state that is not known along paths{what}"
    return None


@torch.compiler.disable
def _convolve(
    segments: Segments,
    inner: Callable[..., Any],
    _: str,
    states: Tensor,  # (1, c, n)
    weight: Tensor,  # (c, K)
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The output (1, c, n) for the row as given, recomputed where a segment begins."""
    segments.consumed += 1
    taps, found = weight.shape[-1], inner(states, weight, *args, **kwargs)
    tokens, windows = segments.kept(
        ("windows", taps), lambda: _windows(segments.paths, taps), states.device
    )
    if not len(tokens):
        return found
    # the row of zeros at the end stands for tokens before a root
    rows = nn.functional.pad(states.transpose(1, 2)[0], (0, 0, 0, 1))
    anew = inner(rows.index_select(0, windows)[None].transpose(1, 2), weight, *args, **kwargs)
    return found.index_copy(2, tokens, anew[:, :, taps - 1 :: taps])


def _windows(paths: Paths, taps: int) -> tuple[Tensor, Tensor]:
    """(f tokens whose window reaches into another segment, the last `taps` tokens of their paths).

    The second is (f taps,). In it, the index after the last token stands for tokens before a root.
    """
    starts, total = paths.starts, int(paths.new.sum())
    offsets = torch.arange(taps - 1, device="cpu")
    sees = (offsets < paths.new[:, None]) & (starts[:, None] > 0)
    depths = (paths.contexts[:, None] + offsets)[sees]
    of_segment = torch.arange(len(starts), device="cpu")[:, None].expand_as(sees)[sees]
    back = depths[:, None] + torch.arange(1 - taps, 1, device="cpu")
    windows = torch.where(back < 0, total, paths.tokens[of_segment[:, None], back.clamp(min=0)])
    return (starts[:, None] + offsets)[sees], windows.flatten()


def _calls(
    paths: Paths, chunk: int, device: torch.device
) -> tuple[list[list[tuple[Tensor, Tensor, bool]]], Tensor]:
    """A recurrence's calls at each depth, and each token's place among the tokens of all calls.

    A call is (tokens (r, w) of r runs, padded on the right; (r,) places of their parents among the
    last states kept at the previous depth; True if its own last states are kept). Runs of a call
    are padded to the longest, unless their last states are kept.
    """
    starts, total = paths.starts, int(paths.new.sum())
    last = paths.tokens.gather(1, (paths.contexts - 1).clamp(min=0)[:, None]).squeeze(1)
    last = torch.where(paths.contexts > 0, last, -1)  # the token before each segment
    begins = torch.cat([starts, last + 1]).unique()  # first token of each run
    begins = begins[begins < total]
    before = begins - 1
    before[torch.searchsorted(begins, starts)] = last
    parents = torch.searchsorted(begins, before, right=True) - 1  # previous runs; -1 for a root
    depth_of: list[int] = []
    for parent in parents.tolist():
        depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
    depths = torch.tensor(depth_of, device="cpu")
    lengths = torch.cat([begins, torch.tensor([total], device="cpu")]).diff()
    is_parent = torch.isin(torch.arange(len(begins), device="cpu"), parents)
    order, place = lengths.argsort(stable=True), torch.full_like(parents, -1)
    calls_at, owned = [], []
    for depth in range(max(depth_of) + 1):
        runs = order[depths[order] == depth]
        with_children, leaves = runs[is_parent[runs]], runs[~is_parent[runs]]
        chunks = (-(-lengths[leaves] // chunk)).tolist()
        of_parents = lengths[with_children]
        parts = [(with_children[of_parents == x], True) for x in of_parents.unique()]
        parts += [(leaves[first:end], False) for first, end in _cut(chunks, _call_chunks(device))]
        calls, kept = [], 0
        for part, keeps in parts:
            own = lengths[part, None]
            columns = torch.arange(int(own.amax()), device="cpu")
            tokens = begins[part, None] + columns.minimum(own - 1)
            owned.append((tokens, columns < own))
            calls.append((tokens, place[parents[part]], keeps))
            if keeps:
                place[part] = kept + torch.arange(len(part), device="cpu")
                kept += len(part)
        calls_at.append(calls)
    return calls_at, _places(owned)


def cost(tokens: Tensor, paths: Paths | None, chunk: int, device: torch.device) -> float:
    """Estimate the time of a forward of `tokens` (b, w), in matrix products of one token."""
    rows, width = tokens.shape
    if paths is None:
        return rows * (width + _SHARE * chunk * -(-width // chunk))
    shapes = [tokens.shape for calls in _calls(paths, chunk, device)[0] for tokens, _, _ in calls]
    chunks = sum(runs * -(-longest // chunk) + _call_chunks(device) for runs, longest in shapes)
    return _GATHERED * (width + _SHARE * chunk * chunks)


def _call_chunks(device: torch.device) -> float:
    """Chunks of one run that `device` computes in the time of one more call."""
    # Forward and backward. A CPU core computes half a chunk to two (measured with AVX-512 on the
    # gated delta rule, 4 heads of size 128 and of size 32). A GPU launches some thirty kernels in
    # 5 us each, and computes a chunk in 3 us (estimated).
    return 1.0 if device.type == "cpu" else 50.0


@torch.compiler.disable
def _recur(
    segments: Segments, inner: Callable[..., Any], name: str, *args: Any, **kwargs: Any
) -> Any:
    """The recurrence's output (1, n, ...), without a last state."""
    recurrence = RECURRENCES[name]
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    like, chunk = given[0], int(given.get("chunk_size", _CHUNK))
    for key, x in given.items():
        is_of_tokens = isinstance(x, Tensor) and x.dim() > 1 and 1 < like.shape[1] == x.shape[1]
        if is_of_tokens and key not in recurrence.of_tokens:
            raise NotAlongPaths(f"a recurrence gets an argument {key!r} that may be of each token")
    segments.consumed += 1
    segments.chunk = max(segments.chunk, chunk)
    depths, back = segments.kept(
        ("runs", chunk), lambda: _calls(segments.paths, chunk, like.device), like.device
    )
    outputs, states = list[Tensor](), list[Tensor]()
    for calls in depths:
        before, states = torch.cat(states) if states else None, []
        for tokens, parents, keeps in calls:
            own = given | {
                key: given[key][0].index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
                for key in recurrence.of_tokens
            }
            own[recurrence.first] = None if before is None else before.index_select(0, parents)
            own[recurrence.wants_last] = keeps
            placed = [own.pop(i) for i in range(len(args))]
            found = inner(*placed, **own)
            output, last = found if isinstance(found, tuple) else (found, None)
            outputs.append(output.flatten(0, 1))
            if keeps and last is None:
                raise NotAlongPaths("a recurrence gives back no last state")
            if keeps:
                states.append(last)
    whole = torch.cat(outputs).index_select(0, back)[None]
    # The last call keeps no state, so its result has the form that the layer expects: a pair or a
    # tensor.
    return (whole, None) if isinstance(found, tuple) else whole


def follow_paths(trunk: nn.Module, implementation: str) -> None:
    """Patch attention and stateful layers so that they follow the paths in ``segments``.

    Transformers has a table with one function for each implementation of attention. Only "eager"
    attention and the functions of stateful layers are in each model's own file.
    """
    in_files: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(RECURRENCES, _recur),
        _CONVOLUTION: _convolve,
        _WHOLE: lambda *_, **__: None,
        **({_EAGER: Segments.attend} if implementation == "eager" else {}),
    }
    for file in {sys.modules[cls.__module__] for x in trunk.modules() for cls in type(x).__mro__}:
        for name, along in in_files.items():
            inner = vars(file).get(name)
            if inner is not None and not hasattr(inner, "_takes_segments"):
                setattr(file, name, _taking_segments(inner, name, along))
    inner = ALL_ATTENTION_FUNCTIONS.get(implementation, None)
    if implementation != "eager" and inner is not None and not hasattr(inner, "_takes_segments"):
        wrapped = _taking_segments(inner, implementation, Segments.attend)
        AttentionInterface.register(implementation, wrapped)


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
