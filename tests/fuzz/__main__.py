"""`python -m tests.fuzz`: random calls for some minutes; of one that fails, the smallest that fails alike.

hypothesis keeps failures in .hypothesis/, and a later run begins with them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="0: one round of each category")
    parser.add_argument("--seed", type=int, help="of the first round; the next has the next one; drawn if not given")
    parser.add_argument("--category", nargs="+", metavar="C", help="only these")
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():  # before Triton is imported: its kernels then run in its interpreter
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    from tests.fuzz import categories

    categories.prepare()
    names = options.category or [*categories.ALL]
    for name in names:
        if name not in categories.ALL:
            parser.error(f"no category {name!r}; there are {', '.join(categories.ALL)}")
    first = secrets.randbits(32) if options.seed is None else options.seed
    end = time.monotonic() + 60.0 * options.minutes
    print(f"seed {first}, {options.minutes:g} minutes, {', '.join(names)}")
    for number in itertools.count(first):
        failures = [name for name in names if not passes(name, number)]
        if failures or time.monotonic() > end:
            examples = (number - first + 1) * categories.SETTINGS.max_examples
            print(f"{examples} calls of each category, up to seed {number}; failed: {', '.join(failures) or 'none'}")
            return int(bool(failures))
    raise AssertionError("the rounds have no end")


def passes(name: str, number: int) -> bool:
    """True if a round passes; else its error is told, and how to repeat it."""
    from tests.fuzz import categories

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            categories.ALL[name].run(categories.SETTINGS, number)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print(f"{name} failed; again: python -m tests.fuzz --minutes 0 --category {name} --seed {number}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
