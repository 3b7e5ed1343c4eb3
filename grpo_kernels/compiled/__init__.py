"""The public calls under torch.compile and torch.export, and with fake tensors.

A call of plain tensors is an op in the graph (`ops/`), with autograd around it (`calls.py`). Whatever needs values, a
function of the user's or a group of ranks runs eagerly: the graph breaks there, or ``fullgraph=True`` says why it
cannot. Outside of this folder only `Head` asks whether it is traced: its numbers are checked in the op then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from grpo_kernels.base.checks import is_fake

F = TypeVar("F", bound=Callable[..., Any])


def breaks_graph(function: F) -> F:
    """Let a function run eagerly, outside any graph that torch.compile is making."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        from grpo_kernels.compiled import calls  # not at import: it loads the compiler

        return calls.eagerly(function, *args, **options)

    return cast(Any, call)


def has_op(name: str) -> Callable[[F], F]:
    """Let a function of a call, a head and an execution be the op of that name in `calls` while it is traced."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(call: Any, head: Any, execution: Any) -> Any:
            if not (torch.compiler.is_compiling() or is_fake(head.hidden, head.weight)):
                return function(call, head, execution)
            from grpo_kernels.compiled import calls  # not at import: it loads the compiler

            return getattr(calls, name)(function, call, head, execution)

        return cast(Any, call)

    return decorate
