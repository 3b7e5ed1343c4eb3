"""One mismatch tried on two ranks: each has to raise, name what differs, and be fit for the right call afterwards."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from tests.support.rank_calls import CALLS
from tests.support.rank_mismatches import FITTING, MISMATCHES
from tests.support.rank_pool import RankFailure, RankPool

RAISED = ("TypeError", "ValueError")
KINDS = {group: [*kinds, *FITTING[group]] for group, kinds in MISMATCHES.items()}


@dataclass(frozen=True)
class Attempt:
    """What a rank saw: the type of the error or None, its message, how long it took."""

    error: str | None
    message: str
    seconds: float


def attempt(rank: int, group: str, index: int, odd: int) -> Attempt:
    """The task of each rank: the call that does not fit."""
    kind = KINDS[group][index]
    call, given = kind.arguments(rank, rank == odd)
    start = time.monotonic()
    try:
        with torch.set_grad_enabled(not (kind.no_grad and rank == odd)):
            CALLS[call].function(**given)
    except Exception as error:
        return Attempt(type(error).__name__, str(error), time.monotonic() - start)
    return Attempt(None, "", time.monotonic() - start)


def right(rank: int, group: str, index: int) -> None:
    """The task of each rank: the right call, which has to give the right result."""
    kind = KINDS[group][index]
    CALLS[kind.call].assert_right(kind.both, rank)


def problems(pool: RankPool, group: str, index: int, odd: int) -> list[str]:
    """Everything that is wrong with how the ranks take this kind; empty if all is right."""
    kind = KINDS[group][index]
    try:
        attempts = pool.run(attempt, group, index, odd)
    except RankFailure as failure:
        return [str(failure)]
    found = []
    for rank, seen in enumerate(attempts):
        said = f"rank {rank}{' (the odd one)' if rank == odd else ''}"
        if kind.fits:
            found += [] if seen.error is None else [f"{said} refused it: {seen.message}"]
        elif seen.error is None:
            found.append(f"{said} accepted it")
        elif seen.error not in RAISED:
            found.append(f"{said} raised {seen.error}: {seen.message[:200]}")
        elif not re.search(kind.names, seen.message):
            found.append(f"{said} does not name {kind.names!r}: {seen.message}")
        elif kind.alone and rank != odd and not re.search(rf"\brank\D{{0,3}}{odd}\b", seen.message):
            found.append(f"{said} does not say that rank {odd} refused: {seen.message}")
    try:
        pool.run(right, group, index)
    except (RankFailure, AssertionError) as failure:
        found.append(f"the right call afterwards: {str(failure).strip().splitlines()[-1]}")
        pool.close()  # its ranks may be out of step from here on
    return found
