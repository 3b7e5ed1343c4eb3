"""The seam between a model and its trunk: whose forward is replaced, and by what, in one call.

The trunk is the transformer below the head, ``model.base_model``. For the length of one scoring
call its ``forward`` is replaced by `TrunkCall.run`. The model, its head, its hooks and the wrappers
around it stay as they are, and see one forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels.base.choices import BatchLayout
from grpo_kernels.body.trunk import TrunkCall, count, say_once
from grpo_kernels.patching import Shares, forward_name, replaced

FSDP1 = "_fsdp_wrapped_module"  # the child of a FullyShardedDataParallel
# Names under which wrappers hold the model: torch.compile, Lightning's Fabric, FSDP1, DDP, PEFT
_WRAPPED = (
    *("_orig_mod", "_forward_module", FSDP1, "module"),
    *("base_model", "model", "pretrained_model"),
)
_COMPILED_COLUMNS = 64  # if layers are compiled, widths are multiples of it, so that shapes recur


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
        every = torch.ones(len(needed), dtype=torch.bool, device="cpu")
        may_have = every if live is None else live.cpu()
        multiple = _COMPILED_COLUMNS if _is_compiled(trunk.modules()) else 1
        call = TrunkCall(trunk, getattr(trunk, name), layout, may_have, needed, shares, multiple)
        with replaced(trunk, name, call.run):
            yield call.computed
        if call.was_called:
            return
        say_once(trunk, "the model's forward does not call its trunk")
    else:
        yield []
    count(shares, len(needed), len(needed), *[needed.numel()] * 3)


@contextmanager
def as_it_is(trunk: nn.Module) -> Iterator[None]:
    """Inside, `trunk` runs its own forward, also within `live_trunk`."""
    name = forward_name(trunk)
    call = getattr(getattr(trunk, name), "__self__", None)
    with replaced(trunk, name, call.forward) if isinstance(call, TrunkCall) else nullcontext():
        yield


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
