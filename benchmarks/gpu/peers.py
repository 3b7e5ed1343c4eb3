"""Other people's packages from wheel files, in a folder of their own: nothing that is installed is replaced.

A wheel too large to be carried whole may come in parts, ``NAME.whl.part0``, ``NAME.whl.part1``, ..., in one folder or
in several: ``split -b 48m -d -a 1 NAME.whl NAME.whl.part`` makes them.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.child import environment, run

SECONDS = 120.0
PART = re.compile(r"(?P<wheel>.+\.whl)\.part(?P<number>\d+)")
PACKAGES = "site-packages"  # QuACK takes a function for other people's only below a folder of that name


class Incomplete(Exception):
    """The parts of a wheel do not make a whole one."""


def install(folders: Sequence[Path], target: Path) -> tuple[list[str], dict[str, Any]]:
    """Unpack all wheels of `folders` below `target`, those in parts too.

    Returns:
        Folders for the end of the path, so that what is installed wins; and what happened, to be reported.
    """
    wheels, problems = find(folders, target / "joined")
    if not wheels:
        return [], {"wheels": 0, **({"problems": problems} if problems else {})}
    together = target / PACKAGES
    problem = _pip(wheels, together)
    if problem is None:
        paths = [str(together)]
    else:  # one bad wheel must not keep the others out
        problems["all"], paths = problem, []
        for i, wheel in enumerate(wheels):
            alone = target / str(i) / PACKAGES
            problem = _pip([wheel], alone)
            if problem is None:
                paths.append(str(alone))
            else:
                problems[wheel.name] = problem
    return paths, {"wheels": len(wheels), **({"problems": problems} if problems else {})}


def find(folders: Sequence[Path], joined: Path) -> tuple[list[Path], dict[str, str]]:
    """The wheels of `folders` by name, those in parts joined in `joined`; and what is wrong with some."""
    files = [file.resolve() for folder in folders for file in sorted(folder.iterdir())]
    wheels = {file.name: file for file in files if file.suffix == ".whl"}
    parts: dict[str, dict[int, Path]] = {}
    for file in files:
        if (found := PART.fullmatch(file.name)) and found["wheel"] not in wheels:
            parts.setdefault(found["wheel"], {})[int(found["number"])] = file
    problems = {}
    for name, numbered in parts.items():
        try:
            wheels[name] = join(name, numbered, joined)
        except Incomplete as error:
            problems[name] = str(error)
    return [wheels[name] for name in sorted(wheels)], problems


def join(name: str, parts: dict[int, Path], folder: Path) -> Path:
    """The wheel `name` in `folder`, made of `parts` by number, every file in it read once.

    Raises:
        Incomplete: a part is missing or damaged.
    """
    got = "got " + ", ".join(f"part{number}" for number in sorted(parts))
    missing = [f"part{number}" for number in range(max(parts) + 1) if number not in parts]
    if missing:
        raise Incomplete(f"expected {', '.join(missing)} too, {got}")
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / name
    with whole.open("wb") as out:
        for number in sorted(parts):
            with parts[number].open("rb") as part:
                shutil.copyfileobj(part, out)
    try:
        with zipfile.ZipFile(whole) as wheel:
            damaged = wheel.testzip()
    except zipfile.BadZipFile as error:
        raise Incomplete(f"expected a whole wheel of its parts, {got}, the last missing? ({error})") from error
    if damaged is not None:
        raise Incomplete(f"expected a whole wheel of its parts, {got}, and in it {damaged} is damaged")
    return whole


def _pip(wheels: Sequence[Path], target: Path) -> str | None:
    """What went wrong, or None."""
    target.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(target), *map(str, wheels)]
    ran = run(command, env=environment(toy=False), seconds=SECONDS, log=target.with_suffix(".log"))
    return None if ran.code == 0 else ran.output[-800:]
