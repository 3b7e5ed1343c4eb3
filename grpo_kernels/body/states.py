"""Layers with a state that passes from token to token, along the paths of a prefix tree.

A causal convolution of K taps starts from the last K - 1 tokens of the path before a segment. A
recurrence starts from its parent's final state: segments are cut into *runs* where a child branches
off, and runs with the same number of runs before them on their path (their *depth*) are computed
together. A group of completions has two depths, its prompt and the rest.

    convolution    one call per layer, and one for the first K - 1 tokens of the segments
    recurrence     for each depth, one call for several runs at a time, padded on the right

As for attention, a wrapper replaces each function in its model's file. The wrapper does nothing
without the keyword argument ``segments``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_kernels.base.tensors import cut, places
from grpo_kernels.body.attention import NotAlongPaths, Paths, Segments, wrap_in_files

_CHUNK = 64  # tokens that a recurrence computes at a time, unless its call says otherwise
# Chunks of one run that a device computes in the time of one more call, forward and backward.
# A CPU core computes half a chunk to two (measured with AVX-512 on the gated delta rule, 4 heads of
# size 128 and of size 32). A GPU launches some thirty kernels in 5 us each, and computes a chunk in
# 3 us (estimated).
_CALL_CHUNKS = {"cpu": 1.0}
_CALL_CHUNKS_ON_A_GPU = 50.0
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
_OF_A_CACHE = {
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule"),
    *("recurrent_kimi_delta_attention", "mamba2_selective_state_update"),
}
_KNOWN = {*RECURRENCES, *_OF_A_CACHE, _CONVOLUTION, _WHOLE}


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


def install(trunk: nn.Module) -> None:
    """Make functions of the trunk's layers with a state follow the paths of ``segments``."""
    wrap_in_files(trunk, (*RECURRENCES, _CONVOLUTION, _WHOLE), _along)


def _along(
    segments: Segments, inner: Callable[..., Any], name: str, *args: Any, **kwargs: Any
) -> Any:
    if name == _WHOLE:
        return None
    if name == _CONVOLUTION:
        return _convolve(segments, inner, *args, **kwargs)
    return _recur(segments, inner, RECURRENCES[name], args, kwargs)


@torch.compiler.disable
def _convolve(
    segments: Segments,
    inner: Callable[..., Any],
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


class Runs(NamedTuple):
    """The R runs of a tree, in token order."""

    begins: Tensor  # (R,), first token
    lengths: Tensor  # (R,)
    parents: Tensor  # (R,), previous run on the path; -1 for a root
    depths: Tensor  # (R,), number of previous runs on the path
    is_parent: Tensor  # (R,) bool

    @classmethod
    def of(cls, paths: Paths) -> Runs:
        starts, total = paths.starts, int(paths.new.sum())
        last = paths.tokens.gather(1, (paths.contexts - 1).clamp(min=0)[:, None]).squeeze(1)
        last = torch.where(paths.contexts > 0, last, -1)  # the token before each segment
        begins = torch.cat([starts, last + 1]).unique()
        begins = begins[begins < total]
        before = begins - 1
        before[torch.searchsorted(begins, starts)] = last
        parents = torch.searchsorted(begins, before, right=True) - 1  # -1 for a root
        depths: list[int] = []
        for parent in parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        lengths = torch.cat([begins, torch.tensor([total], device="cpu")]).diff()
        is_parent = torch.isin(torch.arange(len(begins), device="cpu"), parents)
        return cls(begins, lengths, parents, torch.tensor(depths, device="cpu"), is_parent)

    def calls(self, chunk: int, device: torch.device) -> Iterator[list[Tensor]]:
        """Yield the runs of each call of a recurrence, depth by depth.

        Runs of a call are padded to the longest, unless their last state is needed.
        """
        order = self.lengths.argsort(stable=True)
        for depth in range(int(self.depths.amax()) + 1):
            runs = order[self.depths[order] == depth]
            parents, leaves = runs[self.is_parent[runs]], runs[~self.is_parent[runs]]
            lengths = self.lengths[parents]
            chunks = (-(-self.lengths[leaves] // chunk)).tolist()
            parts = [leaves[first:end] for first, end in cut(chunks, _call_chunks(device))]
            yield [*(parents[lengths == x] for x in lengths.unique()), *parts]


def _calls(
    paths: Paths, chunk: int, device: torch.device
) -> tuple[list[list[tuple[Tensor, Tensor, bool]]], Tensor]:
    """A recurrence's calls at each depth, and each token's place among the tokens of all calls.

    A call is (tokens (r, w) of r runs, padded on the right; (r,) places of their parents among the
    last states kept at the previous depth; True if its own last states are kept).
    """
    runs, depths, owned = Runs.of(paths), [], []
    place = torch.full_like(runs.parents, -1)
    for parts in runs.calls(chunk, device):
        calls, kept = [], 0
        for chosen in parts:
            lengths = runs.lengths[chosen, None]
            columns = torch.arange(int(lengths.amax()), device="cpu")
            tokens = runs.begins[chosen, None] + columns.minimum(lengths - 1)
            owned.append((tokens, columns < lengths))
            keeps = bool(runs.is_parent[chosen].any())
            calls.append((tokens, place[runs.parents[chosen]], keeps))
            if keeps:
                place[chosen] = kept + torch.arange(len(chosen), device="cpu")
                kept += len(chosen)
        depths.append(calls)
    return depths, places(owned)


def cost(tokens: Tensor, paths: Paths | None, chunk: int, device: torch.device) -> float:
    """Estimate the time of a forward of `tokens` (b, w), in matrix products of one token."""
    rows, width = tokens.shape
    if paths is None:
        return rows * (width + _SHARE * chunk * -(-width // chunk))
    runs = Runs.of(paths)
    chunks = [
        len(x) * -(-int(runs.lengths[x].amax()) // chunk) + _call_chunks(device)
        for parts in runs.calls(chunk, device)
        for x in parts
    ]
    return _GATHERED * (width + _SHARE * chunk * sum(chunks))


def _call_chunks(device: torch.device) -> float:
    return _CALL_CHUNKS.get(device.type, _CALL_CHUNKS_ON_A_GPU)


@torch.compiler.disable
def _recur(
    segments: Segments,
    inner: Callable[..., Any],
    recurrence: Recurrence,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The recurrence's output (1, n, ...), without a last state."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    like, chunk = given[0], int(given.get("chunk_size", _CHUNK))
    for name, x in given.items():
        is_of_tokens = isinstance(x, Tensor) and x.dim() > 1 and 1 < like.shape[1] == x.shape[1]
        if is_of_tokens and name not in recurrence.of_tokens:
            raise NotAlongPaths(f"a recurrence gets an argument {name!r} that may be of each token")
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
                name: given[name][0].index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
                for name in recurrence.of_tokens
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
