"""Ranks of one group that are called differently: every one of them raises, at once, and says what differs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from tests.support.rank_calls import CALLS
from tests.support.rank_mismatches import FITTING, MISMATCHES
from tests.support.ranks import Ranks

KINDS = {group: [*kinds, *FITTING[group]] for group, kinds in MISMATCHES.items()}


def attempt(rank: int, world_size: int, group: str, index: int, odd: int) -> tuple[str, str]:
    """The call that does not fit: type and message of its error."""
    kind = KINDS[group][index]
    call, given = kind.arguments(rank, rank == odd)
    try:
        with torch.set_grad_enabled(not (kind.no_grad and rank == odd)):
            CALLS[call].function(**given)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def right(rank: int, world_size: int, group: str, index: int) -> None:
    """The right call, which has to give the right result."""
    kind = KINDS[group][index]
    CALLS[kind.call].assert_right(kind.both, rank)


def problems(ranks: Ranks, group: str, index: int, odd: int) -> list[str]:
    """Everything that is wrong with how the ranks take this kind; empty if all is right."""
    kind, found = KINDS[group][index], []
    try:
        for rank, (error, message) in enumerate(ranks.run(attempt, group, index, odd)):
            said = f"rank {rank}{' (the odd one)' if rank == odd else ''}"
            if kind.fits:
                found += [f"{said} refused it: {message}"] if error else []
            elif error not in ("TypeError", "ValueError"):
                found.append(
                    f"{said} raised {error}: {message[:200]}" if error else f"{said} accepted it"
                )
            elif not re.search(kind.names, message):
                found.append(f"{said} does not name {kind.names!r}: {message}")
            elif kind.alone and rank != odd and not re.search(rf"\brank\D{{0,3}}{odd}\b", message):
                found.append(f"{said} does not say that rank {odd} refused: {message}")
        ranks.run(right, group, index)
    except AssertionError as failure:
        found.append(str(failure))
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(seconds=30.0) as made:
        yield made


@pytest.mark.parametrize("group", MISMATCHES)
def test_every_mismatch_raises_on_every_rank(ranks: Ranks, group: str) -> None:
    """The odd rank is now the first, now the second; after each the right call gives the right result."""
    assert len(MISMATCHES[group]) >= 48
    kinds = enumerate(KINDS[group])
    found = {f"{kind.call}: {kind.name}": problems(ranks, group, i, odd=i % 2) for i, kind in kinds}
    wrong = [f"{name}: {'; '.join(what)}" for name, what in found.items() if what]
    assert not wrong, f"{len(wrong)} of {len(found)} kinds:\n" + "\n".join(wrong)
    assert ranks.starts == 1, "the ranks had to be replaced"


def _hang(rank: int, world_size: int) -> int:
    while rank:
        pass
    return rank


def test_ranks_that_hang_are_replaced() -> None:
    with Ranks(seconds=2.0) as ranks:
        with pytest.raises(
            AssertionError, match=r"ranks \[1\] did not return within 2 s\nresults: \{0: 0\}"
        ):
            ranks.run(_hang)
        assert ranks.run(max) == [2, 2] and ranks.starts == 2
