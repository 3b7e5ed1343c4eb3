"""The results that are committed, a run that was stopped early, and what tables say in turn."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.__main__ import RESULTS, with_others


def results() -> dict[str, Any]:
    """All parts, each from the newest run that has it."""
    newest = sorted(RESULTS.glob("cpu-20*.json"))[-1]
    return with_others(json.loads(newest.read_text()), RESULTS)


def sparse() -> dict[str, Any]:
    """A run that was stopped early, and in which a lot went wrong."""
    full = {"samples": 1, "median": 12.5, "p20": None, "p80": None, "min": 12.5}
    found = {
        "ours": {
            "status": "ok",
            "ms": {"full": full},
            "errors": {},
            "flops_nvh": None,
            "extra_mib": None,
        },
        "trl": {"status": "ok", "ms": {"full": {"samples": 0}}},
        "eager": {
            "status": "wrong",
            "reason": "d_hidden",
            "ms": {"full": {"samples": 2, "median": 10.0}},
        },
        "cce": {"status": "out of memory"},
        "liger_ce": {},
    }
    shape = {"part": "main", "n": 64, "h": 32, "v": 700, "t": 8, "dtype": "bfloat16"}
    return {
        "format": 2,
        "device": "cpu",
        "status": "stopped",
        "cases": {"a": {**shape, "providers": found}, "b": {**shape, "providers": {}}},
    }


def parsed(text: list[str], title: str) -> list[list[dict[str, str]]]:
    """The tables under a heading, each a list of rows by column."""
    start = next(i for i, line in enumerate(text) if line == f"## {title}")
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for before, line in zip(text[start:], text[start + 1 :], strict=False):
        if line.startswith("## "):
            break
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        if cells and not before.startswith("|"):
            head = cells
            found.append([])
        elif cells and not line.startswith("| ---"):
            assert len(cells) == len(head)
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found
