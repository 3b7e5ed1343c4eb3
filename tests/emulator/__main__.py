"""``python -m tests.emulator``: the tests in `runs/`, with every Triton kernel emulated.

``--part quick`` is what `make test` runs, ``--part slow`` what `make test-slow` runs. What else is
given goes to pytest, whose exit status is that of the command.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

RUNS = sorted(Path(__file__).parent.glob("runs/[a-z]*.py"))
PARTS = {"quick": "quick", "slow": "slow", "all": ""}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--part", choices=PARTS, default="all")
    options, others = parser.parse_known_args(arguments)
    os.environ["TRITON_INTERPRET"] = "0"
    import pytest

    files = (
        []
        if any(x.partition("::")[0].endswith(".py") for x in others)
        else [str(path) for path in RUNS]
    )
    plugin = ["-p", "tests.emulator.plugin", "-m", PARTS[options.part]]
    return int(pytest.main([*plugin, *others, *files]))


if __name__ == "__main__":
    sys.exit(main())
