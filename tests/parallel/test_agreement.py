"""`check_same` by itself: calls that have nothing in common, calls out of step, refusals, rounding, and its message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_kernels.base.agreement import FIELDS, Each, check_same
from tests.support.ranks import run_ranks

FLOATS = torch.linspace(-2, 3, 1000)
DIFFERS = "ValueError: process_group: expected the same call on every rank, got "
REFUSED = r"ValueError: process_group: rank 1 refuses the call of f: KeyError: 'é+$"
Values = dict[str, Any]


def message(rank: int, enter: Callable[[int], Values], call: str = "f") -> str:
    """What the rank is told: its error, or nothing."""
    try:
        with check_same("process_group", dist.group.WORLD, call) as values:
            values |= enter(rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuse(rank: int) -> Values:
    if rank == 1:
        raise KeyError("é" * 400)
    return {"half": "said"}


def floats(change: Callable[[torch.Tensor], Any]) -> Callable[[int], Values]:
    """Three tensors; `change` is made to the middle one on rank 1."""

    def enter(rank: int) -> Values:
        x = FLOATS.clone()
        if rank == 1:
            change(x)
        return {"before": torch.arange(1000), "x": x, "after": 2 * FLOATS}

    return enter


# name -> (the values of a rank, a pattern of what it is told, or one for each rank)
SCENES: dict[str, tuple[Callable[[int], Values], str | tuple[str, ...]]] = {
    "alike": (lambda rank: {"a": 1, "b": None, "c": 0.5}, "$"),
    "refused": (refuse, (REFUSED, "KeyError: 'é{400}'", REFUSED)),
    "in step again": (lambda rank: {}, "$"),
    "int": (lambda rank: {"n": 10 + rank // 2}, DIFFERS + r"n \[10, 10, 11\]$"),
    "text": (
        lambda rank: {"name": "ab"[rank // 2]},
        (
            *[DIFFERS + "name = a on rank [01], another on rank 2"] * 2,
            DIFFERS + "name = b on rank 2, another on ranks 0, 1",
        ),
    ),
    "many": (
        lambda rank: {f"x{i}": (rank, i) for i in range(5)},
        DIFFERS + r"x0 = \(\d, 0\) on .*; x1 = .*; x2 = .*; and 2 more$",
    ),
    "say": (lambda rank: {"n": Each(rank)}, "$"),
    "full": (lambda rank: {str(i): Each(rank) for i in range(FIELDS)}, "$"),
    "too many": (
        lambda rank: {str(i): Each(rank) for i in range(FIELDS + 1)},
        "AssertionError: more values than there is room for",
    ),
    "bits": (
        lambda rank: {"ids": torch.tensor([5, 6, 7 + rank])},
        DIFFERS + "ids with other numbers on",
    ),
    "swapped": (
        lambda rank: {"ids": torch.tensor([[1, 2, 3], [1, 3, 2]][rank % 2])},
        DIFFERS + "ids with other numbers on",
    ),
    "other kind": (
        lambda rank: {"x": FLOATS.long() if rank else FLOATS},
        DIFFERS + "other tensors of f on",
    ),
    "missing": (lambda rank: {} if rank else {"x": FLOATS}, DIFFERS + "other tensors of f on"),
    "rounded": (floats(lambda x: x.mul_(1 + 1e-7)), "$"),
    "one number": (floats(lambda x: x[17].neg_()), DIFFERS + "x with other numbers on"),
    "moved": (floats(lambda x: x.copy_(x.flip(0))), DIFFERS + "x with other numbers on"),
    "a tiny zero": (floats(lambda x: x[400].zero_()), DIFFERS + "x: its zeros with"),
    "nan": (floats(lambda x: x[3].fill_(torch.nan)), DIFFERS + ".*; x: what is not finite with"),
}
# after them, with the order of calls
SPECIAL: dict[str, str | tuple[str, ...]] = {
    "told": r"\[10, 11, 12\]$",
    "another call": (
        *[DIFFERS + "f here, on rank [01], and another call on rank 2"] * 2,
        DIFFERS + "g here, on rank 2, and another call on ranks 0, 1",
    ),
    "out of step": DIFFERS + r"calls out of step: as many before this one as \[20, 21, 20\]",
}


def told(group: Any, rank: int) -> Any:
    """Return all ranks' integers of one name, 10 + rank."""
    with check_same("process_group", group, "f", same=1) as values:
        values["rows"] = Each(10 + rank)
    return values["rows"]


def rank_task(rank: int, world_size: int) -> dict[str, str]:
    said = {name: message(rank, enter) for name, (enter, _) in SCENES.items()}
    said["told"] = f"{told(dist.group.WORLD, rank)}"
    said["another call"] = message(rank, lambda rank: {}, call="g" if rank == 2 else "f")
    if (
        rank == 1
    ):  # a call that one rank leaves without a word: its next one meets the others' first
        with pytest.raises(KeyboardInterrupt), check_same("process_group", dist.group.WORLD, "f"):
            raise KeyboardInterrupt
    return said | {"out of step": message(rank, lambda rank: {})}


def test_every_rank_is_told_the_same_thing() -> None:
    patterns = {name: pattern for name, (_, pattern) in SCENES.items()} | SPECIAL
    for rank, said in enumerate(run_ranks(rank_task, 3)):
        assert said.keys() == patterns.keys()
        for name, pattern in patterns.items():
            expected = pattern if isinstance(pattern, str) else pattern[rank]
            assert re.match(expected, said[name]), (name, rank, said[name])


def test_no_group_says_nothing_and_no_other_thing_is_one() -> None:
    assert told(None, 1) == [11]
    not_a_group: Any = "tp"
    error = r"^process_group: expected a torch.distributed.ProcessGroup.*, got str"
    with pytest.raises(TypeError, match=error), check_same("process_group", not_a_group, "f"):
        pass
