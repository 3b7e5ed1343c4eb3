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

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base.checks import is_dtensor, is_fake, warn_once
from grpo_kernels.base.distributed import all_reduce, group_device
from grpo_kernels.integrations.host import forward_name, replaced
from grpo_kernels.integrations.shares import Shares
from grpo_kernels.integrations.transformers import exactness
from grpo_kernels.integrations.transformers import layout as layouts
from grpo_kernels.integrations.transformers.exactness import Verdicts
from grpo_kernels.integrations.transformers.forwards import Cells, TrunkInputs, Way, run_layout
from grpo_kernels.integrations.transformers.guard import guard
from grpo_kernels.integrations.transformers.head import FSDP1, unwrapped
from grpo_kernels.integrations.transformers.layout import TrunkLayout
from grpo_kernels.integrations.transformers.options import TrunkOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COMPILED_COLUMNS = 64  # if layers are compiled, widths are multiples of it, so that shapes recur
_WORTH_A_TREE = 0.97  # share of the tokens side by side at which a tree takes as long (on a CPU: 0.99 to 1.00 times)
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
    if reason is None and not is_fake(needed) and (options.layout != "padded" or live is not None):
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
        self.groups = _rank_groups(trunk)
        self.multiple = _COMPILED_COLUMNS if _is_compiled(trunk.modules()) else 1
        self.start = 0  # first sequence of the next call
        self.was_called = False
        self.computed: list[Tensor] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the trunk's output, in one forward with a graph and one without."""
        self.was_called = True
        given = {**dict(zip(inspect.signature(self.forward).parameters, args, strict=False)), **kwargs}
        inputs = TrunkInputs.of(self.trunk, given)
        if isinstance(inputs, str):
            say_once(self.trunk, inputs)
            if self.groups:  # another rank may have inputs of the usual kind, and tries them with these parameters
                exactness.verdicts(self.trunk, self.forward, TrunkInputs.usual(given), self.options.layout)
            return self._as_given(given)
        verdicts = exactness.verdicts(self.trunk, self.forward, inputs, self.options.layout)
        sequences, length = inputs.ids.shape
        rows = range(self.start, self.start + sequences)
        self.start = rows.stop
        if rows.stop > self.needed.shape[0] or length != self.needed.shape[1]:
            return self._as_given(given)
        cells = inputs.on_cpu(self.needed[rows.start : rows.stop].to(inputs.ids.device))
        mode = self._mode(verdicts, inputs, cells)
        if mode is None:
            return self._as_given(given)
        live = torch.full((sequences,), torch.is_grad_enabled())
        if torch.is_grad_enabled() and self.live is not None:
            live = self.live[rows.start : rows.stop].cpu()
        planned = [self._layout(mode, verdicts, cells, x, graph) for x, graph in ((live, True), (~live, False))]
        graph = torch.is_grad_enabled()
        wanted = self._most_of_ranks([int(graph), int(planned[1] is not None or not graph)])
        anchors = [(layouts.anchor(graph=x), Way("none")) for x in (True, False)]
        parts = [x or anchor for x, anchor, n in zip(planned, anchors, wanted, strict=True) if n]
        return self._in_parts(inputs, parts, rows, live)

    def _mode(self, verdicts: Verdicts, inputs: TrunkInputs, cells: Cells) -> str | None:
        """Return the first layout, from that of the options on, that is exact for this batch; None if there is none."""
        if inputs.is_packed(cells):
            say_once(self.trunk, "rows hold several sequences (position_ids begin anew), so they run as given")
            return None
        reasons = {mode: verdict if isinstance(verdict, str) else None for mode, verdict in verdicts.items()}
        if cells.padding_is_read:  # only the model knows what padding attends to; the caller has been told
            return "padded" if reasons["padded"] is None else None
        if isinstance(tree := verdicts.get("tree"), Way):
            reasons["tree"] = exactness.reason_against_tree(self.trunk, tree, cells)
        mode = next((mode for mode, reason in reasons.items() if reason is None), None)
        if mode != self.options.layout:
            instead = f"layout={mode!r} serves" if mode else "all sequences run in one padded forward"
            say_once(self.trunk, f"layout={self.options.layout!r}: {reasons[self.options.layout]}; {instead}")
        return mode

    def _layout(self, mode: str, verdicts: Verdicts, cells: Cells, chosen: Tensor, graph: bool) -> _Planned | None:
        """Return a layout of the sequences `chosen` (B,), and the way to run it; None if nothing is read of them."""
        way: Any = verdicts[mode]
        rows = cells.rows(chosen, padded=mode == "padded", by_column=way.positions == "column")
        if not rows:
            return None
        if mode == "tree":
            tree = layouts.tree(rows, graph=graph, multiple=self.multiple)
            padded = len(rows) * max(len(row.cells) for row in rows)
            trim = verdicts["trim"]
            if isinstance(trim, str) or self.multiple > 1 or tree.sources.numel() <= _WORTH_A_TREE * padded:
                return tree, way
            way = trim  # side by side nothing is computed twice either, or next to nothing
        return layouts.by_rows(rows, graph=graph, multiple=self.multiple), way

    def _as_given(self, given: dict[str, Any]) -> Any:
        """Run the padded forward, and as many forwards without graph as other ranks run."""
        graph, without = torch.is_grad_enabled(), 0
        ids: Any = given.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2:
            _, without = self._most_of_ranks([int(graph), int(not graph)])
            if graph:
                _count(self.shares, len(ids), len(ids), ids.numel(), ids.numel(), ids.numel())
        found = self.forward(**given)
        for _ in range(without - int(not graph)):
            with torch.no_grad():
                self.forward(input_ids=ids[:1, :2])
        return found

    def _in_parts(self, inputs: TrunkInputs, planned: Sequence[_Planned], rows: range, live: Tensor) -> Any:
        """Return the trunk's output, its hidden states (B, L, H) from `planned`; `rows` have a graph where `live`."""
        sequences, length = inputs.ids.shape
        graph, cells, states = torch.is_grad_enabled(), [], []
        output: Any = None
        for layout, way in planned:
            with torch.set_grad_enabled(graph and layout.graph):
                output, _ = run_layout(self.trunk, self.forward, inputs, layout, way)
            hidden = output.last_hidden_state
            cells.append(layout.cells.to(hidden.device, non_blocking=True))
            states.append(hidden.flatten(0, 1).index_select(0, layout.tokens.to(hidden.device, non_blocking=True)))
        hidden, filled = states[0].new_zeros(sequences * length, states[0].shape[-1]), torch.cat(cells)
        hidden = hidden.index_copy(0, filled, torch.cat(states)).view(sequences, length, -1)
        is_filled = torch.zeros(sequences * length, dtype=torch.bool, device=hidden.device)
        self.computed.append(is_filled.index_fill(0, filled, True).view(sequences, length))
        if graph:
            computed = [layout.sources.numel() for layout, _ in planned]
            gradient = sum(n for n, (layout, _) in zip(computed, planned, strict=True) if layout.graph)
            _count(self.shares, int(live.sum()), sequences, sequences * length, sum(computed), gradient)
            guard(hidden, [layout for layout, _ in planned], rows, live)
        return type(output)(**{**output, "last_hidden_state": hidden})

    def _most_of_ranks(self, counts: list[int]) -> list[int]:
        """Elementwise largest `counts` of the ranks that must run the trunk equally often."""
        for group in self.groups:
            counts = all_reduce(torch.tensor(counts, device=group_device(group)), "max", group).tolist()
        return counts


def _count(shares: Shares, live: int, sequences: int, positions: int, computed: int, gradient: int) -> None:
    """Count one call: sequences with gradient, all sequences; padded positions, computed ones, those with graph."""
    shares.add("sequences/gradient", live, sequences)
    shares.add("tokens/computed", computed, positions)
    shares.add("tokens/gradient", gradient, positions)


def trunk_of(model: nn.Module) -> nn.Module:
    """Return the module below the head whose forward the model's own forward calls; `model` may be wrapped."""
    body: nn.Module = unwrapped(model)[1].base_model
    decoder = getattr(body, "decoder", None)  # OPT's model calls its decoder, not the body's forward
    return decoder if isinstance(decoder, PreTrainedModel) else body


def _reason_against(model: nn.Module, trunk: nn.Module) -> str | None:
    """Return None if the forward of `trunk` can be replaced for a call, else the reason why not."""
    wrappers, base = unwrapped(model)
    if trunk is base:
        return "the model names no trunk (base_model)"
    if _is_compiled([*wrappers, base, trunk]):
        return "the whole model is compiled; compile its layers instead (docs/training-step.md)"
    if any(FSDP1 in x._modules for x in (*wrappers, *trunk.modules())):
        return "FSDP1 has divided the model, whose units run one forward each; FSDP2 has no such limit"
    attention = ALL_ATTENTION_FUNCTIONS.get(getattr(trunk.config, "_attn_implementation", ""), None)
    replaced_by_ranks = nn.functional.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention
    if replaced_by_ranks or str(getattr(attention, "__module__", "")).startswith("deepspeed"):
        return "attention is not torch's own (context parallel): sequences may be divided over ranks"
    return None


def _rank_groups(trunk: nn.Module) -> Sequence[ProcessGroup]:
    """Process groups whose ranks run the trunk together: those over which FSDP2 or ZeRO-3 has divided it."""
    largest: Any = None
    for x in trunk.parameters():
        parameter: Any = x
        if hasattr(parameter, "ds_status"):
            return [parameter.ds_process_group]
        if is_dtensor(parameter) and (largest is None or parameter.device_mesh.size() > largest.size()):
            largest = parameter.device_mesh
    return [] if largest is None else [largest.get_group(i) for i in range(largest.ndim)]


def _is_compiled(modules: Iterable[Any]) -> bool:
    """True if one of `modules` was returned by `torch.compile`, or has been compiled in place."""
    return any(
        type(x).__name__ == "OptimizedModule" or getattr(x, "_compiled_call_impl", None) is not None for x in modules
    )


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn, once for each kind of model, that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
