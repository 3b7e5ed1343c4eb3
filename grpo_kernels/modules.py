"""A head that scores: `LMHeadLogProb`, and `attach` for the head that a model has already.

FSDP2 and DeepSpeed ZeRO-3 divide parameters over ranks and make them whole around the forward of the module that owns
them. Who reads ``lm_head.weight`` from outside gets a part of it; and ``weight.full_tensor()`` is a copy whose gradient
no rank adds to another's. A method of the head that has those hooks around it sees the whole weight, in the forward and
in the backward, and its gradient goes where that of ``lm_head(hidden)`` would go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_kernels.config import LossConfig
from grpo_kernels.head_parameters import divided_modules, linear_of, parameters_of
from grpo_kernels.logprob import linear_logprob_with
from grpo_kernels.loss import LossOutput, grpo_loss

Compute = Callable[[Tensor], tuple[Tensor, ...]]

_METHODS = ("logprobs", "loss")
_HOOKED = "_grpo_kernels_hooked"  # the head's attribute that FSDP2's hooks are put around


class LMHeadLogProb(nn.Linear):
    """A language model's head that also scores: drop-in for its ``nn.Linear``, with the same arguments and state dict.

    ``head(hidden)`` are the logits. `logprobs` and `loss` never build them, and are right wherever the head's
    parameters are plain, or divided by FSDP2 (the head as a unit of its own, in a unit with other modules, or within
    the forward of the unit it belongs to) or DeepSpeed ZeRO-3. Tensor parallel heads: pass ``process_group=``.
    """

    def logprobs(
        self,
        hidden: Tensor,  # (..., H)
        ids: Tensor,  # (...)
        *,
        entropy: bool = True,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`linear_logprob` with this head: log-probabilities (...) and entropies (...), both differentiable.

        Args:
            hidden: hidden states that predict `ids` (aligned: nothing is shifted here).
            ids: integers in [0, V) where the mask counts.
            entropy: whether to compute the entropy; the second result is None if not.
            options: the other arguments of `linear_logprob` but bias: mask, temperature, engine, process_group, ...

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        if "outputs" in options:
            raise TypeError("logprobs() got an unexpected keyword argument 'outputs'; linear_logprob_with has it")
        options["outputs"] = ("entropy",) if entropy else ()
        found = _score(self, hidden, linear_logprob_with, (ids,), options)
        return found["logps"], found.get("entropy")

    def loss(
        self,
        hidden: Tensor,  # (B, T, H), or packed (N, H)
        completion_ids: Tensor,  # (B, T) or (N,)
        completion_mask: Tensor | None,  # (B, T) or (N,)
        advantages: Tensor,  # (B,) or (B, T) or (N,)
        *,
        config: LossConfig | None = None,
        **options: Any,
    ) -> LossOutput:
        """`grpo_loss` with this head; shapes, results and errors as there.

        FSDP2's mixed precision casts the hidden states, as those of any forward, but neither the other arguments nor
        the results: log-probabilities and advantages keep their precision.

        Args:
            hidden, completion_ids, completion_mask, advantages, config: as in `grpo_loss`.
            options: its other arguments but bias: old_per_token_logps, num_items_in_batch, engine, process_group, ...
        """
        options["config"] = config
        return _score(self, hidden, grpo_loss, (completion_ids, completion_mask, advantages), options)


def attach(lm_head: nn.Module) -> LMHeadLogProb:
    """Give an existing head the methods of `LMHeadLogProb`: ``attach(model.lm_head).loss(hidden, ids, ...)``.

    Nothing else changes: same object, class, forward and state dict. It may be called before or after ``fully_shard``
    and ``deepspeed.initialize``.

    Args:
        lm_head: an ``nn.Linear``, or PEFT's LoRA layer around one. Of the latter, `logprobs` and `loss` take the base
            weight and the adapters that are active at the time, in their low-rank form.

    Returns:
        `lm_head` itself; to a type checker it is a `LMHeadLogProb`.

    Raises:
        TypeError: another kind of module, or a linear layer with a forward of its own.
    """
    if not isinstance(lm_head, LMHeadLogProb):
        for module in (lm_head, linear_of(lm_head)):
            if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's changes no number
                raise TypeError(
                    "lm_head: expected an nn.Linear with its own forward, got one whose forward was replaced"
                )
        for name in _METHODS:
            setattr(lm_head, name, partial(getattr(LMHeadLogProb, name), lm_head))
    return cast(LMHeadLogProb, lm_head)


def _score(head: nn.Module, hidden: Tensor, function: Callable[..., Any], args: tuple[Any, ...], options: Any) -> Any:
    """``function(hidden, weight, *args, **options)`` with the head's parameters, which are whole meanwhile."""
    if options.get("bias") is not None:
        raise ValueError("bias: expected None, since it is lm_head's own, got another")
    done: list[Any] = []

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        weight, options["bias"], adapter = parameters_of(head, hidden)
        if adapter is not None:
            if options.get("lora") is not None:
                raise ValueError("lora: expected None, since PEFT's adapters are taken from lm_head, got a LoRA")
            options["lora"] = adapter
        found = function(hidden, weight, *args, **options)
        if isinstance(found, LossOutput):
            done.append(found)
            return (found.loss,)
        done.append({name: x.clone() for name, x in found.items()})  # no views: FSDP2 warns of them
        return tuple(done[0].values())

    if _is_fsdp_module(head):
        # FSDP2's mixed precision rounds what it finds among the arguments and results of a forward: old
        # log-probabilities, advantages. It does not look into a function. Results it has to see, to hook the backward
        # to them; it may return others, rounded, and those are not used.
        if _HOOKED not in vars(head):
            from torch.distributed.fsdp import register_fsdp_forward_method

            setattr(head, _HOOKED, _call)
            register_fsdp_forward_method(head, _HOOKED)
        getattr(head, _HOOKED)(hidden, compute)
        return done[0]
    divided = divided_modules(head)
    if not divided:
        compute(hidden)
        return done[0]
    results = within_forwards(divided, compute, hidden)  # ZeRO-3 hooks the backward to tensors of its own
    if isinstance(done[0], LossOutput):
        return replace(done[0], loss=results[0])
    return dict(zip(done[0], results, strict=True))


def _call(hidden: Tensor, compute: Compute) -> tuple[Tensor, ...]:
    return compute(hidden)


def _is_fsdp_module(head: nn.Module) -> bool:
    """Whether FSDP2 has made `head` a unit; does not import it (a second) where nothing is distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, FSDPModule)


def within_forwards(modules: Sequence[nn.Module], compute: Compute, hidden: Tensor) -> tuple[Tensor, ...]:
    """``compute(hidden)`` in the place of the forward of each of `modules`, so that the hooks around them run.

    ZeRO-3's make the parameters whole for the forward, for the backward, and until their gradients are accumulated.
    """
    if not modules:
        return compute(hidden)
    first, others = modules[0], modules[1:]
    own = vars(first).get("forward")  # what is there already, such as accelerate's
    first.forward = partial(within_forwards, others, compute)
    try:
        return first(hidden)
    finally:
        del first.forward
        if own is not None:
            first.forward = own
