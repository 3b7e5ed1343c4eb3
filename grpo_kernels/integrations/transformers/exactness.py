"""Find out for each model which layouts give the padded forward's numbers, and how to call the model for that.

Layouts that the config or the layers rule out are refused by name. Every other layout is tried in a model's first call,
on five short synthetic rows with dropout off, against the padded forward: hidden states, and the gradient of the small
trainable parameters (norms, biases, adapters) for a random cotangent. The allowed difference is measured too: how much
the padded forward changes by rounding when it gets a few more columns of padding. Where FSDP2 or ZeRO-3 has divided the
parameters, only hidden states are compared.

A verdict is kept while nothing changes that it depends on: attention, precision, device, the names of the inputs,
hooks, and active adapters.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.choices import BatchLayout, choices
from grpo_kernels.base.modes import evaluating
from grpo_kernels.head.hooks import is_known, name_of
from grpo_kernels.integrations.transformers import layout as layouts
from grpo_kernels.integrations.transformers.attention import Segments, has_varlen
from grpo_kernels.integrations.transformers.forwards import (
    Cells,
    TrunkInputs,
    Way,
    attention_of,
    run_layout,
    text_config,
)

MODES: tuple[Any, ...] = choices(BatchLayout)
Verdicts = dict[str, Way | str]  # layout -> the way in which it is exact, or the reason why it is not

_ROUNDING = 4  # a layout may be off by this many times the measured rounding, or the dtype's eps
_MORE_COLUMNS = 5
_OF_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the longest position of a forward
_SMALL = 2**17  # elements of a parameter whose gradient is compared
_COLUMNS = 14  # of the synthetic rows

_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Verdicts]] = weakref.WeakKeyDictionary()


def verdicts(trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs, mode: str) -> Verdicts:
    """Return for layout `mode` and the simpler ones whether `forward` of `trunk` is exact in them.

    The first time it runs the model, equally often on every rank.
    """
    modes, dtype = MODES[MODES.index(mode) :], _dtype(trunk)
    names = tuple(sorted(inputs.per_token))
    key = mode, attention_of(trunk), dtype, inputs.ids.device, names, frozenset(_hooks_and_adapters(trunk))
    known = _found.setdefault(trunk, {})
    if key in known:
        return known[key]
    verdicts: Verdicts = {name: reason for name in modes if (reason := _by_structure(name, trunk, forward)) is not None}
    to_try = [name for name in modes if name not in verdicts]
    try:
        verdicts |= _by_trial(to_try, trunk, forward, inputs, dtype)
    except torch.OutOfMemoryError:  # of this moment: the next call tries again
        return verdicts | dict.fromkeys(to_try, "no memory is free for the trial of its first use")
    except Exception as error:  # in the padded forward, which every verdict needs
        verdicts |= dict.fromkeys(to_try, _described(error))
    known[key] = {name: verdicts[name] for name in modes}
    return known[key]


def fits_trees(trunk: nn.Module) -> bool | None:
    """Return True if `trunk` has been exact in a tree in every call; None if it has not been tried."""
    found = [verdicts["tree"] for verdicts in _found.get(trunk, {}).values() if "tree" in verdicts]
    return all(isinstance(verdict, Way) for verdict in found) if found else None


def reason_against_tree(trunk: nn.Module, way: Way, cells: Cells) -> str | None:
    """Return the reason why this batch is not exact in a tree, or None."""
    if way.longest is not None and cells.needed.shape[1] > way.longest:
        return f"its attention is not told of the sliding window of {way.longest} tokens"
    if cells.has_holes and _window(trunk) is not None:  # which counts the holes
        return "a sequence has padding within"
    return None


def _hooks_and_adapters(trunk: nn.Module) -> Iterator[Any]:
    """Everything around the modules of `trunk` that may change what they compute, in a form that compares."""
    for i, module in enumerate(trunk.modules()):
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            for key, hook in hooks.items():
                if not is_known(hook):  # PEFT registers its partials anew in each call
                    yield i, name_of(hook) if isinstance(hook, functools.partial) else key
        if active := _active(module):
            yield active


def _active(module: Any) -> tuple[tuple[str, str], ...]:
    """(name, variant of LoRA) of each adapter of PEFT that is active in a layer."""
    if getattr(module, "disable_adapters", None) is not False:
        return ()
    variants = getattr(module, "lora_variant", {})
    return tuple((name, type(variants.get(name)).__name__) for name in module.active_adapters)


def _by_structure(mode: str, trunk: nn.Module, forward: Callable[..., Any]) -> str | None:
    """Return the reason against layout `mode` that config, layers or adapters show, or None."""
    text, modules = text_config(trunk), [*trunk.modules()]
    if any("alora" in variant.lower() for module in modules for _, variant in _active(module)):
        return "aLoRA begins at columns of the padded batch"
    if getattr(text, "max_position_embeddings", None) in range(1, _COLUMNS + _MORE_COLUMNS):
        return f"the context is shorter than the {_COLUMNS + _MORE_COLUMNS} tokens of the trial of its first use"
    kinds = {*_rope_types(getattr(text, "rope_parameters", None))} & {*_OF_LENGTH}
    if mode != "padded" and kinds:
        return f"RoPE of the kind {kinds.pop()!r} depends on the longest position of a forward"
    if mode != "padded" and any(hasattr(x, "neftune_noise_alpha") for x in modules):
        return "NEFTune's noise depends on the number of columns"
    if mode != "tree":
        return None
    if isinstance(getattr(text, "attention_chunk_size", None), int):
        return "attention in chunks of columns"
    if any(isinstance(x, nn.Conv1d) for x in modules):
        return "layers with a state that goes from one sequence to the next"
    parameters = inspect.signature(forward).parameters
    if "position_ids" not in parameters or not any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return "its forward takes no position_ids, or no further arguments for its attention"
    return None


def _by_trial(
    modes: Sequence[str], trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs, dtype: torch.dtype
) -> Verdicts:
    """Run the synthetic rows in each of `modes`, and in the padded forward."""
    found: Verdicts = {}
    sharded = any(hasattr(x, "ds_status") or hasattr(x, "device_mesh") for x in trunk.parameters())
    sharded = sharded or any(hasattr(x, "_fsdp_wrapped_module") for x in trunk.modules())
    eager = torch.compiler.set_stance("force_eager")  # compiled layers would be compiled for the trial's shapes
    with eager, torch.inference_mode(False), torch.set_grad_enabled(not sharded), evaluating(trunk):
        trial = _Trial(trunk, forward, inputs)
        want = trial.run("padded", trial.ways("padded")[0], parts=1)
        wider = trial.run("padded", trial.ways("padded")[0], parts=1, more_columns=_MORE_COLUMNS)
        rounding = [max(_off(a, b), torch.finfo(dtype).eps) for a, b in zip(wider, want, strict=True)]
        allowed = [max(_ROUNDING * x, 1e-5) for x in rounding]
        for mode in modes:
            for way in trial.ways(mode):
                found[mode] = trial.verdict(mode, way, want, allowed)
                if isinstance(found[mode], Way):
                    break
    return found


class _Trial:
    """Synthetic rows of a model, padded on both sides: a tree of depth three with two roots, of unequal lengths."""

    def __init__(self, trunk: nn.Module, forward: Callable[..., Any], like: TrunkInputs) -> None:
        """`like`: inputs of a call, whose names the synthetic inputs have."""
        self.trunk, self.forward = trunk, forward
        config: Any = trunk.config
        special = {x for name, x in _numbers(config.to_dict()) if name.endswith(("_token_id", "_token_index"))}
        usable = [x for x in range(min(text_config(trunk).vocab_size, 4096)) if x not in special]
        ids = torch.tensor([[usable[(7 * r + 13 * c + 5) % len(usable)] for c in range(_COLUMNS)] for r in range(5)])
        ids[1, :6], ids[2, :9], ids[4, :4] = ids[0, :6], ids[1, :9], ids[3, :4]
        columns = torch.arange(_COLUMNS)
        first, last = torch.tensor([[1], [1], [1], [0], [0]]), torch.tensor([[12], [14], [11], [9], [10]])
        mask = (columns >= first) & (columns < last)
        self.needed = mask & (columns >= 3) & (columns < last - 1)
        per_token = {name: ids % 2 for name in like.per_token if name != "position_ids"}
        if "position_ids" in like.per_token:
            per_token["position_ids"] = (columns - first).clamp(min=0)
        device = like.ids.device
        per_token = {name: x.to(device, like.per_token[name].dtype) for name, x in per_token.items()}
        self.inputs = TrunkInputs(ids.to(device), mask.long().to(device), per_token, like.constants)
        self.parameters = [x for x in trunk.parameters() if x.requires_grad and x.numel() <= _SMALL]
        self.segments: Segments | None = None

    def ways(self, mode: str) -> list[Way]:
        """Return the ways to call the model that are tried for layout `mode`, the best first."""
        takes = "position_ids" in inspect.signature(self.forward).parameters
        if "position_ids" in self.inputs.per_token:
            found = [Way("given")]
        elif mode == "padded" or not takes:
            found = [Way("none")]
        else:
            found = [Way("column"), Way("depth"), *([] if mode == "tree" else [Way("none")])]
        fits = has_varlen(attention_of(self.trunk), self.inputs.ids.device, _dtype(self.trunk))
        return [replace(way, varlen=True) for way in found if mode == "tree" and fits] + found

    def run(self, mode: str, way: Way, *, parts: int = 2, more_columns: int = 0) -> list[Tensor]:
        """Return [hidden states (n, H) of the needed cells, gradients (m,)], computed in `parts` forwards."""
        inputs = self.inputs.wider(more_columns) if more_columns else self.inputs
        needed = nn.functional.pad(self.needed, (0, more_columns))
        cells = inputs.on_cpu(needed)
        hidden: dict[int, Tensor] = {}
        for part in torch.arange(5).tensor_split(parts):
            chosen = torch.isin(torch.arange(5), part)
            rows = cells.rows(chosen, padded=mode == "padded", by_column=way.positions == "column")
            layout = (layouts.tree if mode == "tree" else layouts.by_rows)(rows, graph=True)
            output, segments = run_layout(self.trunk, self.forward, inputs, layout, way)
            self.segments = segments or self.segments
            flat = output.last_hidden_state.flatten(0, 1)
            length = inputs.ids.shape[1]
            at = (layout.cells // length * _COLUMNS + layout.cells % length).tolist()
            hidden |= dict(zip(at, flat[layout.tokens.to(flat.device)], strict=True))
        read = torch.stack([hidden[i] for i in self.needed.reshape(-1).nonzero().squeeze(1).tolist()])
        return [read.detach(), self._gradients(read)]

    def _gradients(self, read: Tensor) -> Tensor:
        if not self.parameters or not read.requires_grad:
            return read.new_zeros(1)
        cotangent = torch.randn(read.shape, generator=torch.Generator().manual_seed(0)).to(read)
        found = torch.autograd.grad(read, self.parameters, cotangent, allow_unused=True)
        return torch.cat([x.flatten().float() for x in found if x is not None] or [read.new_zeros(1)])

    def verdict(self, mode: str, way: Way, want: Sequence[Tensor], allowed: Sequence[float]) -> Way | str:
        """Return `way`, with what a tree's forward has shown, if `mode` is exact in it, else the reason."""
        try:
            got = self.run(mode, way)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return _described(error)
        if mode == "tree":
            seen = self.segments
            if seen is None or not seen.consumed:
                return "its attention is not looked up in transformers' table, so it sees no segments"
            window = _window(self.trunk)
            kinds = getattr(text_config(self.trunk), "layer_types", None)
            windows = list(kinds).count("sliding_attention") if kinds else seen.consumed
            told = window is None or seen.windows >= windows
            way = replace(way, layers=seen.consumed, longest=None if told else window)
        for name, a, b, most in zip(("hidden states", "gradients"), got, want, allowed, strict=True):
            if not (off := _off(a, b)) <= most:
                return f"{name} are off by {off:.1g} of their length from the padded forward's"
        return way


def _window(trunk: nn.Module) -> int | None:
    """Sliding window of the layers of `trunk` in tokens, or None."""
    found = getattr(text_config(trunk), "sliding_window", None)
    return found if isinstance(found, int) else None


def _described(error: Exception) -> str:
    return f"its trial raised {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _off(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`."""
    if got.shape != want.shape:
        return float("inf")
    return ((got - want).double().norm() / want.double().norm().clamp(min=1e-30)).item()


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, x in fields.items():
        if isinstance(x, dict):
            yield from _numbers(x)
        elif isinstance(x, int) and not isinstance(x, bool):
            yield str(name), x


def _rope_types(parameters: Any) -> Iterator[str]:
    """Kinds of RoPE of a config's ``rope_parameters``, one for all layers or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters["rope_type"]
    for x in parameters.values():
        yield from _rope_types(x)


def _dtype(trunk: nn.Module) -> torch.dtype:
    """Precision of the trunk's products."""
    found = next(x for x in trunk.parameters() if x.is_floating_point())
    kind = found.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else found.dtype
