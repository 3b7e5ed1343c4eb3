"""The trunk of a transformers model, computed where a loss needs it: the seam, the guard, and ranks in step.

The trunk is the transformer below the head, ``model.base_model``. For the length of one scoring call its ``forward`` is
replaced by one that runs a forward with a graph and one without, and returns hidden states (B, L, H) in which the
computed cells are filled in; elsewhere they are 0. The model, its head, its hooks and the wrappers around it stay as
they are, and see one forward.

    cells that the head reads          `needed`, from the completion mask
    sequences that may have gradient   `live`; the others run without graph
    prefixes that several rows share   computed once (`layout`)
    padding                            left out

The guard: if gradient arrives at a cell that was not computed with a graph, the backward raises. So a wrong
`live` raises, and never changes a result. The guard costs one wait for the device in each backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base.checks import is_dtensor, warn_once
from grpo_kernels.base.distributed import all_reduce, group_device
from grpo_kernels.body import layout as layouts
from grpo_kernels.body.forwards import Cells, TrunkInputs, Way, run_layout
from grpo_kernels.body.guard import guard
from grpo_kernels.body.layout import TrunkLayout
from grpo_kernels.body.options import TrunkOptions
from grpo_kernels.body.trial import MODES, Exactness, described
from grpo_kernels.host import Shares, forward_name, replaced
from grpo_kernels.transformers.head import FSDP1, unwrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COMPILED_COLUMNS = 64  # if layers are compiled, widths are multiples of it, so that shapes recur
_NOT_OF_A_LAYOUT = (torch.OutOfMemoryError, _StopRecomputationError)
_Planned = tuple[TrunkLayout, Way]


@contextmanager
def live_trunk(
    model: nn.Module,
    options: TrunkOptions,
    *,
    needed: Tensor,  # (B, L) bool
    live: Tensor | None,  # (B,) bool
    shares: Shares,
) -> Iterator[list[Tensor]]:
    """Inside, the trunk of `model` computes only what `options` ask for of each batch.

    Args:
        needed: (B, L) bool, cells whose hidden states are read. Calls of the model walk through the B sequences in
            order.
        live: (B,) bool, sequences that may get a gradient; None: all.
        shares: where the sequences and tokens of forwards with gradient are counted.

    Yields:
        an empty list, to which each call of the trunk that leaves cells out adds (b, L) bool, True where computed.

    Raises:
        RuntimeError: in the backward, if gradient arrives at a cell that was computed without graph.
    """
    trunk = trunk_of(model)
    reason = _reason_against(model, trunk)
    if reason is not None:
        say_once(trunk, reason)
    if reason is None and (options.layout != "padded" or live is not None):
        name = forward_name(trunk)
        call = _TrunkCall(trunk, getattr(trunk, name), options, needed, live, shares)
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


class _Batch(NamedTuple):
    """Input of the trunk that can be computed in parts."""

    inputs: TrunkInputs
    cells: Cells
    exactness: Exactness
    rows: range  # places of its sequences among those of all calls
    live: Tensor  # (B,) bool


class _Choice(NamedTuple):
    """A layout for a batch."""

    batch: _Batch
    mode: str
    planned: list[_Planned] | None  # its forwards; None: the layout has to be tried first


class _TrunkCall:
    """Stand-in for the forward of a trunk while a batch is scored."""

    def __init__(
        self,
        trunk: nn.Module,
        forward: Callable[..., Any],
        options: TrunkOptions,
        needed: Tensor,
        live: Tensor | None,
        shares: Shares,
    ) -> None:
        self.trunk, self.forward, self.options = trunk, forward, options
        self.needed, self.live, self.shares = needed, live, shares
        self.groups = rank_groups(trunk)
        self.multiple = _COMPILED_COLUMNS if _is_compiled(trunk.modules()) else 1
        self.start = 0  # first sequence of the next call
        self.was_called = False
        self.computed: list[Tensor] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the trunk's output, in one forward with a graph and one without.

        A layout that is not known at this length is tried first, and one that raises gives way to the next. Ranks that
        run the trunk together agree on each step before it: on trials, on forwards, and on whether one has failed.
        """
        self.was_called = True
        given = {
            **dict(zip(inspect.signature(self.forward).parameters, args, strict=False)),
            **kwargs,
        }
        batch, failed, output = self._batch_or_none(given), dict[str, str](), None
        graph = torch.is_grad_enabled()
        while True:
            choice = None if batch is None or output is not None else self._choice(batch, failed)
            tries = choice is not None and choice.planned is None
            planned = choice.planned or [] if choice is not None else []
            without = not graph or any(not layout.graph for layout, _ in planned)
            wanted = [int(tries), int(graph), int(without)] if output is None else [0, 0, 0]
            any_tries, *wanted = most_of_ranks(self.groups, wanted)
            if any_tries:
                with self._in_step(given) as forward:
                    if choice is not None and tries:
                        self._try(choice, forward, failed)
                continue
            if output is not None:
                self._anchors(given, sum(wanted))
            elif choice is None:
                output = self._as_given(given, sum(wanted) - 1)
            else:
                try:
                    output = self._in_parts(choice.batch, planned, wanted)
                except _NOT_OF_A_LAYOUT:
                    raise
                except Exception as error:
                    failed[choice.mode] = described(error)
                    choice.batch.exactness.refuse(choice.mode, failed[choice.mode])
            if not most_of_ranks(self.groups, [int(output is None)])[0]:
                return output

    def _batch_or_none(self, given: dict[str, Any]) -> _Batch | None:
        """Return the inputs `given` by name as a batch; None, after a warning, if they run as they are."""
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
        cells = inputs.on_cpu(self.needed[rows.start : rows.stop].to(inputs.ids.device))
        if inputs.is_packed(cells):
            return "rows hold several sequences (position_ids begin anew), so they run as given"
        live = torch.full((sequences,), torch.is_grad_enabled(), device="cpu")
        if torch.is_grad_enabled() and self.live is not None:
            live = self.live[rows.start : rows.stop].cpu()
        return _Batch(inputs, cells, Exactness(self.trunk, self.forward, inputs, cells), rows, live)

    def _choice(self, batch: _Batch, failed: dict[str, str]) -> _Choice | None:
        """Return the first layout, from that of the options on, that may serve; None: the batch runs as it is given.

        Warn of the reason against the one that was asked for, once that is settled.
        """
        reasons = []
        found: _Choice | None = None
        for mode in MODES[MODES.index(self.options.layout) :]:
            verdict = failed[mode] if mode in failed else batch.exactness.verdict(mode)
            if verdict is None:
                return _Choice(batch, mode, None)
            if isinstance(verdict, Way):
                try:
                    found = _Choice(batch, mode, self._planned(batch, mode, verdict))
                    break
                except Exception as error:
                    verdict = failed[mode] = f"in planning it, {described(error)}"
            reasons.append(verdict)
        if reasons and not batch.cells.padding_is_read:
            instead = (
                f"layout={found.mode!r} serves"
                if found
                else "all sequences run in one padded forward"
            )
            say_once(self.trunk, f"layout={self.options.layout!r}: {reasons[0]}; {instead}")
        return found

    def _planned(self, batch: _Batch, mode: str, way: Way) -> list[_Planned]:
        """Return the layouts of the sequences with and without gradient, those that have something to compute."""
        found = []
        for chosen, graph in ((batch.live, True), (~batch.live, False)):
            rows = batch.cells.rows(
                chosen, padded=mode == "padded", by_column=way.positions == "column"
            )
            if rows is not None:
                layout = layouts.tree if mode == "tree" else layouts.by_rows
                found.append((layout(rows, graph=graph, multiple=self.multiple), way))
        return found

    def _try(self, choice: _Choice, forward: Callable[..., Any], failed: dict[str, str]) -> None:
        try:
            choice.batch.exactness.attempt(choice.mode, forward)
        except torch.OutOfMemoryError:  # of this moment: the next call tries again
            failed[choice.mode] = "no memory is free for its trial"
        except Exception as error:
            failed[choice.mode] = f"in making its trial, {described(error)}"
            choice.batch.exactness.refuse(choice.mode, failed[choice.mode])

    def _as_given(self, given: dict[str, Any], others: int) -> Any:
        """Run the padded forward, and as many `others` as other ranks run."""
        found = self.forward(**given)
        self._anchors(given, others)
        ids: Any = given.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and torch.is_grad_enabled():
            _count(self.shares, len(ids), len(ids), ids.numel(), ids.numel(), ids.numel())
        return found

    @contextmanager
    def _in_step(self, given: dict[str, Any]) -> Iterator[Callable[..., Any]]:
        """Inside, the forward that is yielded may be called any number of times: other ranks run as many."""
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

    def _in_parts(self, batch: _Batch, planned: Sequence[_Planned], wanted: Sequence[int]) -> Any:
        """Return the trunk's output, its hidden states (B, L, H) from `planned`.

        `wanted` are the numbers of forwards with and without a graph; where there is no layout for one, it fills no
        cell.
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
            cells.append(layout.cells.to(hidden.device, non_blocking=True))
            states.append(
                hidden.flatten(0, 1).index_select(
                    0, layout.tokens.to(hidden.device, non_blocking=True)
                )
            )
        hidden, filled = (
            states[0].new_zeros(sequences * length, states[0].shape[-1]),
            torch.cat(cells),
        )
        hidden = hidden.index_copy(0, filled, torch.cat(states)).view(sequences, length, -1)
        is_filled = torch.zeros(sequences * length, dtype=torch.bool, device=hidden.device)
        self.computed.append(is_filled.index_fill(0, filled, True).view(sequences, length))
        if graph:
            computed = [layout.sources.numel() for layout, _ in planned]
            gradient = sum(
                n for n, (layout, _) in zip(computed, planned, strict=True) if layout.graph
            )
            _count(
                self.shares,
                int(batch.live.sum()),
                sequences,
                sequences * length,
                sum(computed),
                gradient,
            )
            guard(hidden, [layout for layout, _ in planned], batch.rows, batch.live)
        return type(output)(**{**output, "last_hidden_state": hidden})


def most_of_ranks(groups: Sequence[ProcessGroup], counts: list[int]) -> list[int]:
    """Return the elementwise largest `counts` of the ranks of `groups`; without any, those of this process."""
    for group in groups:
        counts = all_reduce(torch.tensor(counts, device=group_device(group)), "max", group).tolist()
    return counts


def _count(
    shares: Shares, live: int, sequences: int, positions: int, computed: int, gradient: int
) -> None:
    """Count one call: sequences with gradient, all sequences; padded positions, computed ones, those with graph."""
    shares.add("sequences/gradient", live, sequences)
    shares.add("tokens/computed", computed, positions)
    shares.add("tokens/gradient", gradient, positions)


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the module below the head whose forward the model's own forward calls; `model` may be wrapped."""
    base = unwrapped(model)[1]
    body: nn.Module = base.base_model
    if body is base:  # Llama 4's text model names its trunk "language_model", and has it as "model"
        body = getattr(base, "model", base)
    decoder = getattr(
        body, "decoder", None
    )  # OPT's model calls its decoder, not the body's forward
    return decoder if isinstance(decoder, PreTrainedModel) else body


def ordinary_id(model: nn.Module) -> int:
    """Return an id that stands for a token of text."""

    def numbers(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, x in fields.items():
            yield from numbers(x) if isinstance(x, dict) else [(str(name), x)]

    config: Any = model.config
    special = {
        x for name, x in numbers(config.to_dict()) if name.endswith(("_token_id", "_token_index"))
    }
    return next(x for x in range(len(special) + 1) if x not in special)


def _reason_against(model: nn.Module, trunk: nn.Module) -> str | None:
    """Return None if the forward of `trunk` can be replaced for a call, else the reason why not."""
    wrappers, base = unwrapped(model)
    if trunk is base:
        return "the model names no trunk (base_model)"
    if _is_compiled([*wrappers, base, trunk]):
        return "the whole model is compiled; compile its layers instead (docs/training-step.md)"
    if any(FSDP1 in x._modules for x in (*wrappers, *trunk.modules())):
        return (
            "FSDP1 has divided the model, whose units run one forward each; FSDP2 has no such limit"
        )
    attention = ALL_ATTENTION_FUNCTIONS.get(
        getattr(getattr(trunk, "config", None), "_attn_implementation", ""), None
    )
    replaced_by_ranks = (
        nn.functional.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention
    )
    if replaced_by_ranks or str(getattr(attention, "__module__", "")).startswith("deepspeed"):
        return (
            "attention is not torch's own (context parallel): sequences may be divided over ranks"
        )
    return None


def rank_groups(trunk: nn.Module) -> Sequence[ProcessGroup]:
    """Process groups whose ranks run the trunk together: those over which FSDP2 or ZeRO-3 has divided it."""
    largest: Any = None
    for x in trunk.parameters():
        parameter: Any = x
        if hasattr(parameter, "ds_status"):
            return [parameter.ds_process_group]
        if is_dtensor(parameter) and (
            largest is None or parameter.device_mesh.size() > largest.size()
        ):
            largest = parameter.device_mesh
    return [] if largest is None else [largest.get_group(i) for i in range(largest.ndim)]


def _is_compiled(modules: Iterable[Any]) -> bool:
    """True if one of `modules` was returned by `torch.compile`, or has been compiled in place."""
    return any(
        type(x).__name__ == "OptimizedModule" or getattr(x, "_compiled_call_impl", None) is not None
        for x in modules
    )


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn, once for each kind of model, that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
