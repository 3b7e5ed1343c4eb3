"""`python -m tests.fuzz`: attacks for some minutes, counts by category, and the seed of each failure, minimised."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M")
    parser.add_argument("--seed", type=int, help="of the whole run; drawn, and printed, if not given")
    parser.add_argument("--category", nargs="+", metavar="C", help="only these")
    parser.add_argument("--replay", nargs="+", metavar="CATEGORY:SEED", help="one trial each, nothing else")
    given = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():  # before Triton is imported: its kernels then run in its interpreter
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    from tests.fuzz import categories, harness

    categories.prepare()
    known = {category.name: category for category in categories.ALL}
    for name in [*(given.category or []), *(pair.split(":")[0] for pair in given.replay or [])]:
        if name not in known:
            parser.error(f"no category {name!r}; there are {', '.join(known)}")
    if given.replay:
        failures = []
        for pair in given.replay:
            name, _, seed = pair.partition(":")
            failure = harness.trial(known[name], int(seed))
            print(f"{pair} passes: {known[name].options(int(seed))}" if failure is None else failure)
            failures += [failure] if failure else []
        return int(bool(failures))
    seed = secrets.randbits(32) if given.seed is None else given.seed
    chosen = [known[name] for name in given.category or known]
    print(f"seed {seed}, {given.minutes:g} minutes, {', '.join(category.name for category in chosen)}")
    found = harness.fuzz(chosen, 60.0 * given.minutes, seed)
    for name, (trials, failures) in found.items():
        print(f"{name}: {trials} trials, {len(failures)} failed", *(failure.seed for failure in failures))
    return int(any(failures for _, failures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
