"""Ranks of one group that are called differently: every one of them raises, at once, and says what differs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_mismatches import MISMATCHES
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.rank_trials import KINDS, problems


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(world_size=2, seconds=10.0) as pool:
        yield pool


@pytest.mark.parametrize("group", MISMATCHES)
def test_every_mismatch_raises_on_every_rank(ranks: RankPool, group: str) -> None:
    """The odd rank is now the first, now the second; after each the right call gives the right result."""
    assert len(MISMATCHES[group]) >= 48
    kinds = enumerate(KINDS[group])
    found = {f"{kind.call}: {kind.name}": problems(ranks, group, i, odd=i % 2) for i, kind in kinds}
    wrong = [f"{name}: {'; '.join(what)}" for name, what in found.items() if what]
    assert not wrong, f"{len(wrong)} of {len(found)} kinds:\n" + "\n".join(wrong)
    assert ranks.starts == 1, "the ranks had to be replaced"


def _hang(rank: int) -> int:
    while rank:
        pass
    return rank


def test_ranks_that_hang_are_replaced() -> None:
    with RankPool(seconds=2.0) as pool:
        with pytest.raises(RankFailure, match=r"ranks \[1\] did not return within 2 s; the others: \{0: 0\}"):
            pool.run(_hang)
        assert pool.run(abs) == [0, 1] and pool.starts == 2
