"""What is around every public call: eager mode, and a head or reference that is a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.call.results import LossOutput, Scores
from grpo_kernels.head.head import Head
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.module import (
    check_module,
    check_present,
    constants_of,
    divided_modules,
    is_fsdp_unit,
    parameters_of,
    run_pre_hooks,
    within_head,
)

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Let torch.compile break its graph at a public call, which runs eagerly."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        from grpo_kernels.call.eagerly import eagerly

        return eagerly(function, *args, **options)

    return cast(Any, call)


def takes_heads(function: F) -> F:
    """Let a public call with a `Head` of tensors take a plain weight or a module."""

    @outside_graphs
    @functools.wraps(function)
    def call(hidden: Any, head: Any, *args: Any, **options: Any) -> Any:
        head = Head.of(head)
        if not isinstance(head.weight, nn.Module):
            return function(hidden, head, *args, **options)
        return within_module(
            lambda states, whole: function(states, whole, *args, **options), hidden, head
        )

    return cast(Any, call)


def within_module(call: Callable[[Tensor, Head], Any], hidden: Tensor, head: Head) -> Any:
    """Return ``call(hidden, head)`` for a head of the parameters of its module."""
    module: nn.Module = head.weight
    check_module(module)
    check_present(module)
    if head.bias is not None:
        raise ValueError("bias: expected None, since it is lm_head's own, got another")
    done: list[Any] = []  # the result of the call
    # whether `within_forwards` calls the module, which runs its hooks
    hooks_have_run = is_fsdp_unit(module) or module in divided_modules(module)

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        if not hooks_have_run:
            hidden = run_pre_hooks(module, hidden)
        weight, bias, lora = parameters_of(module, hidden)
        if lora is not None and head.lora is not None:
            raise ValueError(
                "lora: expected None, since PEFT's adapters are taken from lm_head, got a LoRA"
            )
        output = call(hidden, replace(head, weight=weight, bias=bias, lora=lora or head.lora))
        done.append(output)
        if isinstance(output, LossOutput):
            return (output.loss,)
        return tuple(x.clone() for x in output.given.values())  # no views: FSDP2 warns of them

    results, output = within_head(module, compute, hidden), done[0]
    if isinstance(output, LossOutput):
        return replace(output, loss=results[0])
    return Scores(**dict(zip(output.given, results, strict=True)))


@contextmanager
def whole_reference(head: LMHead) -> Iterator[LMHead]:
    """Yield `head`, with the whole weight and bias of its reference where that is a module."""
    other = head.reference
    if other is None or not isinstance(Head.of(other.head).weight, nn.Module):
        yield head
        return
    other = other.read(head)
    module, name = other.weight, f"{other.prefix}head"
    if other.bias is not None:
        raise ValueError(
            f"{other.prefix}bias: expected None, since it is that of the module, got another"
        )
    check_module(module, name)
    check_present(module, name)
    sharded = head.process_group is not None or is_dtensor(head.hidden)
    with constants_of(module, name, sharded=sharded) as (weight, bias):
        yield replace(head, reference=other.with_tensors(other.hidden, weight, bias))
