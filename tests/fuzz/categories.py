"""All categories of attack, and the settings of a round of `python -m tests.fuzz`."""

from __future__ import annotations

import importlib.util
import os

import torch
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from grpo_kernels.backends import choose_backend
from tests.fuzz import attack
from tests.fuzz.expectations import EXPECTED
from tests.fuzz.losses import LOSS

ALL = {"loss": LOSS, "expected": EXPECTED}
# Whatever profile hypothesis takes for the surroundings, such as continuous integration.
KEPT = DirectoryBasedExampleDatabase(".hypothesis/failures")
SETTINGS = settings(attack.SETTINGS, max_examples=400, derandomize=False, database=KEPT)


def prepare() -> None:
    """Build the C++ library, which no trial then waits for, and make Triton's interpreter exact where it is used."""
    choose_backend("cpp", torch.device("cpu"))
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from tests.support import interpreter

        interpreter.prepare()
