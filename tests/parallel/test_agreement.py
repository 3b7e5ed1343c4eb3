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


def message(rank: int, enter: Callable[[dict[str, Any], int], Any], call: str = "f") -> str:
    """What the rank is told: its error, or nothing."""
    try:
        with check_same("process_group", dist.group.WORLD, call) as values:
            enter(values, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuse(values: dict[str, Any], rank: int) -> None:
    values["half"] = "said"
    if rank == 1:
        raise KeyError("é" * 400)


def many(values: dict[str, Any], rank: int) -> None:
    values |= {f"x{i}": (rank, i) for i in range(5)}


def interrupted(rank: int) -> None:
    """A call that one rank leaves without a word: its next one meets the others' first."""
    if rank == 1:
        with pytest.raises(KeyboardInterrupt), check_same("process_group", dist.group.WORLD, "f"):
            raise KeyboardInterrupt


def floats(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any], int], Any]:
    def enter(values: dict[str, Any], rank: int) -> None:
        x = FLOATS.clone()
        if rank == 1:
            change(x)
        values |= {"before": torch.arange(1000), "x": x, "after": 2 * FLOATS}

    return enter


def full(values: dict[str, Any], rank: int) -> None:
    values |= {str(i): Each(rank) for i in range(FIELDS)}


def too_many(values: dict[str, Any], rank: int) -> None:
    values |= {str(i): Each(rank) for i in range(FIELDS + 1)}


def told(group: Any, rank: int) -> Any:
    """Return all ranks' integers of one name, 10 + rank."""
    with check_same("process_group", group, "f", same=1) as values:
        values["rows"] = Each(10 + rank)
    return values["rows"]


def rank_task(rank: int, world_size: int) -> dict[str, str]:
    said = {
        "alike": message(rank, lambda values, _: values.update(a=1, b=None, c=0.5)),
        "another call": message(rank, lambda values, _: None, call="g" if rank == 2 else "f"),
        "refused": message(rank, refuse),
        "in step again": message(rank, lambda values, _: None),
        "int": message(rank, lambda values, rank: values.update(n=10 + rank // 2)),
        "text": message(rank, lambda values, rank: values.update(name="ab"[rank // 2])),
        "many": message(rank, many),
        "say": message(rank, lambda values, rank: values.update(n=Each(rank))),
        "full": message(rank, full),
        "too many": message(rank, too_many),
        "bits": message(rank, lambda values, rank: values.update(ids=torch.tensor([5, 6, 7 + rank]))),
        "swapped": message(
            rank, lambda values, rank: values.update(ids=torch.tensor([[1, 2, 3], [1, 3, 2]][rank % 2]))
        ),
        "other kind": message(rank, lambda values, rank: values.update(x=FLOATS.long() if rank else FLOATS)),
        "missing": message(rank, lambda values, rank: values.update({} if rank else {"x": FLOATS})),
        "rounded": message(rank, floats(lambda x: x.mul_(1 + 1e-7))),
        "told": f"{told(dist.group.WORLD, rank)}",
        "one number": message(rank, floats(lambda x: x[17].neg_())),
        "moved": message(rank, floats(lambda x: x.copy_(x.flip(0)))),
        "a tiny zero": message(rank, floats(lambda x: x[400].zero_())),
        "nan": message(rank, floats(lambda x: x[3].fill_(torch.nan))),
    }
    interrupted(rank)
    return said | {"out of step": message(rank, lambda values, _: None)}


def test_every_rank_is_told_the_same_thing() -> None:
    ranks = run_ranks(rank_task, 3)
    differs = "ValueError: process_group: expected the same call on every rank, got "
    says = {  # a pattern for every rank
        **dict.fromkeys(("alike", "in step again", "say", "full", "rounded"), ("$",) * 3),
        "another call": (differs + "f here, on rank [01], and another call on rank 2",) * 2
        + (differs + "g here, on rank 2, and another call on ranks 0, 1",),
        "refused": (
            r"ValueError: process_group: rank 1 refuses the call of f: KeyError: 'é+$",
            "KeyError: 'é{400}'",
            r"ValueError: process_group: rank 1 refuses the call of f: KeyError: 'é+$",
        ),
        "int": (differs + r"n \[10, 10, 11\]$",) * 3,
        "text": (differs + "name = a on rank [01], another on rank 2",) * 2
        + (differs + "name = b on rank 2, another on ranks 0, 1",),
        "many": (differs + r"x0 = \(\d, 0\) on .*; x1 = .*; x2 = .*; and 2 more$",) * 3,
        "told": (r"\[10, 11, 12\]$",) * 3,
        "too many": ("AssertionError: more values than there is room for",) * 3,
        **dict.fromkeys(("other kind", "missing"), (differs + "other tensors of f on",) * 3),
        **dict.fromkeys(("bits", "swapped"), (differs + "ids with other numbers on",) * 3),
        **dict.fromkeys(("one number", "moved"), (differs + "x with other numbers on",) * 3),
        "a tiny zero": (differs + "x: its zeros with",) * 3,
        "nan": (differs + ".*; x: what is not finite with",) * 3,
        "out of step": (differs + r"calls out of step: as many before this one as \[20, 21, 20\]",) * 3,
    }
    assert says.keys() == ranks[0].keys()
    for name, patterns in says.items():
        for rank, pattern in enumerate(patterns):
            assert re.match(pattern, ranks[rank][name]), (name, rank, ranks[rank][name])


def test_no_group_says_nothing_and_no_other_thing_is_one() -> None:
    assert told(None, 1) == [11]
    not_a_group: Any = "tp"
    error = r"^sequence_group: expected a torch.distributed.ProcessGroup.*, got str"
    with pytest.raises(TypeError, match=error), check_same("sequence_group", not_a_group, "f"):
        pass
