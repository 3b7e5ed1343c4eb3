"""`Agreement` by itself: calls that have nothing in common, calls out of step, refusals, rounding, and its message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_kernels.base.agreement import FIELDS, Agreement
from tests.support.ranks import run_ranks

FLOATS = torch.linspace(-2, 3, 1000)


def message(rank: int, enter: Callable[[Agreement, int], None], call: str = "f") -> str:
    """What the rank is told: its error, or nothing."""
    try:
        with Agreement("process_group", dist.group.WORLD, call) as ranks:
            enter(ranks, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuse(ranks: Agreement, rank: int) -> None:
    ranks.same({"half": "said"})
    if rank == 1:
        raise KeyError("é" * 400)


def many(ranks: Agreement, rank: int) -> None:
    ranks.same({f"x{i}": (rank, i) for i in range(5)})


def interrupted(rank: int) -> None:
    """A call that one rank leaves without a word: its next one meets the others' first."""
    if rank == 1:
        with pytest.raises(KeyboardInterrupt), Agreement("process_group", dist.group.WORLD, "f"):
            raise KeyboardInterrupt


def floats(change: Callable[[torch.Tensor], Any]) -> Callable[[Agreement, int], None]:
    def enter(ranks: Agreement, rank: int) -> None:
        x = FLOATS.clone()
        if rank == 1:
            change(x)
        ranks.same_values({"absent": None, "x": x})

    return enter


def full(ranks: Agreement, rank: int) -> None:
    ranks.say({str(i): rank for i in range(FIELDS)})
    assert not ranks.every


def rank_task(rank: int, world_size: int) -> dict[str, str]:
    said = {
        "alike": message(rank, lambda ranks, _: ranks.same({"a": 1, "b": None, "c": 0.5})),
        "another call": message(rank, lambda ranks, _: None, call="g" if rank == 2 else "f"),
        "refused": message(rank, refuse),
        "in step again": message(rank, lambda ranks, _: None),
        "int": message(rank, lambda ranks, rank: ranks.same({"n": 10 + rank // 2})),
        "text": message(rank, lambda ranks, rank: ranks.same({"name": "ab"[rank // 2]})),
        "many": message(rank, many),
        "say": message(rank, lambda ranks, rank: ranks.say({"n": rank})),
        "full": message(rank, full),
        "bits": message(rank, lambda ranks, rank: ranks.same_bits("ids", torch.tensor([5, 6, 7 + rank]))),
        "swapped": message(
            rank, lambda ranks, rank: ranks.same_bits("ids", torch.tensor([[1, 2, 3], [1, 3, 2]][rank % 2]))
        ),
        "rounded": message(rank, floats(lambda x: x.mul_(1 + 1e-7))),
        "one number": message(rank, floats(lambda x: x[17].neg_())),
        "moved": message(rank, floats(lambda x: x.copy_(x.flip(0)))),
        "a tiny zero": message(rank, floats(lambda x: x[400].zero_())),
        "nan": message(rank, floats(lambda x: x[3].fill_(torch.nan))),
    }
    interrupted(rank)
    return said | {"out of step": message(rank, lambda ranks, _: None)}


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
        **dict.fromkeys(("bits", "swapped"), (differs + "ids with other numbers on",) * 3),
        **dict.fromkeys(("one number", "moved"), (differs + "x with other numbers on",) * 3),
        "a tiny zero": (differs + "x: its zeros with",) * 3,
        "nan": (differs + ".*; x: what is not finite with",) * 3,
        "out of step": (differs + r"calls out of step: as many before this one as \[16, 17, 16\]",) * 3,
    }
    assert says.keys() == ranks[0].keys()
    for name, patterns in says.items():
        for rank, pattern in enumerate(patterns):
            assert re.match(pattern, ranks[rank][name]), (name, rank, ranks[rank][name])


def test_no_group_says_nothing_and_no_other_thing_is_one() -> None:
    with Agreement("process_group", None, "f") as ranks:
        ranks.same({"a": 1})
    assert not ranks and not ranks.every
    with pytest.raises(TypeError, match=r"^sequence_group: expected a torch.distributed.ProcessGroup.*, got str"):
        Agreement("sequence_group", "tp", "f")  # type: ignore[arg-type]
