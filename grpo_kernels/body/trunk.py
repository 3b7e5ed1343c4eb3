"""Compute only the needed part of a model's trunk, in forwards with and without a graph.

The trunk is the transformer below the head, ``model.base_model``. During one scoring call,
`TrunkCall.run` replaces its ``forward``. The model, its head, hooks and wrappers are unchanged, and
see one call of the trunk. The call returns hidden states (B, L, H) that are 0 in cells it did not
compute. Ranks that share a sharded trunk run the same number of forwards.

    cells that the head reads          `needed`, from the completion mask
    sequences that may have gradient   `live`; all others run without a graph
    prefixes shared by several rows    computed once (`layout`)
    padding                            left out

If a gradient arrives at a cell that was computed without a graph, the backward raises (`_guard`).
So a wrong `live` raises an error and never changes a result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base import BatchLayout
from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.distributed import most_of_ranks
from grpo_kernels.base.modes import draws_random
from grpo_kernels.body import paths
from grpo_kernels.body.layout import (
    TrunkInputs,
    TrunkLayout,
    Way,
    attention_of,
    by_rows,
    filled,
    read_inputs,
    run_layout,
)
from grpo_kernels.body.trial import Exactness, described, joins_sequences
from grpo_kernels.head_module import rank_groups
from grpo_kernels.patching import forward_name, replaced

MODES: tuple[Any, ...] = get_args(BatchLayout)
FSDP1 = "_fsdp_wrapped_module"  # name of the child of a FullyShardedDataParallel
# Names under which wrappers hold the model: torch.compile, Lightning's Fabric, FSDP1, DDP, PEFT
_WRAPPED = (
    *("_orig_mod", "_forward_module", FSDP1, "module"),
    *("base_model", "model", "pretrained_model"),
)
Layouts = dict[bool, TrunkLayout]  # a call's, by whether the forward keeps a graph
_NOT_OF_A_LAYOUT = (torch.OutOfMemoryError, _StopRecomputationError)


@contextmanager
def live_trunk(
    model: nn.Module,
    layout: BatchLayout,
    live: Tensor | None,  # (B,) bool
    needed: Tensor,  # (B, L) bool
) -> Iterator[TrunkCall]:
    """Make the trunk of `model` compute only the needed cells of a batch, inside the context.

    Args:
        layout: the first layout to try.
        live: (B,) bool, sequences that may get a gradient; None: all.
        needed: (B, L) bool, cells whose hidden states are read.
    """
    trunk, saves = trunk_of(model), layout != "padded" or live is not None
    name, reason = forward_name(trunk), _reason_against(model, trunk) if saves else None
    every = torch.ones(len(needed), dtype=torch.bool, device="cpu")
    call = TrunkCall(
        trunk, getattr(trunk, name), layout, every if live is None else live.cpu(), needed
    )
    if not saves or reason is not None:
        yield call
    else:
        with replaced(trunk, name, call.run):
            yield call
        reason = None if call.was_called else "the model's forward does not call its trunk"
    if reason is not None:
        say_once(trunk, reason)


def unwrapped(model: nn.Module) -> tuple[list[nn.Module], PreTrainedModel]:
    """Find (wrappers from the outside in, the transformers model inside them)."""
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
    """Find the module below the head that the model's forward calls; `model` may be wrapped."""
    base = unwrapped(model)[1]
    body: nn.Module = base.base_model
    # Llama 4's text model names its body "language_model", but stores it as "model"
    if body is base:
        body = getattr(base, "model", base)
    decoder = getattr(body, "decoder", None)  # OPT calls this, not the body's forward
    return decoder if isinstance(decoder, PreTrainedModel) else body


def _reason_against(model: nn.Module, trunk: nn.Module) -> str | None:
    """Say why the forward of `trunk` cannot be replaced during a call; None if it can."""
    wrappers, base = unwrapped(model)
    if trunk is base:
        return "the model names no trunk (base_model)"
    if any(
        type(x).__name__ == "OptimizedModule" or getattr(x, "_compiled_call_impl", None) is not None
        for x in (*wrappers, base, trunk)
    ):
        return "the whole model is compiled; compile its layers instead (docs/skipped-work.md)"
    if any(FSDP1 in x._modules for x in (*wrappers, *trunk.modules())):
        return "FSDP1 shards the model, and its units run one forward each; FSDP2 has no such limit"
    name = getattr(getattr(trunk, "config", None), "_attn_implementation", "")
    attention = ALL_ATTENTION_FUNCTIONS.get(name, None)
    is_deepspeeds = str(getattr(attention, "__module__", "")).startswith("deepspeed")
    torchs_own = torch._C._nn.scaled_dot_product_attention
    if is_deepspeeds or nn.functional.scaled_dot_product_attention is not torchs_own:
        return "attention is not torch's own (context parallel), so sequences may span ranks"
    return None


@dataclass
class TrunkCall:
    """Replacement for a trunk's forward during one scoring call."""

    trunk: nn.Module
    forward: Callable[..., Any]
    layout: BatchLayout
    live: Tensor  # (B,) bool, on the CPU; True: may get a gradient
    needed: Tensor  # (B, L) bool
    was_called: bool = False
    made: Layouts = field(default_factory=dict)  # that ran instead of the padded batch

    def run(self, *args: Any, **kwargs: Any) -> Any:
        positional = zip(inspect.signature(self.forward).parameters, args, strict=False)
        given = {**dict(positional), **kwargs}
        with self._in_step(given) as forward:
            found = None if self.was_called else self._in_a_layout(given, forward)
            self.was_called = True
            if found is not None:
                return found
            self._warn_of_joined_sequences(given, forward)
            return forward(**given)

    def _warn_of_joined_sequences(self, given: dict[str, Any], forward: Callable[..., Any]) -> None:
        """Warn if rows are packed and run as given, and the model does not tell sequences apart."""
        ids, positions = given.get("input_ids"), given.get("position_ids")
        is_packed = given.get("attention_mask") is None and given.get(paths.ENDS[0]) is None
        if not is_packed or not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
            return
        if positions.shape != ids.shape or self.needed.shape != ids.shape:
            return
        is_before = self.needed.flip(1).cumsum(1).flip(1) > 0  # what comes after is padding
        begins = positions.diff(dim=1) != 1
        if not bool((begins & is_before[:, 1:].to(begins.device)).any()):
            return
        try:
            joins = joins_sequences(self.trunk, forward, given)
        except Exception:  # the batch's own forward may work
            return
        if joins:
            instead = ["one row per sequence, with an attention_mask"]
            if paths.is_flash(attention_of(self.trunk)) and len(ids) > 1:
                instead.insert(0, "one packed row per call")
            if self.layout != "tree":
                instead.insert(0, "layout='tree'")
            warn_once(
                f"position_ids: {type(self.trunk).__name__} does not keep packed sequences apart, "
                "so each sequence sees those before it in its row. This batch ran as given; use "
                f"{', or '.join(instead)}"
            )

    def counts(self) -> dict[str, tuple[int, int]]:
        """What ran of the padded batch: metric -> (count, total). Empty without gradients."""
        if not torch.is_grad_enabled():
            return {}
        positions = self.needed.numel()
        sizes = {graph: x.sources.numel() for graph, x in self.made.items()} or {True: positions}
        live = int(self.live.sum()) if self.made else len(self.live)
        return {
            "sequences/gradient": (live, len(self.live)),
            "tokens/computed": (sum(sizes.values()), positions),
            "tokens/gradient": (sizes.get(True, 0), positions),
        }

    def computed(self) -> Tensor | None:
        """(B, L) bool, on the CPU: cells that were computed; None if the batch ran as given."""
        if not self.made:
            return None
        cells = torch.cat([x.cells for x in self.made.values()])
        blank = torch.zeros(self.needed.numel(), dtype=torch.bool, device="cpu")
        return blank.index_fill(0, cells, True).view(self.needed.shape)

    @contextmanager
    def _in_step(self, given: dict[str, Any]) -> Iterator[Callable[..., Any]]:
        """Yield a forward that each rank may call any number of times inside the context.

        Ranks that run the trunk together announce each call. A rank that has no more calls, or
        whose forward failed, runs two tokens for each call of another rank.
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
                anchor()  # other ranks are inside their forward
                raise

        yield forward
        while most_of_ranks(groups, [0])[0]:
            anchor()

    def _in_a_layout(self, given: dict[str, Any], forward: Callable[..., Any]) -> Any:
        """The trunk's output in the first usable layout, starting with the requested one.

        It warns of the reasons against earlier layouts. None means that the batch must run as
        given.
        """
        try:
            inputs = read_inputs(self.trunk, given, self.needed)
            if isinstance(inputs, TrunkInputs):
                exactness = Exactness(self.trunk, self.forward, inputs)
        except Exception as error:  # for example, a body without a config
            inputs = f"in reading its inputs, {described(error)}"
        if isinstance(inputs, str):
            say_once(self.trunk, inputs)
            return None
        # only the model knows what padding attends to
        modes = ["padded"] if inputs.padding_is_read else [*MODES[MODES.index(self.layout) :]]
        output, instead = None, "all sequences run in one padded forward"
        if inputs.is_packed:
            modes, instead = [x for x in modes if x == "tree"], "packed rows run as given"
        reasons: dict[str, str] = {}  # reason -> first layout that it rules out
        while modes and output is None:
            mode = modes.pop(0)
            way = exactness.way(mode, forward)
            if isinstance(way, str):
                reasons.setdefault(way, mode)
                continue
            try:
                planned = self._planned(inputs, way)
                if modes[:1] == ["trim"] and self._loses_to_trim(exactness, way, planned):
                    modes.insert(1, mode)  # tried again if trim fails
                    continue
                output = self._in_parts(inputs, way, planned, forward)
                instead = f"layout={mode!r} is used"
            except _NOT_OF_A_LAYOUT:
                raise
            except Exception as error:
                reasons.setdefault(exactness.refuse(mode, described(error)), mode)
        if reasons and not inputs.padding_is_read:
            found = "; ".join(f"layout={mode!r}: {x}" for x, mode in reasons.items())
            say_once(self.trunk, f"{found}; {instead}")
        return output

    def _planned(self, inputs: TrunkInputs, way: Way) -> Layouts:
        """Layouts of the sequences with gradient, and of those without, if there are any."""
        live = (self.live & torch.is_grad_enabled())[inputs.places[:, 0] // self.needed.shape[1]]
        return {
            graph: inputs.layout(way, chosen)
            for graph, chosen in ((True, live), (False, ~live))
            if (chosen & inputs.is_read).any()
        }

    def _loses_to_trim(self, exactness: Exactness, way: Way, planned: Layouts) -> bool:
        """True if recurrences make the tree `planned` slower than rows, and rows may be exact."""
        inputs = exactness.inputs
        if not way.chunk or isinstance(exactness.known("trim"), str):
            return False
        device = inputs.given["input_ids"].device

        def cost(layouts: Layouts) -> float:
            return sum(paths.cost(x.sources, x.paths, way.chunk, device) for x in layouts.values())

        return cost(planned) > cost(self._planned(inputs, Way("trim")))

    def _in_parts(
        self, inputs: TrunkInputs, way: Way, planned: Layouts, forward: Callable[..., Any]
    ) -> Any:
        """The trunk's output, with hidden states (B, L, H) from the forwards of `planned`."""
        graph, shape = torch.is_grad_enabled(), inputs.given["input_ids"].shape
        if graph not in planned:
            # two tokens that fill no cell, so that the output belongs to a graph
            two = torch.ones(1, 2, dtype=torch.bool, device="cpu")
            planned = {graph: by_rows(two.long() * 0, ~two, two), **planned}
        parts = []
        for with_graph, layout in planned.items():
            with torch.set_grad_enabled(with_graph):
                output, _ = run_layout(self.trunk, forward, inputs, layout, way)
            parts.append((layout, output))
        hidden, self.made = filled(parts, shape), planned
        if graph:
            _guard(hidden, planned[True], self.live)
        shares = any(len(x.cells) > x.sources.numel() for x in planned.values())
        if shares and draws_random(self.trunk):
            warn_once(
                f"{type(self.trunk).__name__}: it is in train mode and has dropout or noise, and "
                "sequences that begin alike share the random masks of their common prefix. For "
                "masks of their own, pass layout='trim'; for none, call model.eval() or set the "
                "rates to 0"
            )
        return type(output)(**{**output, "last_hidden_state": hidden})


def _guard(
    hidden: Tensor,  # (B, L, H)
    with_graph: TrunkLayout,
    live: Tensor,  # (B,) bool
) -> None:
    """Make the backward raise if a gradient arrives at a cell outside the layout `with_graph`.

    This synchronizes with the device once per backward.
    """
    length = hidden.shape[1]
    without_graph = torch.ones(len(live) * length, dtype=torch.bool, device="cpu")
    without_graph[with_graph.cells] = False
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
                "graph, got one. The loss has an unknown term; pass zero_advantage='train'"
            )
        raise RuntimeError(
            "layout: the loss also uses hidden states outside the completion, in the sequences "
            f"{rows}; pass layout='padded'"
        )

    hidden.register_hook(look)


def ordinary_id(model: nn.Module) -> int:
    """Choose a token id that the config does not use for a special token."""

    def special(name: str, x: Any) -> Iterator[Any]:
        for key, y in x.items() if isinstance(x, dict) else ():
            yield from special(str(key), y)
        if name.endswith(("_token_id", "_token_index")):
            yield from x if isinstance(x, list) else [x]

    config: Any = model.config
    others = {*special("", config.to_dict())}
    return next(x for x in range(len(others) + 1) if x not in others)


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn once per kind of model that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
