"""`python -m tests.fuzz`: random calls for some minutes; of one that fails, the smallest that fails
alike.

Failures are kept in .hypothesis/, and the next run without a seed begins with them.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# before Triton is imported: its kernels then run in its interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from grpo_kernels.backends import choose_backend
from tests.fuzz import attack
from tests.fuzz.expectations import EXPECTED
from tests.fuzz.losses import LOSS

CATEGORIES = {"loss": LOSS, "expected": EXPECTED}
# Whatever profile hypothesis takes for the surroundings, such as continuous integration.
KEPT = DirectoryBasedExampleDatabase(".hypothesis/failures")
SETTINGS = settings(attack.SETTINGS, max_examples=400, derandomize=False, database=KEPT)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add, once = parser.add_argument, "0: one round of each category"
    add("--minutes", type=float, default=10.0, metavar="M", help=once)
    add("--seed", type=int, help="of the first round; the next has the next one")
    add("--category", nargs="+", default=[*CATEGORIES], choices=[*CATEGORIES], help="only these")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    choose_backend("cpp", torch.device("cpu"))  # builds the library, which no trial then waits for
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from tests.support import interpreter

        interpreter.prepare()
    end = time.monotonic() + 60.0 * options.minutes
    for number in itertools.count():
        seed = None if options.seed is None else options.seed + number
        failures = [name for name in options.category if not passes(name, seed)]
        if failures or time.monotonic() > end:
            calls = (number + 1) * SETTINGS.max_examples
            print(f"{calls} calls of each category; failed: {', '.join(failures) or 'none'}")
            return int(bool(failures))
    raise AssertionError("the rounds have no end")


def passes(name: str, seed: int | None) -> bool:
    """True if a round passes; else its error is told, and how to repeat it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CATEGORIES[name].run(SETTINGS, seed)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        again = f"python -m tests.fuzz --minutes 0 --category {name}"
        again += "" if seed is None else f" --seed {seed}"
        print(f"{name} failed; again: {again}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
