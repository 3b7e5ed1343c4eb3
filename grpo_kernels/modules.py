"""A head that scores: `LMHeadLogProb`, and `attach` for the head that a model has already.

FSDP2 and DeepSpeed ZeRO-3 divide parameters over ranks and make them whole around the forward of the module that owns
them. Code that reads ``lm_head.weight`` from outside gets a part of it; and ``weight.full_tensor()`` is a copy whose
gradient is not summed over the ranks. A method of the head with those hooks around it sees the whole weight, in the
forward and in the backward, and its gradient goes where that of ``lm_head(hidden)`` would go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.call.output import LossOutput
from grpo_kernels.config import LossConfig
from grpo_kernels.divergence import linear_divergence_with
from grpo_kernels.head.hooks import check_hooks, run_pre_hooks
from grpo_kernels.head.module import constants_of, divided_modules, linear_of, parameters_of
from grpo_kernels.head.reference import ReferenceHead
from grpo_kernels.logprob import linear_logprob_with
from grpo_kernels.loss import grpo_loss
from grpo_kernels.topk_divergence import topk_divergence_with

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import (
        DivergenceKeywords,
        DivergenceWithKeywords,
        LogprobKeywords,
        LossKeywords,
        TopKWithKeywords,
    )

Compute = Callable[[Tensor], tuple[Tensor, ...]]


class _Scores(nn.Module):
    """Methods that score; in the class, not on the object, so that a copy or a replica scores with its own weight."""

    @overload
    def logprobs(
        self, hidden: Tensor, ids: Tensor, *, entropy: Literal[True] = ..., **options: Unpack[LogprobKeywords]
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def logprobs(
        self, hidden: Tensor, ids: Tensor, *, entropy: Literal[False], **options: Unpack[LogprobKeywords]
    ) -> tuple[Tensor, None]: ...

    @overload
    def logprobs(
        self, hidden: Tensor, ids: Tensor, *, entropy: bool, **options: Unpack[LogprobKeywords]
    ) -> tuple[Tensor, Tensor | None]: ...

    def logprobs(
        self,
        hidden: Tensor,  # (..., H)
        ids: Tensor,  # (...)
        *,
        entropy: bool = True,
        **options: Unpack[LogprobKeywords],
    ) -> tuple[Tensor, Tensor | None]:
        """`linear_logprob` with this head: log-probabilities (...) and entropies (...), both differentiable.

        Args:
            hidden: (..., H), hidden states that predict `ids` (aligned: nothing is shifted here).
            ids: (...) integers in [0, V) where the mask counts.
            entropy: whether to compute the entropy; the second result is None if not.
            options: the other arguments of `linear_logprob` but bias: mask, temperature, engine, process_group, ...

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        if "outputs" in options:
            raise TypeError("logprobs() got an unexpected keyword argument 'outputs'; linear_logprob_with has it")
        passed = {**options, "outputs": ("entropy",) if entropy else ()}
        found = _score(self, hidden, linear_logprob_with, (ids,), passed)
        return found["logps"], found.get("entropy")

    def loss(
        self,
        hidden: Tensor,  # (B, T, H), or packed (N, H)
        completion_ids: Tensor,  # (B, T) or (N,)
        completion_mask: Tensor | None,  # (B, T) or (N,)
        advantages: Tensor,  # (B,) or (B, T) or (N,)
        *,
        config: LossConfig | None = None,
        **options: Unpack[LossKeywords],
    ) -> LossOutput:
        """`grpo_loss` with this head; shapes, results and errors as there.

        FSDP2's mixed precision casts the hidden states, as those of any forward, but neither the other arguments nor
        the results: log-probabilities and advantages keep their precision.

        Args:
            hidden: (B, T, H), or packed (N, H).
            completion_ids, completion_mask: (B, T) or (N,).
            advantages: (B,), (B, T) or (N,).
            config: as in `grpo_loss`, and so are the others.
            options: its other arguments but bias: old_per_token_logps, num_items_in_batch, engine, process_group, ...
                The head of a `reference` may be a module: ``ReferenceHead(ref_hidden, ref_model.lm_head)``.
        """
        args = completion_ids, completion_mask, advantages
        out: LossOutput = _score(self, hidden, grpo_loss, args, {**options, "config": config})
        return out

    def topk_divergence(
        self,
        hidden: Tensor,  # (..., H)
        teacher_ids: Tensor,  # (..., K)
        teacher_logps: Tensor,  # (..., K)
        **options: Unpack[TopKWithKeywords],
    ) -> dict[str, Tensor]:
        """`topk_divergence_with` with this head: ``"divergence"`` (...), differentiable, and what `outputs` asks for.

        Args:
            hidden: (..., H).
            teacher_ids, teacher_logps: (..., K), as there.
            options: its other arguments but bias: divergence, tail, mask, temperature, outputs, ...
        """
        found: dict[str, Tensor] = _score(self, hidden, topk_divergence_with, (teacher_ids, teacher_logps), options)
        return found

    def divergence(
        self,
        hidden: Tensor,  # (..., H)
        teacher_hidden: Tensor,  # (..., H')
        teacher_head: nn.Module,
        **options: Unpack[DivergenceKeywords],
    ) -> Tensor:
        """`linear_divergence` with this head as the student's: the divergence of each position, (...).

        Args:
            hidden, teacher_hidden: (..., H) and (..., H'), hidden states of the same positions.
            teacher_head: a head that `attach` takes, without active adapters; a constant. If FSDP2 or ZeRO-3 has
                divided it, it is gathered for this call, which all ranks that share it must then make.
            options: the other arguments of `linear_divergence` but the biases: mask, divergence, beta, ...

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        if "outputs" in options or "ids" in options:
            raise TypeError("divergence() got an unexpected keyword argument: divergence_with has 'outputs' and 'ids'")
        return self.divergence_with(hidden, teacher_hidden, teacher_head, **options)["divergence"]

    def divergence_with(
        self,
        hidden: Tensor,  # (..., H)
        teacher_hidden: Tensor,  # (..., H')
        teacher_head: nn.Module,
        **options: Unpack[DivergenceWithKeywords],
    ) -> dict[str, Tensor]:
        """`linear_divergence_with` with this head as the student's: ``"divergence"`` and `outputs`, each (...).

        Args:
            hidden, teacher_hidden, teacher_head: (..., H), (..., H') and a head, as in `divergence`.
            options: the other arguments of `linear_divergence_with` but the biases.

        Raises:
            TypeError, ValueError: a wrong argument; the message names it.
        """
        if options.get("teacher_bias") is not None:
            raise ValueError("teacher_bias: expected None, since it is teacher_head's own, got another")
        found: dict[str, Tensor] = _score(self, hidden, _diverge, (teacher_hidden, teacher_head), options)
        return found


class LMHeadLogProb(_Scores, nn.Linear):
    """A language model's head that also scores: drop-in for its ``nn.Linear``, with the same arguments and state dict.

    ``head(hidden)`` are the logits. `logprobs` and `loss` never build them, and are right wherever the head's
    parameters are plain, parametrized, made by a hook before the forward (``spectral_norm``, ``prune``), or divided by
    FSDP2 (the head as a unit of its own, in a unit with other modules, or within the forward of the unit it belongs to)
    or DeepSpeed ZeRO-3. Tensor parallel heads: pass ``process_group=``. Forward and backward hooks, which would be
    handed logits, are refused with a TypeError.
    """


class _Attached(_Scores):
    """Base that `_attached` puts before a head's class; copies and pickles are of that class, attached again."""

    _before: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if "_before" not in vars(type(self)):  # a subclass of the attached class, such as a parametrized one
            return made
        return _reattached, (self._before,), *made[2:]


def _attached_class(lm_head: nn.Module) -> type[nn.Module]:
    cls: Any = type(lm_head)
    if is_parametrized(lm_head) and len(cls.__bases__) == 1:
        # parametrization made a class for this object alone; `remove_parametrizations` removes it, so it stays in front
        own = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        return type(cls.__name__, (_attached(cls.__bases__[0]),), own)
    return _attached(cls)


@cache
def _attached(cls: Any) -> type[nn.Module]:  # Any: to mypy a class of modules is not hashable
    if cls is nn.Linear:
        return LMHeadLogProb
    names = {"_before": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Attached, cls), names)


def _reattached(cls: Any) -> Any:
    return cls.__new__(_attached(cls))


def attach(lm_head: nn.Module) -> LMHeadLogProb:
    """Give an existing head the methods of `LMHeadLogProb`: ``attach(model.lm_head).loss(hidden, ids, ...)``.

    Object, forward and state dict stay the same; the object's class becomes a subclass of its old class, so that copies
    and replicas score with their own weight. Call it before or after ``fully_shard`` and ``deepspeed.initialize``.

    Args:
        lm_head: an ``nn.Linear``, or PEFT's LoRA layer around one. From a LoRA layer `logprobs` and `loss` take the
            base weight and the adapters that are active at the time of the call, in their low-rank form.

    Returns:
        `lm_head` itself; to a type checker it is a `LMHeadLogProb`.

    Raises:
        TypeError: another kind of module, a linear layer with a forward of its own, or hooks that would be handed
            logits. `logprobs` and `loss` check again.
    """
    _check(lm_head)
    if not isinstance(lm_head, _Scores):
        lm_head.__class__ = _attached_class(lm_head)
    return cast(LMHeadLogProb, lm_head)


def _check(lm_head: nn.Module, name: str = "lm_head") -> None:
    for module in (lm_head, linear_of(lm_head, name)):
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's changes no number
            raise TypeError(f"{name}: expected an nn.Linear with its own forward, got one whose forward was replaced")
    check_hooks(lm_head, name)


def _check_present(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise if accelerate has offloaded the weight until the head's own forward."""
    linear = linear_of(lm_head, name)
    if hasattr(linear, "_hf_hook") and linear.weight.is_meta:
        raise ValueError(
            f"{name}: expected its weight on a device, got it offloaded by accelerate: leave the head on a device "
            "(device_map), or use causal_lm_loss and completion_logprobs of grpo_kernels.integrations.transformers, "
            "which score within its forward"
        )


def _score(head: nn.Module, hidden: Tensor, function: Callable[..., Any], args: tuple[Any, ...], options: Any) -> Any:
    """Return ``function(hidden, weight, *args, **options)`` of the head's parameters, made whole for the call."""
    if options.get("bias") is not None:
        raise ValueError("bias: expected None, since it is lm_head's own, got another")
    _check(head)
    _check_present(head)
    done: list[Any] = []

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        if not hooks_have_run:
            hidden = run_pre_hooks(head, hidden)
        weight, options["bias"], adapter = parameters_of(head, hidden)
        if adapter is not None:
            if options.get("lora") is not None:
                raise ValueError("lora: expected None, since PEFT's adapters are taken from lm_head, got a LoRA")
            options["lora"] = adapter
        with _reference_of(options, hidden) as reference:
            found = function(hidden, weight, *args, **options, **reference)
        if isinstance(found, LossOutput):
            done.append(found)
            return (found.loss,)
        done.append({name: x.clone() for name, x in found.items()})  # no views: FSDP2 warns of them
        return tuple(done[0].values())

    hooks_have_run = is_fsdp_unit(head) or head in divided_modules(head)  # `within_forwards` calls it
    results = within_head(head, compute, hidden)
    if isinstance(done[0], LossOutput):
        return replace(done[0], loss=results[0])
    return dict(zip(done[0], results, strict=True))


@contextmanager
def _reference_of(options: dict[str, Any], hidden: Tensor) -> Iterator[dict[str, Any]]:
    """Take `reference` out of `options` and yield it as keyword argument; a module in it is replaced by its tensors."""
    reference = options.pop("reference", None)
    if not (isinstance(reference, ReferenceHead) and isinstance(reference.weight, nn.Module)):
        yield {} if reference is None else {"reference": reference}
        return
    if reference.bias is not None:
        raise ValueError("reference.bias: expected None, since it is that of the module, got another")
    with _constants(reference.weight, "reference.weight", options, hidden) as (weight, bias):
        yield {"reference": replace(reference, weight=weight, bias=bias)}


def _diverge(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_head: nn.Module, **options: Any
) -> dict[str, Tensor]:
    with _constants(teacher_head, "teacher_head", options, hidden) as (teacher_weight, options["teacher_bias"]):
        return linear_divergence_with(hidden, weight, teacher_hidden, teacher_weight, **options)


@contextmanager
def _constants(
    head: nn.Module, name: str, options: dict[str, Any], hidden: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the whole weight and bias of the head of a reference or teacher, for a call with `options`."""
    _check(head, name)
    _check_present(head, name)
    sharded = options.get("process_group") is not None or is_dtensor(hidden)
    with constants_of(head, name, sharded=sharded) as found:
        yield found


def is_fsdp_unit(head: nn.Module) -> bool:
    """Return True if `head` is a unit of FSDP2, which is not imported (a second) where nothing is distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, FSDPModule)


def within_head(head: nn.Module, compute: Compute, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return ``compute(hidden)``, for which FSDP2 or ZeRO-3 makes the parameters of `head` whole; in the backward too.

    The results have the values and dtypes that `compute` gives; ZeRO-3's are new tensors, with its backward hooks.
    """
    if not is_fsdp_unit(head):
        return within_forwards(divided_modules(head), compute, hidden)
    # FSDP2's mixed precision rounds tensors among the arguments and results of a forward: old log-probabilities,
    # advantages. It does not look into a function, so `compute` holds the arguments. It must see the results, to hook
    # the backward to them; the rounded results that it may return are not used.
    done: list[tuple[Tensor, ...]] = []

    def noted(hidden: Tensor) -> tuple[Tensor, ...]:
        done.append(compute(hidden))
        return done[0]

    # The module is called, since `register_fsdp_forward_method` of torch 2.11 begins a unit of several modules anew.
    within_forwards([head], noted, hidden)
    return done[0]


def within_forwards(modules: Sequence[nn.Module], compute: Compute, hidden: Tensor) -> tuple[Tensor, ...]:
    """Run ``compute(hidden)`` in the place of the forward of each of `modules`, so that the hooks around them run.

    ZeRO-3's hooks make the parameters whole for the forward, and from the backward until gradients are accumulated.
    """
    if not modules:
        return compute(hidden)
    first, others = modules[0], modules[1:]
    own = vars(first).get("forward")  # a forward that was set on the object, such as accelerate's
    first.forward = partial(within_forwards, others, compute)
    try:
        return first(hidden)
    finally:
        del first.forward
        if own is not None:
            first.forward = own
