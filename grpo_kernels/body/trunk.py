"""The trunk of a model in one call: one forward with a graph and one without, and ranks in step.

The trunk is the transformer below the head, ``model.base_model``. For the length of one scoring
call its ``forward`` is replaced by `TrunkCall.run`; the model, its head, its hooks and the wrappers
around it stay as they are, and see one forward. It returns hidden states (B, L, H) in which the
computed cells are filled in; elsewhere they are 0.

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BatchLayout
from grpo_kernels.base.distributed import most_of_ranks, rank_groups
from grpo_kernels.body import states
from grpo_kernels.body.layout import (
    TrunkInputs,
    TrunkLayout,
    Way,
    by_rows,
    filled,
    read_inputs,
    run_layout,
)
from grpo_kernels.body.trial import MODES, Exactness, described
from grpo_kernels.patching import Shares, forward_name, replaced

FSDP1 = "_fsdp_wrapped_module"  # the child of a FullyShardedDataParallel
# Names under which wrappers hold the model: torch.compile, Lightning's Fabric, FSDP1, DDP, PEFT
_WRAPPED = (
    *("_orig_mod", "_forward_module", FSDP1, "module"),
    *("base_model", "model", "pretrained_model"),
)
_COMPILED_COLUMNS = 64  # of which widths are multiples if layers are compiled: shapes recur
_NOT_OF_A_LAYOUT = (torch.OutOfMemoryError, _StopRecomputationError)


@contextmanager
def live_trunk(
    model: nn.Module,
    layout: BatchLayout,
    live: Tensor | None,  # (B,) bool
    needed: Tensor,  # (B, L) bool
) -> Iterator[TrunkCall]:
    """Inside, the trunk of `model` computes only what is read of a batch.

    Args:
        layout: the first of the layouts that may serve.
        live: (B,) bool, sequences that may get a gradient; None: all.
        needed: (B, L) bool, cells whose hidden states are read.
    """
    trunk, saves = trunk_of(model), layout != "padded" or live is not None
    name, reason = forward_name(trunk), _reason_against(model, trunk) if saves else None
    every = torch.ones(len(needed), dtype=torch.bool, device="cpu")
    may_have = every if live is None else live.cpu()
    call = TrunkCall(trunk, getattr(trunk, name), layout, may_have, needed)
    if not saves or reason is not None:
        yield call
    else:
        with replaced(trunk, name, call.run):
            yield call
        reason = None if call.was_called else "the model's forward does not call its trunk"
    if reason is not None:
        say_once(trunk, reason)


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


@dataclass
class TrunkCall:
    """Stand-in for the forward of a trunk while a batch is scored."""

    trunk: nn.Module
    forward: Callable[..., Any]
    layout: BatchLayout
    live: Tensor  # (B,) bool, on the CPU: may get a gradient
    needed: Tensor  # (B, L) bool
    was_called: bool = False
    computed: Tensor | None = None  # (B, L) bool, if cells were left out
    made: Sequence[TrunkLayout] = ()  # the layouts that have run instead of the batch

    @functools.cached_property
    def multiple(self) -> int:
        """Widths of layouts are a multiple of it."""
        return _COMPILED_COLUMNS if _is_compiled(self.trunk.modules()) else 1

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's output."""
        positional = zip(inspect.signature(self.forward).parameters, args, strict=False)
        given = {**dict(positional), **kwargs}
        with self._in_step(given) as forward:
            exactness = None if self.was_called else self._exactness(given)
            self.was_called = True
            found = None if exactness is None else self._in_a_layout(exactness, forward)
            return forward(**given) if found is None else found

    def shares(self) -> Shares:
        """What ran of the padded batch in a call with gradient."""
        found, positions = Shares(), self.needed.numel()
        if torch.is_grad_enabled():
            sizes = [(x.sources.numel(), x.graph) for x in self.made] or [(positions, True)]
            live = int(self.live.sum()) if self.made else len(self.live)
            found.add("sequences/gradient", live, len(self.live))
            found.add("tokens/computed", sum(n for n, _ in sizes), positions)
            found.add("tokens/gradient", sum(n for n, graph in sizes if graph), positions)
        return found

    @contextmanager
    def _in_step(self, given: dict[str, Any]) -> Iterator[Callable[..., Any]]:
        """Inside, call the yielded forward any number of times.

        Each is announced to the ranks that run the trunk together: a rank that needs no more of its
        own runs one of two tokens for each of theirs, and so does one whose forward has failed.
        """
        groups = rank_groups(self.trunk)
        if not groups:
            yield self.forward
            return

        @torch.no_grad()
        def anchor() -> None:
            like = next(x for x in given.values() if isinstance(x, Tensor))
            self.forward(input_ids=torch.full((1, 2), ordinary_id(self.trunk), device=like.device))

        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            most_of_ranks(groups, [1])
            try:
                return self.forward(*args, **kwargs)
            except Exception:
                anchor()  # the others are within theirs
                raise

        yield forward
        while most_of_ranks(groups, [0])[0]:
            anchor()

    def _exactness(self, given: dict[str, Any]) -> Exactness | None:
        """Of the inputs `given` by name; None, after a warning, if they run as they are."""
        try:
            inputs = read_inputs(self.trunk, given, self.needed)
            if isinstance(inputs, TrunkInputs):
                return Exactness(self.trunk, self.forward, inputs)
        except Exception as error:  # such as a body without a config
            inputs = f"in reading its inputs, {described(error)}"
        say_once(self.trunk, inputs)
        return None

    def _in_a_layout(self, exactness: Exactness, forward: Callable[..., Any]) -> Any:
        """The trunk's output in the first layout that serves, from the one asked for on.

        The reasons against those before it are said. None: the batch has to run as given.
        """
        inputs, modes = exactness.inputs, [*MODES[MODES.index(self.layout) :]]
        if inputs.is_packed:
            del modes[modes.count("tree") :]
        reasons: dict[str, str] = {}  # the first layout against which each is

        def say(instead: str) -> None:
            if reasons and not inputs.padding_is_read:
                found = "; ".join(f"layout={mode!r}: {x}" for x, mode in reasons.items())
                say_once(self.trunk, f"{found}; {instead}")

        while modes:
            mode = modes.pop(0)
            way = exactness.way(mode, forward)
            if isinstance(way, str):
                reasons.setdefault(way, mode)
                continue
            try:
                planned = self._planned(inputs, mode, way)
                if modes[:1] == ["trim"] and self._loses_to_trim(exactness, way, planned):
                    modes.insert(1, mode)  # its turn, if trim fails
                    continue
            except Exception as error:
                reasons.setdefault(f"in planning it, {described(error)}", mode)
                continue
            say(f"layout={mode!r} serves")
            try:
                return self._in_parts(inputs, way, planned, forward)
            except _NOT_OF_A_LAYOUT:
                raise
            except Exception as error:
                reasons.setdefault(described(error), mode)
                exactness.refuse(mode, described(error))
        whole = "all sequences run in one padded forward"
        say("packed rows run as given" if inputs.is_packed else whole)
        return None

    def _planned(self, inputs: TrunkInputs, mode: str, way: Way) -> list[TrunkLayout]:
        """Layouts of the sequences with and without gradient that have something to compute."""
        live = (self.live & torch.is_grad_enabled())[inputs.places[:, 0] // self.needed.shape[1]]
        both = [
            inputs.layout(mode, way, chosen, graph=graph, multiple=self.multiple)
            for chosen, graph in ((live, True), (~live, False))
        ]
        return [layout for layout in both if layout is not None]

    def _loses_to_trim(self, exactness: Exactness, way: Way, planned: list[TrunkLayout]) -> bool:
        """True if recurrences make the tree `planned` slower than rows, which are exact too."""
        inputs = exactness.inputs
        if not way.chunk or isinstance(exactness.known("trim"), str):
            return False
        device = inputs.given["input_ids"].device

        def cost(layouts: list[TrunkLayout]) -> float:
            return sum(states.cost(x.sources, x.paths, way.chunk, device) for x in layouts)

        return cost(planned) > cost(self._planned(inputs, "trim", way))

    def _in_parts(
        self, inputs: TrunkInputs, way: Way, planned: list[TrunkLayout], forward: Callable[..., Any]
    ) -> Any:
        """The trunk's output, its hidden states (B, L, H) from forwards of `planned`."""
        graph, shape = torch.is_grad_enabled(), inputs.given["input_ids"].shape
        if not any(layout.graph == graph for layout in planned):
            two = torch.ones(1, 2, dtype=torch.bool, device="cpu")  # tokens that fill no cell:
            anchor = by_rows(two.long() * 0, ~two, two, graph=graph)  # a loss attaches to them
            planned = [anchor, *planned]
        parts = []
        for layout in planned:
            with torch.set_grad_enabled(layout.graph):
                output, _ = run_layout(self.trunk, forward, inputs, layout, way)
            parts.append((layout, output))
        hidden, self.computed = filled(parts, shape)
        self.made = planned
        if graph:
            _guard(hidden, planned, self.live)
        return type(output)(**{**output, "last_hidden_state": hidden})


def _guard(
    hidden: Tensor,  # (B, L, H)
    planned: Sequence[TrunkLayout],
    live: Tensor,  # (B,) bool
) -> None:
    """Have the backward raise if gradient arrives at a cell of `hidden` without a graph.

    It costs one wait for the device in each backward.
    """
    length = hidden.shape[1]
    without_graph = torch.ones(len(live) * length, dtype=torch.bool, device="cpu")
    for layout in planned:
        without_graph[layout.cells] &= not layout.graph
    without = without_graph.nonzero().squeeze(1)
    if not hidden.requires_grad or not len(without):
        return
    without_here = without.to(hidden.device, non_blocking=True)

    def look(gradient: Tensor) -> None:
        at_cells = gradient.reshape(-1, gradient.shape[-1]).index_select(0, without_here)
        reached = at_cells.count_nonzero(dim=1)
        if not bool(reached.any()):
            return
        rows = (without[reached.nonzero().squeeze(1).cpu()] // length).unique().tolist()
        dead = [i for i in rows if not live[i]]
        if dead:
            raise RuntimeError(
                f"zero_advantage: expected no gradient for the sequences {dead}, which ran without "
                "graph, got one: the loss has a term that is not known here; pass "
                "zero_advantage='train'"
            )
        raise RuntimeError(
            "layout: expected gradient at completion tokens alone, got one elsewhere in the "
            f"sequences {rows}; pass layout='padded'"
        )

    hidden.register_hook(look)


def ordinary_id(model: nn.Module) -> int:
    """An id that stands for a token of text."""

    def special(name: str, x: Any) -> Iterator[Any]:
        for key, y in x.items() if isinstance(x, dict) else ():
            yield from special(str(key), y)
        if name.endswith(("_token_id", "_token_index")):
            yield from x if isinstance(x, list) else [x]

    config: Any = model.config
    others = {*special("", config.to_dict())}
    return next(x for x in range(len(others) + 1) if x not in others)


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn, once for each kind of model, that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
