"""All categories of attack."""

from __future__ import annotations

import importlib.util
import os

from tests.fuzz.caches import CACHE, built
from tests.fuzz.estimators import ADVANTAGES
from tests.fuzz.expectations import EXPECTED
from tests.fuzz.losses import LOSS
from tests.fuzz.ranks import RANKS
from tests.fuzz.rewards import REWARDS

ALL = (LOSS, EXPECTED, ADVANTAGES, RANKS, CACHE, REWARDS)


def prepare() -> None:
    """Build the C++ library, which no trial then waits for, and make Triton's interpreter exact where it is used."""
    built()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from tests.support import interpreter

        interpreter.prepare()
