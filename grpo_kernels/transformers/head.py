"""The head of a transformers model: the module, and what the model's forward makes of that module's output.

transformers' models differ in what they do to logits after the projection: a factor (Cohere, Falcon-H1, Granite), a
soft-cap (the Gemma family), padding rows cut off (Inkling). Their configs name these numbers in a dozen ways, and one
name means a factor in one model, a divisor in a second, and in a third a divisor of the hidden states. So the config
is only a first guess, and the model's own code decides, in its first forward: `head_check`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.body.inputs import unwrapped
from grpo_kernels.call.run import Run
from grpo_kernels.head.config_numbers import scale_and_cap
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import gather_of, linear_of, parameters_of
from grpo_kernels.loss import GRPOLoss

_FACTS = 16  # that are kept of a head
Constants = tuple[float, float | None, int | None]
# head -> facts of the call (`facts_of`) -> (the measured constants, True if a row of logits has been compared too)
_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Constants, bool]]] = (
    weakref.WeakKeyDictionary()
)


def constants_of(head: Head) -> Constants:
    """Return what a model does to the product with its `head`: scale, soft-cap, number of ids (None: all rows)."""
    return head.logit_scale, head.final_logit_softcapping, head.vocab_size


def with_constants(module: nn.Module, constants: Constants) -> Head:
    """Return the head of a model: its module, and what the model makes of the product."""
    scale, cap, vocab_size = constants
    return Head(module, vocab_size=vocab_size, final_logit_softcapping=cap, logit_scale=scale)


def logits_of(head: Head, projected: Tensor) -> Tensor:
    """The logits (..., vocab_size) of a projection (..., V)."""
    scaled, cap = head.logit_scale * projected[..., : head.vocab_size], head.final_logit_softcapping
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def read(head: Head, hidden: Tensor) -> Head:
    """Return `head` with the tensors of its module for `hidden` (..., H); call it in the module's forward."""
    weight, bias, lora = parameters_of(head.weight, hidden)
    return replace(head, weight=weight, bias=bias, lora=lora)


def gathering(head: Head, run: Run | None = None) -> Run:
    """Return `run` with what gathers the weight for the backward, if ZeRO-3 has divided the module of `head`."""
    run = Run() if run is None else run
    gather = gather_of(head.weight.parameters())
    return run if gather is None else replace(run, gather=gather)


def describe_head(model: nn.Module) -> Head:
    """The head of a causal language model: text or vision-language, wrapped (PEFT, DDP, FSDP2) or not.

    Its `weight` is the module; scale, soft-cap and number of ids are what the model makes of the product. Whatever the
    model does to the hidden states before its head stays the model's: the head is given the result.

    Before this library has run the model, the constants are the config's; afterwards they are those measured.

    Raises:
        TypeError: not a transformers model, an encoder-decoder model, or a head that is not one linear layer; the
            message says what was found.
    """
    return known_head(model)[0]


def known_head(model: nn.Module, facts: Any = None) -> tuple[Head, bool]:
    """Return `describe_head`'s head, and True if it was compared with the model's logits under the same `facts`."""
    base = causal_lm(model)
    if "decoder_input_ids" in inspect.signature(type(base).forward).parameters:
        raise TypeError(
            f"model: expected a model of one sequence, prompt and completion, got {type(base).__name__}, an "
            "encoder-decoder model: call linear_logprob or grpo_loss with its decoder's hidden states and ids"
        )
    head = type(base).get_output_embeddings(
        base
    )  # the class's, where the TRL trainer has put its own in its place
    if head is None:
        raise TypeError(
            f"model: expected a causal language model, got {type(base).__name__}, which names no head"
        )
    head = inner_head(head)
    linear_of(head)
    facts = facts_of(base, {}) if facts is None else facts
    constants, compared = _known.get(head, {}).get(facts, (_from_config(base), False))
    return with_constants(head, constants), compared


def facts_of(base: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Return what the model's logits may depend on besides its head: config, code, and single values in `inputs`."""
    inputs = {name: x for name, x in inputs.items() if name not in ("use_cache", "return_dict")}
    values = [(name, x) for name, x in inputs.items() if isinstance(x, bool | int | float | str)]
    tensors = [
        (name, x.item()) for name, x in inputs.items() if isinstance(x, Tensor) and x.numel() == 1
    ]
    code = [
        getattr(x, "__func__", x)
        for x in (type(base).forward, vars(base).get("forward"))
        if x is not None
    ]
    code = [weakref.ref(x) if isinstance(x, FunctionType) else id(x) for x in code]
    scales = [
        (name, x)
        for part in (base, base.base_model)
        for name, x in vars(part).items()
        if isinstance(x, float)
    ]
    return (
        _from_config(base),
        tuple(code),
        tuple(scales),
        tuple(sorted([*values, *tensors], key=str)),
    )


def remember(model: nn.Module, head: Head, facts: Any, compared: bool) -> None:
    """Let `known_head` return `head` under these `facts` from now on; `compared` as there."""
    known = _known.setdefault(head.weight, {})
    known[facts] = constants_of(head), compared
    if len(known) > _FACTS:  # of arguments that take a new value in each call
        del known[next(iter(known))]


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model within PEFT, DDP, FSDP1, DeepSpeed, Fabric or torch.compile.

    Raises:
        TypeError: there is none.
    """
    return unwrapped(model)[1]


def inner_head(head: nn.Module) -> nn.Module:
    """The module that projects: `head`, or the copy of it that PEFT trains (`modules_to_save`)."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    wrapper: Any = head
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return copies[active[0]] if active else wrapper.original_module


def _from_config(base: PreTrainedModel) -> Constants:
    config = base.config.get_text_config(decoder=True)
    return *scale_and_cap(lambda name: getattr(config, name, None)), None


def check_loss_fn(loss_fn: Any) -> None:
    """Raise TypeError unless `loss_fn` is a `GRPOLoss`."""
    if not isinstance(loss_fn, GRPOLoss):
        raise TypeError(f"loss_fn: expected a GRPOLoss, got {type(loss_fn).__name__}")


def moved(x: Any, like: Tensor) -> Any:
    """A tensor or kept ids on the device of `like`; anything else as it is."""
    return x.to(like.device) if isinstance(x, Tensor | KeptIds) else x
