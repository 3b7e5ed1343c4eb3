"""Ranks that are called differently, in any order and with either of them the odd one, on ranks that live on."""

from __future__ import annotations

import random

from tests.fuzz.harness import Category, Options
from tests.fuzz.rank_pool import RankPool
from tests.fuzz.rank_trials import KINDS, problems

SECONDS = 10.0
POOL = RankPool(world_size=2, seconds=SECONDS)


def draw(random_: random.Random) -> Options:
    group = random_.choice([*KINDS])
    return {"group": group, "kind": random_.choice(KINDS[group]).name, "odd": random_.randrange(2)}


def check(options: Options) -> None:
    """What is wrong with how the ranks take it, if anything is."""
    group = options.get("group", "process_group")
    indices = {kind.name: i for i, kind in enumerate(KINDS[group])}
    found = problems(POOL, group, indices.get(options.get("kind", ""), 0), options.get("odd", 0))
    assert not found, "; ".join(found)


RANKS = Category("ranks", draw, check, close=POOL.close)
