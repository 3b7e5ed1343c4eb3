"""Find out if a layout reproduces a model's padded forward, and how to call the model for it.

A layout that the config or the layers rule out is refused with a reason (`_reason_by_structure`).
Any other is tried on first use, on two or three rows made of the batch's own tokens, as long as its
longest row. The trial compares the layout with the padded forward: hidden states, and gradients of
the small trainable parameters (norms, biases, adapters) for a random cotangent. If FSDP2 or ZeRO-3
shards the parameters, only hidden states are compared. The model runs as a `guest`, in the mode of
the call (train or eval) with dropout off, so the trial leaves no trace in it. `Exactness` keeps the
verdicts.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from grpo_kernels.base import BatchLayout
from grpo_kernels.base.modes import evaluating, facts_of, guest, random_state
from grpo_kernels.body import paths
from grpo_kernels.body.layout import (
    TrunkInputs,
    Way,
    attention_of,
    dtype_of,
    filled,
    run_layout,
    setting,
    takes,
    text_config,
)
from grpo_kernels.head_module import adapters_of, foreign_hook, rank_groups

_logger = logging.getLogger(__name__)

# A layout's error may reach _ROUNDING times the measured rounding error or the dtype's eps,
# whichever is larger. Errors above both _MOST and 16 times the dtype's eps are not rounding.
_ROUNDING, _MOST = 4, 1e-2
_MORE_COLUMNS = 5  # columns of padding added in the forward that measures rounding
_SMALL = 2**17  # largest number of elements of a parameter whose gradient is compared
_OF_LENGTH = {"dynamic", "longrope"}  # kinds of RoPE whose frequencies depend on the last position
_KEPT = 32  # sets of facts kept per model
_IN_A_ROW = 8  # consecutive calls with new facts, after which nothing is tried any more


# trunk -> facts -> layout -> verdict, oldest first; trunk -> consecutive calls with new facts
_verdicts: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[str, Verdict]]] = (
    weakref.WeakKeyDictionary()
)
_new_in_a_row: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
# trunk -> facts -> `joins_sequences`
_joins: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Verdict:
    """How a layout is exact for sequences and batches up to `size`, and why not for others."""

    way: Way | None = None
    size: tuple[int, int] = (0, 0)
    reason: str | None = None


class Exactness:
    """Decides in which layouts `trunk` reproduces the padded forward of one batch.

    A verdict holds for sequences up to the compared length, because some features of models start
    late: sparse attention, windows, frequencies of positions. A longer batch is tried again. A
    verdict also ends when a fact that it depends on changes (`_facts`).
    """

    def __init__(self, trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs) -> None:
        self.trunk, self.forward, self.inputs = trunk, forward, inputs
        known, facts = _verdicts.setdefault(trunk, {}), _facts(trunk, forward, inputs)
        _new_in_a_row[trunk] = 0 if facts in known else _new_in_a_row.get(trunk, 0) + 1
        self._verdicts = known.setdefault(facts, {})
        if len(known) > _KEPT:
            del known[next(iter(known))]
        if _new_in_a_row[trunk] > _IN_A_ROW:
            reason = "facts that its results depend on change in each call"
            self._verdicts = dict.fromkeys(get_args(BatchLayout), Verdict(reason=reason))

    def known(self, mode: str) -> Way | str | None:
        """How layout `mode` is exact for this batch, or why it is not; None if not tried yet."""
        reason = self._reason_by_tokens() if mode == "tree" else None
        if reason is not None:
            return reason
        if mode not in self._verdicts:
            reason = _reason_by_structure(mode, self.trunk, self.forward)
            self._verdicts[mode] = Verdict(reason=reason)
        verdict, size = self._verdicts[mode], self.inputs.size
        if size[0] <= 0 and verdict.reason is None:
            return Way(mode)  # no cell is read, so none is computed
        fits = all(one <= other for one, other in zip(size, verdict.size, strict=True))
        return verdict.way if verdict.way is not None and fits else verdict.reason

    def way(self, mode: str, forward: Callable[..., Any]) -> Way | str:
        """Like `known`, but try the layout with `forward` if there is no verdict yet."""
        try:
            found = self.known(mode)
            return self._tried(mode, forward) if found is None else found
        except torch.OutOfMemoryError:  # temporary: the next call tries again
            return "there is not enough free memory to try it"
        except Exception as error:
            return self.refuse(mode, f"in preparing its trial, {described(error)}")

    def refuse(self, mode: str, reason: str) -> str:
        self._verdicts[mode] = Verdict(reason=reason)
        return reason

    def _reason_by_tokens(self) -> str | None:
        """Say why the batch's own tokens rule out a tree; None if they do not."""
        attended, needed = self.inputs.attended, self.inputs.needed
        begun, goes_on = attended.cumsum(1) > 0, needed.flip(1).cumsum(1).flip(1) > 0
        if (begun & goes_on & ~attended).any():
            if isinstance(setting(self.trunk, "sliding_window"), int):
                return "a sequence has padding inside, which its sliding window counts"
            if paths.with_a_state(self.trunk.modules()):
                return "a sequence has padding inside, which its layers with a state count"
        for name in self.inputs.values.keys() - {"input_ids", "position_ids"}:
            if len(self.inputs.values[name][attended].unique()) > 1:
                return f"{name} differ between tokens, and may control what tokens see"
        return None

    def _tried(self, mode: str, forward: Callable[..., Any]) -> Way | str:
        """Try layout `mode` on a batch that its verdict does not cover.

        If the layout was exact for a smaller batch, the trial compares at twice that size if the
        batch has enough tokens, to save later trials.
        """
        inputs, last, reason = self.inputs, self._verdicts[mode], ""
        own = inputs.size
        sizes = [own]
        if last.way is not None:
            rows, most = len(inputs.needed), setting(self.trunk, "max_position_embeddings")
            tokens = inputs.needed.numel() // min(3, max(2, rows))
            headroom = max(tokens, 5 * own[1] // 4)
            columns = max(min(2 * last.size[1], most or headroom, headroom), own[1])
            sizes.insert(0, (max(min(2 * last.size[0], columns), own[0]), columns))
        for size in dict.fromkeys(sizes):
            begin = time.perf_counter()
            try:
                with torch.inference_mode(False):  # a graph cannot save inference tensors
                    found = _Trial(self.trunk, forward, inputs, size).outcome(mode)
            except torch.OutOfMemoryError:
                if size == own:
                    raise
                continue
            result = "exact" if isinstance(found, Way) else found
            text = "%s: layout %r tried on sequences of %d tokens in %d columns: %s (%.2f s)"
            seconds = time.perf_counter() - begin
            _logger.info(text, type(self.trunk).__name__, mode, *size, result, seconds)
            if isinstance(found, Way):
                self._verdicts[mode] = Verdict(found, size)
                return found
            reason = found
        self._verdicts[mode] = replace(last, reason=reason)
        return reason


def fits_trees(trunk: nn.Module) -> bool | None:
    """True if `trunk` was exact in a tree in every trial; None if a tree was never tried."""
    found = [x["tree"] for x in _verdicts.get(trunk, {}).values() if "tree" in x]
    tried = [x.way is not None for x in found if x.way is not None or x.reason is not None]
    return all(tried) if tried else None


def _facts(trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs) -> Any:
    """Everything that a verdict depends on, as comparable values."""
    device, adapters = inputs.given["input_ids"].device, [adapters_of(x) for x in trunk.modules()]
    names, constants = tuple(sorted(inputs.given)), tuple(sorted(inputs.constants.items()))
    call = names, constants, device, dtype_of(trunk, device), foreign_hook(trunk), repr(adapters)
    return call, repr(vars(text_config(trunk))), attention_of(trunk), facts_of(trunk, forward)


def joins_sequences(trunk: nn.Module, forward: Callable[..., Any], given: dict[str, Any]) -> bool:
    """True if sequences of packed rows, run as `given`, see those before them in the row.

    The first call runs two small batches that differ in the first of two sequences.
    """
    ids, rows = given["input_ids"], min(2, len(given["input_ids"]))
    known, facts = _joins.setdefault(trunk, {}), (attention_of(trunk), rows, str(ids.device))
    if facts not in known and foreign_hook(trunk) is None:
        one = ids.reshape(-1)[:1]
        other = ids[ids != one][:1]
        last, zeros = ids.reshape(-1)[-4:], torch.zeros(4 - min(4, ids.numel())).to(ids)
        named: dict[str, Any] = {"position_ids": torch.arange(4, device=ids.device).repeat(rows, 2)}
        if takes(forward, "use_cache"):
            named["use_cache"] = False
        states = []
        for token in (one, other) if len(other) else ():
            row = torch.cat([token.expand(4), last, zeros]).expand(rows, 8)
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                guest(trunk, ids.device),
                evaluating(trunk),
            ):
                states.append(forward(input_ids=row, **named).last_hidden_state[:, 4:])
        eps = torch.finfo(dtype_of(trunk, ids.device)).eps
        known[facts] = bool(states) and bool(_distance(*states) > 0.1 * eps**0.5)
    return known.get(facts, False)


def described(error: Exception) -> str:
    """Describe `error` for a warning, in one short line."""
    if isinstance(error, paths.NotAlongPaths):
        return str(error)
    return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _reason_by_structure(mode: str, trunk: nn.Module, forward: Callable[..., Any]) -> str | None:
    """Say why hooks, config, layers or adapters rule out layout `mode`; None if they do not."""
    hook = foreign_hook(trunk)
    if hook is not None:
        return f"the hook {hook} would get columns other than those of the batch"
    modules = [*trunk.modules()]
    if any("alora" in variant.lower() for module in modules for _, variant in adapters_of(module)):
        return "aLoRA begins at columns of the padded batch"
    kinds = {*_rope_types(setting(trunk, "rope_parameters"))} & _OF_LENGTH
    if mode != "padded" and kinds:
        return f"RoPE of the kind {kinds.pop()!r} depends on the longest position of a forward"
    if mode != "padded" and any(hasattr(x, "neftune_noise_alpha") for x in modules):
        return "NEFTune's noise depends on the number of columns"
    if mode != "tree":
        return None
    if isinstance(setting(trunk, "attention_chunk_size"), int):
        return "attention in chunks of columns"
    # encoders of images and sound, to leave out
    others = [x for x in modules if "text" not in getattr(x, "input_modalities", "text")]
    elsewhere = {y for x in others for y in x.modules()}
    reason = paths.reason_against([x for x in modules if x not in elsewhere])
    if reason is not None:
        return reason
    if not _takes_positions(trunk, forward) or not takes(forward, "segments"):
        return "its forward takes no position_ids, or no extra arguments for its attention"
    return None


class _Found(NamedTuple):
    hidden: Tensor  # (n, H), in needed cells
    gradient: Tensor  # (m,), of the small parameters
    changed: dict[str, Tensor]  # buffers changed in place
    way: Way
    is_random: bool


class _Trial:
    """Run two or three rows of a batch's tokens in a layout and in the padded forward.

    The rows have padding on one or both sides. The second row begins like the first; the third has
    nothing in common with them.
    """

    def __init__(self, trunk: Any, forward: Any, like: TrunkInputs, size: tuple[int, int]) -> None:
        self.trunk, self.forward = trunk, forward
        self.device = like.given["input_ids"].device
        self.dtype = dtype_of(trunk, self.device)
        self.is_divided = bool(rank_groups(trunk))
        small = [x for x in trunk.parameters() if x.requires_grad and x.numel() <= _SMALL]
        self.parameters, self.evaluates = [] if self.is_divided else small, False
        length, width = size  # tokens of the first row, columns
        every = torch.ones(len(like.needed), dtype=torch.bool, device="cpu")
        rows = like.layout(Way("trim"), every)
        count = len(rows.sources)
        longest_first = rows.attended.sum(1).argsort(descending=True, stable=True)
        pool = rows.sources[longest_first][rows.attended[longest_first]]
        cyclic, half = torch.arange(length, device="cpu") % len(pool), -(-length // 2)
        first, other = pool[cyclic], pool.roll(-(len(pool) // 2))[cyclic]
        second = torch.cat([first[:half], other[half : half + -(-length // 8)]])
        tokens = [first, second, other[:half].flip(0)][: 3 if count > 2 else 2]
        # if the batch has one sequence, its padded forward has one row too
        self.of_padded = [[0], [1]] if count == 1 else [[*range(len(tokens))]]
        most = setting(trunk, "max_position_embeddings") or length + 2
        width = max(width, length + 2 if length + 2 <= most else length)
        begins = [(width - length) // 2] * 2 + [width - half]
        # padding gets ids of ordinary tokens, since a model may detect padding by id
        sources = pool[torch.arange(width, device="cpu") % len(pool)].repeat(len(tokens), 1)
        mask, needed = torch.zeros(2, *sources.shape, dtype=torch.bool, device="cpu")
        for i, (begin, own) in enumerate(zip(begins, tokens, strict=False)):
            end = begin + len(own)
            sources[i, begin:end], mask[i, begin:end] = own, True
            needed[i, begin : max(end - 1, begin + 1)] = True
        self.by_depth = (mask.cumsum(1) - 1)[needed].argsort().to(self.device)
        sources, mask = sources.to(self.device), mask.to(self.device)
        given = {name: x.reshape(-1)[sources] for name, x in like.given.items()}
        if "position_ids" in given:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        self.needed = needed.to(self.device)
        self.inputs = TrunkInputs.of(given, mask.long(), like.constants, self.needed)

    def outcome(self, mode: str) -> Way | str:
        """How layout `mode` is exact for these rows, or the reason against it."""
        together = 2 if mode == "tree" else 1
        parts = [[*range(together)], [*range(together, len(self.needed))]]
        want, reason = self._run(Way("padded"), self.of_padded), None
        if want.is_random:  # even without dropout, so both forwards run in evaluation mode
            self.evaluates = True
            want = self._run(Way("padded"), self.of_padded)
        for way in self._ways(mode):
            try:
                got = self._run(way, [x for x in parts if x])
                reason = self._against(got, want)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                reason = f"in its trial, {described(error)}"
            if reason is None:
                return got.way
        return reason or ""

    def _ways(self, mode: str) -> list[Way]:
        """Ways to call the model for layout `mode`, best first."""
        found, is_given = [Way(mode)], "position_ids" in self.inputs.given
        if mode != "padded" and not is_given and _takes_positions(self.trunk, self.forward):
            found = [Way(mode, "column"), Way(mode, "depth"), *(found if mode == "trim" else [])]
        fits = paths.has_varlen(attention_of(self.trunk), self.device, self.dtype)
        return [replace(way, varlen=True) for way in found if mode == "tree" and fits] + found

    def _against(self, got: _Found, want: _Found) -> str | None:
        """Say why `got` differs from `want`, which is padded; None if it does not."""
        if got.way.mode == "tree" and not got.way.layers:
            return "its attention is not looked up in transformers' table, so it sees no segments"
        for name in {*want.changed, *got.changed}:
            one, other = want.changed.get(name), got.changed.get(name)
            if one is None or other is None or not torch.allclose(one, other, equal_nan=True):
                return f"each forward changes a state ({name})"
        # rounding errors grow with the root of the depth, and gradients have twice those of states
        eps = torch.finfo(self.dtype).eps
        depth = max(1.0, (setting(self.trunk, "num_hidden_layers") or 1) / 8)
        floor, most = max(_ROUNDING * eps * depth**0.5, 1e-5), max(_MOST, 16 * eps)
        off, names = self._off(got, want), ("hidden states", "gradients")
        if off[0] <= min(floor, most) and off[1] <= min(2 * floor, most):
            return None
        columns = self.needed.shape[1] + _MORE_COLUMNS
        rounding = self._off(self._run(Way("padded"), self.of_padded, columns), want)
        for i, name in enumerate(names):
            allowed = min(max((i + 1) * floor, _ROUNDING * rounding[i]), most)
            if not off[i] <= allowed:
                return f"{name} are off by {off[i]:.1g} of the norm of the padded forward's"
        return None

    def _off(self, got: _Found, want: _Found) -> tuple[float, float]:
        """Relative errors of hidden states (worst of eight depth ranges) and of gradients."""
        ranges = self.by_depth.tensor_split(min(8, len(self.by_depth)))
        states = torch.stack([_distance(got.hidden[x], want.hidden[x]) for x in ranges])
        return states.amax().item(), _distance(got.gradient, want.gradient).item()

    def _run(self, way: Way, parts: list[list[int]], width: int = 0) -> _Found:
        hidden, gradient = torch.zeros((), device=self.device), torch.zeros(1, device=self.device)
        with (
            torch.compiler.set_stance("force_eager"),  # do not compile for the trial's shapes
            torch.set_grad_enabled(not self.is_divided),
            guest(self.trunk, self.device, self.parameters) as leaves,
        ):
            if self.evaluates:
                self.trunk.eval()
            before, found = random_state(self.device), way
            versions = {name: x._version for name, x in self.trunk.named_buffers()}
            for part in parts:
                chosen = torch.zeros(len(self.needed), dtype=torch.bool, device="cpu")
                chosen[part] = True
                layout = self.inputs.layout(way, chosen, width=width)
                output, found = run_layout(self.trunk, self.forward, self.inputs, layout, way)
                read = filled([(layout, output)], self.needed.shape)
                read = read[self.needed.to(read.device)]  # 0 in the rows of other parts
                hidden = hidden + read.detach().to(self.device)
                if leaves and read.requires_grad:
                    draw = torch.Generator("cpu").manual_seed(0)
                    cotangent = torch.randn(read.shape, generator=draw, device="cpu").to(read)
                    of_leaves = torch.autograd.grad(read, leaves, cotangent, materialize_grads=True)
                    flat = [x.flatten().float().to(self.device) for x in of_leaves]
                    gradient = gradient + torch.cat(flat)
                del output, read  # frees this part's graph before the next part makes one
            is_random = not torch.equal(before, random_state(self.device))
            buffers = self.trunk.named_buffers()
            changed = {name: x for name, x in buffers if x._version > versions.get(name, 2**63)}
        return _Found(hidden, gradient, changed, found, is_random)


def _distance(got: Tensor, want: Tensor) -> Tensor:
    return (got - want).double().norm() / want.double().norm().clamp(min=1e-30)


def _takes_positions(trunk: Any, forward: Callable[..., Any]) -> bool:
    """True if `forward`, or the decoder that it calls, accepts position_ids."""
    forwards = forward, type(trunk.get_decoder()).forward
    return any("position_ids" in inspect.signature(x).parameters for x in forwards)


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the kinds of RoPE in a config's ``rope_parameters``, which may be nested by layer."""
    for name, x in parameters.items() if isinstance(parameters, dict) else ():
        yield from [x] if name == "rope_type" else _rope_types(x)
