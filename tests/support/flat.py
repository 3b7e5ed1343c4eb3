"""Public calls with all their options in one table, as parametrised tests have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from grpo_kernels import Head, Run

_OF_HEAD = [x.name for x in fields(Head) if x.name != "weight"]
_OF_RUN = [x.name for x in fields(Run)]


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the fields of `Head` and `Run` as keyword arguments of its own.

    ``flat(grpo_loss)(hidden, weight, *others, bias=bias, engine="lean", epsilon=0.1)``
    """

    def call(hidden: Any, weight: Any, *others: Any, **options: Any) -> Any:
        of_head = {name: options.pop(name) for name in _OF_HEAD if name in options}
        of_run = {name: options.pop(name) for name in _OF_RUN if name in options}
        run = {"run": Run(**of_run)} if of_run else {}
        return function(hidden, Head(weight, **of_head), *others, **run, **options)

    return call
