"""The head of a transformers model: the module, and what the model's forward makes of that module's output.

transformers' models differ in what they do to logits after the projection: a factor (Cohere, Falcon-H1, Granite), a
soft-cap (the Gemma family), padding rows cut off (Inkling). Their configs name these numbers in a dozen ways, and one
name means a factor in one model, a divisor in a second, and in a third a divisor of the hidden states. So the config
is only a first guess, and the model's own code decides, in its first forward: `head_check`.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kernels.head.config_numbers import scale_and_cap
from grpo_kernels.head.module import gather_of, linear_of, parameters_of

# Names under which wrappers hold the model: torch.compile, Lightning's Fabric, DDP, PEFT
_WRAPPED = ("_orig_mod", "_forward_module", "module", "base_model", "model", "pretrained_model")

Constants = tuple[float, float | None, int | None]
# head -> (the config's constants at the time, the measured ones, True if a row of logits has been compared too)
_known: weakref.WeakKeyDictionary[nn.Module, tuple[Constants, Constants, bool]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class HeadSpec:
    """Description of how a model turns its head's hidden states into logits.

    ``softcap(logit_scale * (hidden @ weight.T + bias + lora))[:vocab_size]``, ``softcap(x) = cap * tanh(x / cap)``.
    Whatever the model does to the hidden states before its head stays the model's: the head is given the result.

    Attributes:
        module: the head. Its parameters are read at each use; sharded ones are whole only within its forward.
        logit_scale: factor on the logits.
        final_logit_softcapping: the cap, or None.
        vocab_size: number of the head's rows that are tokens, or None for all.
    """

    module: nn.Module
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    vocab_size: int | None = None

    @property
    def weight(self) -> Tensor:
        """(V, H)."""
        return linear_of(self.module).weight

    @property
    def bias(self) -> Tensor | None:
        """(V,), or None."""
        return linear_of(self.module).bias

    @property
    def constants(self) -> Constants:
        """Return the constants that turn the projection into logits."""
        return self.logit_scale, self.final_logit_softcapping, self.vocab_size

    @property
    def constant_options(self) -> dict[str, Any]:
        """Return the constants as keyword arguments of `linear_logprob`."""
        scale, cap, vocab_size = self.constants
        return {"logit_scale": scale, "final_logit_softcapping": cap, "vocab_size": vocab_size}

    def logits(self, projected: Tensor) -> Tensor:
        """The logits (..., vocab_size) of a projection (..., V)."""
        scaled, cap = self.logit_scale * projected[..., : self.vocab_size], self.final_logit_softcapping
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    def tensors(self, hidden: Tensor) -> dict[str, Any]:
        """Return the tensors as `linear_logprob_with` and `grpo_loss` take them; call it in the head's forward."""
        weight, bias, lora = parameters_of(self.module, hidden)
        gather = gather_of(self.module.parameters())  # for the backward
        return {"weight": weight, "bias": bias, "lora": lora, **({} if gather is None else {"gather": gather})}

    def options(self, hidden: Tensor) -> dict[str, Any]:
        """Return the tensors for `hidden` (..., H) and the constants, as keyword arguments of `linear_logprob_with`."""
        return {**self.tensors(hidden), **self.constant_options}


def describe_head(model: nn.Module) -> HeadSpec:
    """Describe the head of a causal language model: text or vision-language, wrapped (PEFT, DDP, FSDP2) or not.

    Before this library has run the model, the constants are the config's; afterwards they are those measured.

    Raises:
        TypeError: not a transformers model, an encoder-decoder model, or a head that is not one linear layer; the
            message says what was found.
    """
    return known_head(model)[0]


def known_head(model: nn.Module) -> tuple[HeadSpec, bool]:
    """Return `describe_head`'s head, and True if it was compared with the model's logits under its present config."""
    base = causal_lm(model)
    if "decoder_input_ids" in inspect.signature(type(base).forward).parameters:
        raise TypeError(
            f"model: expected a model of one sequence, prompt and completion, got {type(base).__name__}, an "
            "encoder-decoder model: call linear_logprob or grpo_loss with its decoder's hidden states and ids"
        )
    head = base.get_output_embeddings()
    if head is None:
        raise TypeError(f"model: expected a causal language model, got {type(base).__name__}, which names no head")
    head = inner_head(head)
    linear_of(head)
    guess = _from_config(base, head)
    at_the_time, found, compared = _known.get(head, (None, guess.constants, False))
    return (HeadSpec(head, *found), compared) if at_the_time == guess.constants else (guess, False)


def remember(model: nn.Module, head: HeadSpec, compared: bool) -> None:
    """Let `describe_head` return `head` from now on; `compared` as in `known_head`."""
    _known[head.module] = _from_config(causal_lm(model), head.module).constants, head.constants, compared


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model within PEFT, DDP, DeepSpeed, Fabric or torch.compile.

    Raises:
        TypeError: there is none.
    """
    return unwrapped(model)[1]


def unwrapped(model: nn.Module) -> tuple[list[nn.Module], PreTrainedModel]:
    """(the wrappers around the transformers model, from the outside in; that model).

    Raises:
        TypeError: as `causal_lm`.
    """
    wrappers, inner = [], model
    while not isinstance(inner, PreTrainedModel):
        children = inner._modules if isinstance(inner, nn.Module) else {}
        found = next((children[name] for name in _WRAPPED if children.get(name) is not None), None)
        if found is None:
            raise TypeError(f"model: expected a transformers model, wrapped or not, got {type(model).__name__}")
        wrappers.append(inner)
        inner = found
    return wrappers, inner


def inner_head(head: nn.Module) -> nn.Module:
    """The module that projects: `head`, or the copy of it that PEFT trains (`modules_to_save`)."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    wrapper: Any = head
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return copies[active[0]] if active else wrapper.original_module


def _from_config(base: PreTrainedModel, head: nn.Module) -> HeadSpec:
    config = base.config.get_text_config(decoder=True)
    return HeadSpec(head, *scale_and_cap(lambda name: getattr(config, name, None)))
