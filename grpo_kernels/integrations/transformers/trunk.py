"""The trunk of a transformers model, computed where a loss needs it: the seam, the guard, and ranks in step.

The trunk is the transformer below the head, ``model.base_model``. For the length of one scoring call its ``forward`` is
replaced by one that runs several smaller forwards (`layout`) and returns hidden states (B, L, H) in which the computed
cells are filled in; elsewhere they are 0. The model, its head, its hooks and the wrappers around it stay as they are,
and see one forward.

    cells that the head reads          `needed`, from the completion mask
    sequences that may have gradient   `live`; the others run without graph
    columns that are only padding      cut (``padding``)
    prompts that several rows share    computed once (``shared_prompts``)

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
from grpo_kernels.integrations.transformers import exactness
from grpo_kernels.integrations.transformers.forwards import TrunkInputs, run_layout
from grpo_kernels.integrations.transformers.guard import guard
from grpo_kernels.integrations.transformers.head import unwrapped
from grpo_kernels.integrations.transformers.layout import Layout, Span, anchor, plan
from grpo_kernels.integrations.transformers.options import TrunkOptions
from grpo_kernels.integrations.transformers.token_count import TokenCount
from grpo_kernels.integrations.transformers.within import forward_name, replaced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COMPILED_COLUMNS = 64  # if layers are compiled, widths are multiples of it, so that shapes recur


@contextmanager
def live_trunk(
    model: nn.Module,
    options: TrunkOptions,
    *,
    needed: Tensor,  # (B, L) bool
    live: Tensor | None,  # (B,) bool
    count: TokenCount,
) -> Iterator[None]:
    """Inside, the trunk of `model` computes only what `options` ask for of each batch.

    Args:
        needed: (B, L) bool, cells whose hidden states are read. Calls of the model walk through the B sequences in
            order.
        live: (B,) bool, sequences that may get a gradient; None: all.
        count: counts the forwards with gradient.

    Raises:
        RuntimeError: in the backward, if gradient arrives at a cell that was computed without graph.
    """
    trunk = _trunk_of(unwrapped(model)[1])
    reason = _reason_against(model, trunk)
    if reason is not None:
        say_once(trunk, reason)
    if reason is None and not is_fake(needed) and (options.padding != "keep" or live is not None):
        name = forward_name(trunk)
        call = _TrunkCall(trunk, getattr(trunk, name), options, needed, live, count)
        with replaced(trunk, name, call.run):
            yield
        if call.was_called:
            return
        say_once(trunk, "the model's forward does not call its trunk")
    else:
        yield
    if torch.is_grad_enabled():
        count.add(len(needed), len(needed), *[needed.numel()] * 3)


class _TrunkCall:
    """Stand-in for the forward of a trunk while a batch is scored."""

    def __init__(
        self,
        trunk: nn.Module,
        forward: Callable[..., Any],
        options: TrunkOptions,
        needed: Tensor,
        live: Tensor | None,
        count: TokenCount,
    ) -> None:
        self.trunk, self.forward, self.options = trunk, forward, options
        self.needed, self.live, self.count = needed, live, count
        self.groups = _rank_groups(trunk)
        self.multiple = _COMPILED_COLUMNS if _is_compiled(trunk.modules()) else 1
        self.start = 0  # first sequence of the next call
        self.was_called = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the trunk's output, in as many forwards as the batch takes."""
        self.was_called = True
        given = {**dict(zip(inspect.signature(self.forward).parameters, args, strict=False)), **kwargs}
        padding, shared = self._exact_modes(given.get("position_ids") is not None)
        inputs = TrunkInputs.of(self.trunk, given)
        if isinstance(inputs, str):
            say_once(self.trunk, inputs)
            return self._as_given(given)
        sequences, length = inputs.ids.shape
        rows = range(self.start, self.start + sequences)
        self.start = rows.stop
        fits = rows.stop <= self.needed.shape[0] and length == self.needed.shape[1]
        if not fits or padding == "whole":
            return self._as_given(given)
        live = torch.full((sequences,), torch.is_grad_enabled())
        if torch.is_grad_enabled() and self.live is not None:
            live = self.live[rows.start : rows.stop].cpu()
        needed = self.needed[rows.start : rows.stop].to(inputs.ids.device)
        return self._in_parts(inputs, self._layouts(inputs, needed, live, padding, shared), rows, live)

    def _exact_modes(self, positions: bool) -> tuple[str, bool]:
        """(padding, shared) of the options, or the nearest that are exact for this model; "whole" if there are none."""
        options = self.options

        def is_exact(mode: str, instead: str) -> bool:
            reason = exactness.reason_against(mode, self.trunk, self.forward, positions=positions)
            if reason is not None:
                say_once(self.trunk, f"{mode}: {reason}; {instead}")
            return reason is None

        shared = options.shared_prompts and is_exact("shared", "prompts are not shared")
        padding: str = options.padding
        if padding == "split" and (self.groups or _checkpoints_reentrantly(self.trunk)):
            reason = "parameters are sharded over ranks" if self.groups else "ranks checkpoint with use_reentrant=True"
            say_once(self.trunk, f"padding='split' is 'trim' where {reason}")
            padding = "trim"
        if padding == "free" and not is_exact("free", "padding='trim' serves"):
            padding = "trim"
        if padding in ("trim", "split") and not is_exact("trim", "padding stays"):
            padding, shared = "keep", False
        if padding == "keep" and not is_exact("keep", "all sequences run in one padded forward"):
            padding, shared = "whole", False
        return padding, shared

    def _layouts(self, inputs: TrunkInputs, needed: Tensor, live: Tensor, padding: str, shared: bool) -> list[Layout]:
        """The forwards of this call, those with a graph first; as many of each kind as other ranks have."""
        length = inputs.ids.shape[1]
        spans, is_plain = inputs.spans(needed, with_prompts=shared)
        if not is_plain and (shared or padding == "free"):  # positions would be counted without the holes
            say_once(self.trunk, "a sequence has padding within, or position_ids that do not count from 0")
            padding, shared = ("trim" if padding == "free" else padding), False
        window = exactness.sliding_window(self.trunk)
        if shared and window is not None and any(span.length > window for span in spans):
            say_once(self.trunk, f"shared prompts: sequences are longer than the sliding window of {window}")
            shared = False
        named: dict[str, Any] = {"padding": padding, "shared": shared, "multiple": self.multiple}
        named |= {"overhead": self.options.forward_overhead, "longest": exactness.longest_strip(self.trunk, length)}
        with_graph = plan([span for span in spans if live[span.row]], length, graph=True, **named)
        without = plan([span for span in spans if not live[span.row]], length, graph=False, **named)
        wanted = [max(int(torch.is_grad_enabled()), len(with_graph)), len(without)]
        if not any(wanted):
            wanted[1] = 1  # the output needs at least one forward
        wanted = self._most_of_ranks(wanted)
        some = spans[0] if spans else Span(0, 0, 0, length)
        with_graph += [anchor(some, length, True)] * (wanted[0] - len(with_graph))
        without += [anchor(some, length, False)] * (wanted[1] - len(without))
        return with_graph + without

    def _as_given(self, given: dict[str, Any]) -> Any:
        """Run the padded forward, and as many forwards without graph as other ranks run."""
        graph, without = torch.is_grad_enabled(), 0
        ids: Any = given.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2:
            _, without = self._most_of_ranks([int(graph), int(not graph)])
            if graph:
                self.count.add(len(ids), len(ids), ids.numel(), ids.numel(), ids.numel())
        found = self.forward(**given)
        for _ in range(without - int(not graph)):
            with torch.no_grad():
                self.forward(input_ids=ids[:1, :2])
        return found

    def _in_parts(self, inputs: TrunkInputs, layouts: list[Layout], rows: range, live: Tensor) -> Any:
        """Return the trunk's output, its hidden states (B, L, H) from `layouts`; `rows` have a graph where `live`."""
        sequences, length = inputs.ids.shape
        graph = torch.is_grad_enabled()
        cells, states = [], []
        output: Any = None
        for layout in layouts:
            with torch.set_grad_enabled(graph and layout.graph):
                output = run_layout(self.trunk, self.forward, inputs, layout)
            hidden = output.last_hidden_state
            stored = layout.stored.reshape(-1)
            index = stored.nonzero().squeeze(1)
            cells.append(layout.cells.reshape(-1)[index].to(hidden.device, non_blocking=True))
            flat = hidden.reshape(-1, hidden.shape[-1])
            whole = len(index) == len(stored)
            states.append(flat if whole else flat.index_select(0, index.to(hidden.device, non_blocking=True)))
        hidden = states[0].new_zeros(sequences * length, states[0].shape[-1])
        hidden = hidden.index_copy(0, torch.cat(cells), torch.cat(states)).view(sequences, length, -1)
        if graph:
            computed, gradient = sum(x.tokens for x in layouts), sum(x.tokens for x in layouts if x.graph)
            self.count.add(int(live.sum()), sequences, sequences * length, computed, gradient)
            guard(hidden, layouts, rows, live)
        return type(output)(**{**output, "last_hidden_state": hidden})

    def _most_of_ranks(self, counts: list[int]) -> list[int]:
        """Elementwise largest `counts` of the ranks that must run the trunk equally often."""
        for group in self.groups:
            counts = all_reduce(torch.tensor(counts, device=group_device(group)), "max", group).tolist()
        return counts


def _trunk_of(base: Any) -> nn.Module:
    """The module below the head whose forward the model's own forward calls."""
    body: nn.Module = base.base_model
    decoder = getattr(body, "decoder", None)  # OPT's model calls its decoder, not the body's forward
    return decoder if isinstance(decoder, PreTrainedModel) else body


def _reason_against(model: nn.Module, trunk: nn.Module) -> str | None:
    """Return None if the forward of `trunk` can be replaced for a call, else the reason why not."""
    wrappers, base = unwrapped(model)
    if trunk is base:
        return "the model names no trunk (base_model)"
    if _is_compiled([*wrappers, base, trunk]):
        return "the whole model is compiled; compile its layers instead (docs/training-step.md)"
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


def _checkpoints_reentrantly(trunk: nn.Module) -> bool:
    """True if ranks checkpoint reentrantly: DDP then allows one forward with graph, as each marks parameters ready."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    functions = (vars(x).get("_gradient_checkpointing_func") for x in trunk.modules() if _checkpoints(x))
    return any(getattr(f, "keywords", {}).get("use_reentrant", True) for f in functions if f is not None)


def _checkpoints(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False))


def _is_compiled(modules: Iterable[Any]) -> bool:
    """True if one of `modules` was returned by `torch.compile`, or has been compiled in place."""
    return any(
        type(x).__name__ == "OptimizedModule" or getattr(x, "_compiled_call_impl", None) is not None for x in modules
    )


def say_once(trunk: nn.Module, reason: str) -> None:
    """Warn, once for each kind of model, that a saving does not apply."""
    warn_once(f"{type(trunk).__name__}: {reason}; results are the same")
