"""Other people's packages from wheel files, in a folder of their own: nothing that is installed is replaced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import environment, run

SECONDS = 120.0


def install(folders: Sequence[Path], target: Path) -> tuple[list[str], dict[str, Any]]:
    """Unpack all wheels of `folders` below `target`.

    Returns:
        Folders for the end of the path, so that what is installed wins; and what happened, to be reported.
    """
    wheels = sorted(str(file.resolve()) for folder in folders for file in folder.glob("*.whl"))
    if not wheels:
        return [], {"wheels": 0}
    together = target / "together"
    problem = _pip(wheels, together)
    if problem is None:
        return [str(together)], {"wheels": len(wheels)}
    paths, problems = [], {"all": problem}  # one bad wheel must not keep the others out
    for i, wheel in enumerate(wheels):
        problem = _pip([wheel], target / str(i))
        if problem is None:
            paths.append(str(target / str(i)))
        else:
            problems[Path(wheel).name] = problem
    return paths, {"wheels": len(wheels), "problems": problems}


def _pip(wheels: list[str], target: Path) -> str | None:
    """What went wrong, or None."""
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(target), *wheels]
    ran = run(command, env=environment(toy=False), seconds=SECONDS, log=target.with_suffix(".log"))
    return None if ran.code == 0 else ran.output[-800:]
