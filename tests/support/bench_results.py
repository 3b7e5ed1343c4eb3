"""The results that are committed, and what tables say."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.__main__ import RESULTS, with_others


def results() -> dict[str, Any]:
    """All parts, each from the newest run that has it."""
    newest = sorted(RESULTS.glob("cpu-20*.json"))[-1]
    return with_others(json.loads(newest.read_text()), RESULTS)


def parsed(text: list[str], title: str) -> list[list[dict[str, str]]]:
    """The tables under a heading, each a list of rows by column."""
    section = "\n".join([*text, "## "]).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    tables = []
    for block in section.strip().split("\n\n"):
        if block.startswith("| "):
            head, _, *rows = ([x.strip() for x in x[1:-1].split("|")] for x in block.splitlines())
            tables.append([dict(zip(head, row, strict=True)) for row in rows])
    return tables
