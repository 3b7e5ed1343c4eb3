"""Which keyword arguments a model takes: transformers' forwards let every other one vanish in their ``**kwargs``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator

import transformers.utils
from torch import nn

from grpo_kernels.base.checks import did_you_mean
from grpo_kernels.config import LossConfig
from grpo_kernels.integrations.transformers.head import unwrapped

# What every forward with **kwargs takes: the fields of TransformersKwargs (older releases have fewer, or none), and
# what transformers' decorators of a forward read. num_items_in_batch is the loss's: no model reads it without labels.
DOCUMENTED = {"position_ids", "output_hidden_states", "output_attentions", "output_router_logits", "is_causal"}
DOCUMENTED |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
DOCUMENTED |= {"use_cache", "return_dict", "cache_position"}
DOCUMENTED |= {*getattr(getattr(transformers.utils, "TransformersKwargs", None), "__annotations__", ())}
DOCUMENTED -= {"num_items_in_batch"}

_OF_LOSS_CONFIG = {field.name for field in dataclasses.fields(LossConfig)}


def check_names(model: nn.Module, given: Collection[str], others: Collection[str], takers: str) -> None:
    """Raise unless somebody reads each of the names `given` as arguments of the model.

    Args:
        others: names that the caller itself takes, to suggest them.
        takers: what the caller serves beside the model, for the message: " or the loss", or nothing.

    Raises:
        TypeError: a name that is a parameter of no forward around the model, of the model or of its body, and not
            `DOCUMENTED`; or that is a field of `LossConfig`.
    """
    if not given:
        return
    wrappers, base = unwrapped(model)
    known = {name for module in (*wrappers, base) for name in _named_by(module)}
    if any(x.kind is x.VAR_KEYWORD for x in inspect.signature(type(base).forward).parameters.values()):
        known |= DOCUMENTED.union(_named_by(base.base_model))  # to which its **kwargs go on
    for name in given:
        expected = f"{name}: expected an input of {type(base).__name__}{takers}, got"
        if name in _OF_LOSS_CONFIG:
            raise TypeError(f"{expected} a field of LossConfig: set it on the loss, GRPOLoss({name}=...)")
        if name not in known:
            hint = did_you_mean(name, sorted({*known, *others}))
            raise TypeError(f"{expected} a name that nothing there reads{hint}")


def _named_by(module: nn.Module) -> Iterator[str]:
    """The parameters of a forward that have a name of their own."""
    for forward in (type(module).forward, module.forward):  # the class's too: on an object it may be wrapped
        for name, x in inspect.signature(forward).parameters.items():
            if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and name != "self":
                yield name
    yield from getattr(module, "special_peft_forward_args", ())  # which PEFT takes out of its **kwargs
