"""A head that scores: `LMHeadLogProb`, and `attach` for the head that a model has already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from grpo_kernels.divergence import linear_divergence
from grpo_kernels.head.forward import check_module
from grpo_kernels.head.head import HeadLike
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.loss import grpo_loss
from grpo_kernels.topk_divergence import topk_divergence

P = ParamSpec("P")
T = TypeVar("T")


def _method(
    function: Callable[Concatenate[Tensor, HeadLike, P], T],
) -> Callable[Concatenate[Any, Tensor, P], T]:
    """Return a call as a method of a head, which takes its second place."""

    @functools.wraps(function)
    def method(self: Any, hidden: Tensor, *args: P.args, **options: P.kwargs) -> T:
        return function(hidden, self, *args, **options)

    hidden, _, *others = inspect.signature(function).parameters.values()
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = inspect.signature(function).replace(parameters=[this, hidden, *others])  # type: ignore[attr-defined]
    method.__doc__ = (
        f"`{function.__name__}` with this head; arguments, results and errors as there."
    )
    return method


class _Scores(nn.Module):
    """Methods that score; in the class, not on the object, so that a copy or a replica scores with its own weight."""

    logprobs = _method(linear_logprob)
    loss = _method(grpo_loss)
    divergence = _method(linear_divergence)
    topk_divergence = _method(topk_divergence)


class LMHeadLogProb(_Scores, nn.Linear):
    """A language model's head that also scores: drop-in for its ``nn.Linear``, with the same arguments and state dict.

    ``head(hidden)`` are the logits. `logprobs` and `loss` never build them, and are right wherever the head's
    parameters are plain, parametrized, made by a hook before the forward (``spectral_norm``, ``prune``), or divided by
    FSDP2 (the head as a unit of its own, in a unit with other modules, or within the forward of the unit it belongs to)
    or DeepSpeed ZeRO-3. A head with a soft-cap, or divided over a group of ranks, is a `Head` around the module, which
    the functions take: ``grpo_loss(hidden, Head(lm_head, process_group=group), ...)``. Forward and backward hooks,
    which would be handed logits, are refused with a TypeError.
    """


class _Attached(_Scores):
    """Base that `_attached` puts before a head's class; copies and pickles are of that class, attached again."""

    _before: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if "_before" not in vars(
            type(self)
        ):  # a subclass of the attached class, such as a parametrized one
            return made
        return _reattached, (self._before,), *made[2:]


def _attached_class(lm_head: nn.Module) -> type[nn.Module]:
    cls: Any = type(lm_head)
    if is_parametrized(lm_head) and len(cls.__bases__) == 1:
        # parametrization made a class for this object alone; `remove_parametrizations` removes it, so it stays in front
        attributes = {
            name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")
        }
        return type(cls.__name__, (_attached(cls.__bases__[0]),), attributes)
    return _attached(cls)


@cache
def _attached(cls: Any) -> type[nn.Module]:  # Any: to mypy a class of modules is not hashable
    if cls is nn.Linear:
        return LMHeadLogProb
    names = {
        "_before": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
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
    check_module(lm_head)
    if not isinstance(lm_head, _Scores):
        lm_head.__class__ = _attached_class(lm_head)
    return cast(LMHeadLogProb, lm_head)
