"""The trunk of a transformers model, computed where a loss needs it: the seam, and ranks in step.

The trunk is the transformer below the head, ``model.base_model``. For the length of one scoring
call its ``forward`` is replaced by one that runs a forward with a graph and one without, and
returns hidden states (B, L, H) in which the computed cells are filled in; elsewhere they are 0. The
model, its head, its hooks and the wrappers around it stay as they are, and see one forward.

    cells that the head reads          `needed`, from the completion mask
    sequences that may have gradient   `live`; the others run without graph
    prefixes that several rows share   computed once (`layout`)
    padding                            left out

If gradient arrives at a cell that was not computed with a graph, the backward raises (`_guard`). So
a wrong `live` raises, and never changes a result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BatchLayout
from grpo_kernels.base.distributed import most_of_ranks, rank_groups
from grpo_kernels.body import layout as layouts
from grpo_kernels.body import states
from grpo_kernels.body.forwards import TrunkInputs, Way, run_layout
from grpo_kernels.body.layout import TrunkLayout
from grpo_kernels.body.trial import MODES, Exactness, described
from grpo_kernels.patching import Shares, forward_name, replaced

FSDP1 = "_fsdp_wrapped_module"  # the child of a FullyShardedDataParallel
# Names under which wrappers hold the model: torch.compile, Lightning's Fabric, FSDP1, DDP, PEFT
_WRAPPED = (
    *("_orig_mod", "_forward_module", FSDP1, "module"),
    *("base_model", "model", "pretrained_model"),
)
_COMPILED_COLUMNS = 64  # if layers are compiled, widths are multiples of it, so that shapes recur
_WHOLE = "all sequences run in one padded forward"
_NOT_OF_A_LAYOUT = (torch.OutOfMemoryError, _StopRecomputationError)
_Planned = list[tuple[TrunkLayout, Way]]  # the forwards of a batch


@contextmanager
def live_trunk(
    model: nn.Module,
    layout: BatchLayout,
    live: Tensor | None,  # (B,) bool
    *,
    needed: Tensor,  # (B, L) bool
    shares: Shares,
) -> Iterator[list[Tensor]]:
    """Inside, the trunk of `model` computes only what is read of each batch.

    Args:
        layout: the first of the layouts that may serve.
        live: (B,) bool, sequences that may get a gradient; None: all.
        needed: (B, L) bool, cells whose hidden states are read. Calls of the model walk through the
            B sequences in order.
        shares: where the sequences and tokens of forwards with gradient are counted.

    Yields:
        an empty list, to which each call of the trunk that leaves cells out adds (b, L) bool, True
        where computed.
    """
    trunk = trunk_of(model)
    reason = _reason_against(model, trunk)
    if reason is not None:
        say_once(trunk, reason)
    if reason is None and (layout != "padded" or live is not None):
        name = forward_name(trunk)
        call = _TrunkCall(trunk, getattr(trunk, name), layout, needed, live, shares)
        with replaced(trunk, name, call.run):
            yield call.computed
        if call.was_called:
            return
        say_once(trunk, "the model's forward does not call its trunk")
    else:
        yield []
    if torch.is_grad_enabled():
        _count(shares, len(needed), len(needed), *[needed.numel()] * 3)


@contextmanager
def as_it_is(trunk: nn.Module) -> Iterator[None]:
    """Inside, `trunk` runs its own forward, also within `live_trunk`."""
    name = forward_name(trunk)
    call = getattr(getattr(trunk, name), "__self__", None)
    with replaced(trunk, name, call.forward) if isinstance(call, _TrunkCall) else nullcontext():
        yield


@dataclass
class _Batch:
    """Input of the trunk that can be computed in parts."""

    inputs: TrunkInputs
    exactness: Exactness
    rows: range  # places of its sequences among those of all calls
    live: Tensor  # (B,) bool
    is_packed: bool  # a row may hold several sequences
    failed: dict[str, str] = field(default_factory=dict)  # layout -> why, in this call

    def refuse(self, mode: str, reason: str) -> None:
        self.failed[mode] = reason
        self.exactness.refuse(mode, reason)


class _TrunkCall:
    """Stand-in for the forward of a trunk while a batch is scored."""

    def __init__(
        self,
        trunk: nn.Module,
        forward: Callable[..., Any],
        layout: BatchLayout,
        needed: Tensor,
        live: Tensor | None,
        shares: Shares,
    ) -> None:
        self.trunk, self.forward, self.layout = trunk, forward, layout
        self.needed, self.live, self.shares = needed, live, shares
        self.groups = rank_groups(trunk)
        self.multiple = _COMPILED_COLUMNS if _is_compiled(trunk.modules()) else 1
        self.start = 0  # first sequence of the next call
        self.was_called = False
        self.computed: list[Tensor] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the trunk's output, in one forward with a graph and one without.

        A layout that is not known at this length is tried first, and one that raises gives way to
        the next. Ranks that run the trunk together agree on each step before it: on trials, on
        forwards, and on whether one has failed.
        """
        self.was_called = True
        positional = zip(inspect.signature(self.forward).parameters, args, strict=False)
        given = {**dict(positional), **kwargs}
        batch, output, graph = self._batch_or_none(given), None, torch.is_grad_enabled()
        while True:
            mode, planned = None, None
            if batch is not None and output is None:
                mode, planned = self._choice(batch)
            tries = mode is not None and planned is None
            without = not graph or any(not layout.graph for layout, _ in planned or ())
            wanted = [int(tries), int(graph), int(without)] if output is None else [0, 0, 0]
            any_tries, *wanted = most_of_ranks(self.groups, wanted)
            if any_tries:
                with self._in_step(given) as forward:
                    if batch is not None and mode is not None and tries:
                        self._try(batch, mode, forward)
                continue
            if output is not None:
                self._anchors(given, sum(wanted))
            elif batch is None or mode is None:
                output = self._as_given(given, sum(wanted) - 1)
            else:
                try:
                    output = self._in_parts(batch, planned or [], wanted)
                except _NOT_OF_A_LAYOUT:
                    raise
                except Exception as error:
                    batch.refuse(mode, described(error))
            if not most_of_ranks(self.groups, [int(output is None)])[0]:
                return output

    def _batch_or_none(self, given: dict[str, Any]) -> _Batch | None:
        """The inputs `given` by name as a batch; None, after a warning, if they run as they are."""
        try:
            found = self._batch(given)
        except Exception as error:  # such as a body without a config
            found = f"in reading its inputs, {described(error)}"
        if not isinstance(found, str):
            return found
        say_once(self.trunk, found)
        self.start = len(self.needed)  # the places of further calls are not known
        return None

    def _batch(self, given: dict[str, Any]) -> _Batch | str | None:
        inputs = TrunkInputs.of(self.trunk, given)
        if isinstance(inputs, str):
            return inputs
        sequences, length = inputs.ids.shape
        rows = range(self.start, self.start + sequences)
        self.start = rows.stop
        if rows.stop > self.needed.shape[0] or length != self.needed.shape[1]:
            return None
        found = inputs.on_cpu(self.needed[rows.start : rows.stop].to(inputs.ids.device))
        cells = inputs.apart(self.trunk, found)
        if isinstance(cells, str):
            return cells
        live = torch.full((sequences,), torch.is_grad_enabled(), device="cpu")
        if torch.is_grad_enabled() and self.live is not None:
            live = self.live[rows.start : rows.stop].cpu()
        exactness = Exactness(self.trunk, self.forward, inputs, cells)
        return _Batch(inputs, exactness, rows, live, cells is not found)

    def _choice(self, batch: _Batch) -> tuple[str | None, _Planned | None]:
        """The first layout that may serve, from that of the options on, and its forwards.

        No layout: the batch runs as it is given. No forwards: the layout has to be tried first. The
        reason against the layout that was asked for is said, once it is settled.
        """
        reasons, mode, planned = [], None, None
        modes = MODES[MODES.index(self.layout) :]
        for mode in modes[: modes.count("tree")] if batch.is_packed else modes:
            verdict = batch.failed.get(mode) or batch.exactness.verdict(mode)
            if verdict is None:
                return mode, None
            if isinstance(verdict, Way):
                try:
                    planned = self._planned(batch, mode, verdict)
                    if not self._loses_to_trim(batch, verdict, planned):
                        break
                    planned = None
                    continue
                except Exception as error:
                    verdict = batch.failed[mode] = f"in planning it, {described(error)}"
            reasons.append(verdict)
        if reasons and not batch.exactness.cells.padding_is_read:
            serves = f"layout={mode!r} serves"
            whole = "packed rows run as given" if batch.is_packed else _WHOLE
            instead = serves if planned is not None else whole
            say_once(self.trunk, f"layout={self.layout!r}: {reasons[0]}; {instead}")
        return (mode, planned) if planned is not None else (None, None)

    def _planned(self, batch: _Batch, mode: str, way: Way) -> _Planned:
        """Layouts of the sequences with and without gradient that have something to compute."""
        found, options = [], {"padded": mode == "padded", "by_column": way.positions == "column"}
        cells = batch.exactness.cells
        live = batch.live[cells.places[:, 0] // batch.inputs.ids.shape[1]]
        for chosen, graph in ((live, True), (~live, False)):
            rows = cells.rows(chosen, **options)
            if rows is not None and mode == "tree":
                least = max(1, way.chunk // 2)
                layout = layouts.tree(rows, graph=graph, multiple=self.multiple, least=least)
                found.append((layout, way))
            elif rows is not None:
                found.append((layouts.by_rows(rows, graph=graph, multiple=self.multiple), way))
        return found

    def _loses_to_trim(self, batch: _Batch, way: Way, planned: _Planned) -> bool:
        """True if recurrences make the tree `planned` slower than rows, which are exact too."""
        device, trees = batch.inputs.ids.device, [x for x, _ in planned if x.paths is not None]
        others = batch.failed.get("trim") or batch.exactness.verdict("trim")
        if batch.is_packed or not (way.chunk and trees) or isinstance(others, str):
            return False
        rows = [layout for layout, _ in self._planned(batch, "trim", way)]
        one, other = (sum(states.cost(x, way.chunk, device) for x in y) for y in (trees, rows))
        return one > other

    def _try(self, batch: _Batch, mode: str, forward: Callable[..., Any]) -> None:
        try:
            batch.exactness.attempt(mode, forward)
        except torch.OutOfMemoryError:  # of this moment: the next call tries again
            batch.failed[mode] = "no memory is free for its trial"
        except Exception as error:
            batch.refuse(mode, f"in making its trial, {described(error)}")

    def _as_given(self, given: dict[str, Any], others: int) -> Any:
        """Run the padded forward, and as many `others` as other ranks run."""
        found = self.forward(**given)
        self._anchors(given, others)
        ids: Any = given.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and torch.is_grad_enabled():
            _count(self.shares, len(ids), len(ids), *[ids.numel()] * 3)
        return found

    @contextmanager
    def _in_step(self, given: dict[str, Any]) -> Iterator[Callable[..., Any]]:
        """Inside, call the yielded forward any number of times: other ranks run as many."""
        if not self.groups:
            yield self.forward
            return

        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            most_of_ranks(self.groups, [1])
            try:
                return self.forward(*args, **kwargs)
            except Exception:
                self._anchors(given, 1)  # the others are within theirs
                raise

        yield forward
        while most_of_ranks(self.groups, [0])[0]:
            self._anchors(given, 1)

    @torch.no_grad()
    def _anchors(self, given: dict[str, Any], count: int) -> None:
        """Run `count` forwards of two tokens, so that ranks stay in step."""
        like = next(x for x in given.values() if isinstance(x, Tensor))
        for _ in range(count):
            self.forward(input_ids=torch.full((1, 2), ordinary_id(self.trunk), device=like.device))

    def _in_parts(self, batch: _Batch, planned: _Planned, wanted: Sequence[int]) -> Any:
        """The trunk's output, its hidden states (B, L, H) from `planned`.

        `wanted` are the numbers of forwards with and without a graph; where there is no layout for
        one, it fills no cell.
        """
        sequences, length = batch.inputs.ids.shape
        graph, cells, states = torch.is_grad_enabled(), [], []
        output: Any = None
        by_graph = {layout.graph: (layout, way) for layout, way in planned}
        anchors = {x: (layouts.anchor(graph=x), Way("none")) for x in (True, False)}
        planned = [
            by_graph.get(x, anchors[x]) for x, n in zip((True, False), wanted, strict=True) if n
        ]
        for i, (layout, way) in enumerate(planned):
            try:
                with torch.set_grad_enabled(graph and layout.graph):
                    output, _ = run_layout(self.trunk, self.forward, batch.inputs, layout, way)
            except Exception:
                if self.groups:  # the others run this one and those after it
                    self._anchors({"input_ids": batch.inputs.ids}, len(planned) - i)
                raise
            hidden = output.last_hidden_state
            tokens = layout.tokens.to(hidden.device, non_blocking=True)
            cells.append(layout.cells.to(hidden.device, non_blocking=True))
            states.append(hidden.flatten(0, 1).index_select(0, tokens))
        hidden = states[0].new_zeros(sequences * length, states[0].shape[-1])
        filled = torch.cat(cells)
        hidden = hidden.index_copy(0, filled, torch.cat(states)).view(sequences, length, -1)
        is_filled = torch.zeros(sequences * length, dtype=torch.bool, device=hidden.device)
        self.computed.append(is_filled.index_fill(0, filled, True).view(sequences, length))
        if graph:
            made = [(layout.sources.numel(), layout.graph) for layout, _ in planned]
            computed = sum(n for n, _ in made)
            gradient = sum(n for n, has_graph in made if has_graph)
            live = int(batch.live.sum())
            _count(self.shares, live, sequences, sequences * length, computed, gradient)
            _guard(hidden, [layout for layout, _ in planned], batch.rows, batch.live)
        return type(output)(**{**output, "last_hidden_state": hidden})


def _guard(
    hidden: Tensor,  # (B, L, H)
    planned: Sequence[TrunkLayout],
    rows: range,
    live: Tensor,  # (B,) bool
) -> None:
    """Have the backward raise if gradient arrives at a cell of `hidden` without a graph.

    It costs one wait for the device in each backward. `rows` are the sequences' numbers.
    """
    if not hidden.requires_grad:
        return
    has_graph = torch.zeros(hidden.shape[0] * hidden.shape[1], dtype=torch.bool, device="cpu")
    for layout in planned:
        if layout.graph:
            has_graph[layout.cells] = True
    without = (~has_graph).nonzero().squeeze(1)
    if not len(without):
        return
    length = hidden.shape[1]
    without_here = without.to(hidden.device, non_blocking=True)

    def look(gradient: Tensor) -> None:
        at_cells = gradient.reshape(-1, gradient.shape[-1]).index_select(0, without_here)
        reached = at_cells.count_nonzero(dim=1)
        if not bool(reached.any()):
            return
        local = (without[reached.nonzero().squeeze(1).cpu()] // length).unique()
        dead = [rows[i] for i in local.tolist() if not live[i]]
        if dead:
            raise RuntimeError(
                f"zero_advantage: expected no gradient for the sequences {dead}, which ran without "
                "graph, got one: the loss has a term that is not known here; pass "
                "zero_advantage='train'"
            )
        raise RuntimeError(
            "layout: expected gradient at completion tokens alone, got one elsewhere in the "
            f"sequences {[rows[i] for i in local.tolist()]}; pass layout='padded'"
        )

    hidden.register_hook(look)


def _count(
    shares: Shares, live: int, sequences: int, positions: int, computed: int, gradient: int
) -> None:
    """Of the padded `positions` of a call `computed` ran, `gradient` of them with a graph."""
    shares.add("sequences/gradient", live, sequences)
    shares.add("tokens/computed", computed, positions)
    shares.add("tokens/gradient", gradient, positions)


def unwrapped(model: nn.Module) -> tuple[list[nn.Module], PreTrainedModel]:
    """(the wrappers around the transformers model, from the outside in; that model)."""
    wrappers, inner = [], model
    while not isinstance(inner, PreTrainedModel):
        children = inner._modules if isinstance(inner, nn.Module) else {}
        found = next((children[name] for name in _WRAPPED if children.get(name) is not None), None)
        if found is None:
            raise TypeError(
                f"model: expected a transformers model, wrapped or not, got {type(model).__name__}"
            )
        wrappers.append(inner)
        inner = found
    return wrappers, inner


def trunk_of(model: nn.Module) -> nn.Module:
    """The module below the head whose forward the model's own calls; `model` may be wrapped."""
    base = unwrapped(model)[1]
    body: nn.Module = base.base_model
    if body is base:  # Llama 4's text model names its trunk "language_model", and has it as "model"
        body = getattr(base, "model", base)
    decoder = getattr(body, "decoder", None)  # OPT's model calls it, not the body's forward
    return decoder if isinstance(decoder, PreTrainedModel) else body


def ordinary_id(model: nn.Module) -> int:
    """An id that stands for a token of text."""

    def numbers(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, x in fields.items():
            yield from numbers(x) if isinstance(x, dict) else [(str(name), x)]

    config: Any = model.config
    named = numbers(config.to_dict())
    special = {x for name, x in named if name.endswith(("_token_id", "_token_index"))}
    return next(x for x in range(len(special) + 1) if x not in special)


def _reason_against(model: nn.Module, trunk: nn.Module) -> str | None:
    """None if the forward of `trunk` can be replaced for a call, else the reason why not."""
    wrappers, base = unwrapped(model)
    if trunk is base:
        return "the model names no trunk (base_model)"
    if _is_compiled([*wrappers, base, trunk]):
        return "the whole model is compiled; compile its layers instead (docs/training-step.md)"
    if any(FSDP1 in x._modules for x in (*wrappers, *trunk.modules())):
        return (
            "FSDP1 has divided the model, whose units run one forward each; FSDP2 has no such limit"
        )
    name = getattr(getattr(trunk, "config", None), "_attn_implementation", "")
    attention = ALL_ATTENTION_FUNCTIONS.get(name, None)
    is_deepspeeds = str(getattr(attention, "__module__", "")).startswith("deepspeed")
    torchs_own = torch._C._nn.scaled_dot_product_attention
    if is_deepspeeds or nn.functional.scaled_dot_product_attention is not torchs_own:
        return (
            "attention is not torch's own (context parallel): sequences may be divided over ranks"
        )
    return None


def _is_compiled(modules: Iterable[Any]) -> bool:
    """True if `torch.compile` has returned one of `modules`, or compiled it in place."""
    return any(
        type(x).__name__ == "OptimizedModule" or getattr(x, "_compiled_call_impl", None) is not None
        for x in modules
    )


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn, once for each kind of model, that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
