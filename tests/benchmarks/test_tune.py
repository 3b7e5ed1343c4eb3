"""How the tuner finds tiles, and how it writes the table."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks import tune


def test_the_table_is_whole_and_says_what_was_measured() -> None:
    text = tune.own_table().read_text()
    table = json.loads(text)
    tune.check_table(table)
    assert text == tune.text_of(table), "as the tuner would write it"
    for entry in table:
        measured = entry["measured"]
        assert measured is False or set(measured) == {"device", "torch", "triton"}


def test_the_fastest_that_keeps_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"slow": 3.0, "spills": 1.0, "fast": 2.0}
    monkeypatch.setattr(tune, "seconds", lambda run: times[run])
    monkeypatch.setattr(tune, "SHORTLIST", 1)
    same = lambda config: config  # noqa: E731
    assert tune.shortlist(times, same, lambda c: c == "spills", math.inf) == ["fast"]
    assert tune.fastest(times, [same, same], math.inf) == "spills"


@pytest.mark.slow
def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    before = tune.own_table().read_text()
    assert tune.main(["--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("candidate: ") == len(tune.REAL.tiles)
    assert "entries of family interpreter written to" in said
    assert tune.own_table().read_text() == before


def of_kernel(table: list[dict[str, Any]], kernel: str) -> list[dict[str, Any]]:
    return [e for e in table if e["family"] == "interpreter" and kernel in e["kernels"]]


def test_the_tuner_writes_after_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of time in its second part: the first is in the table, whole, and the rest as it was."""
    looks = itertools.count()

    def check_time(until: float) -> None:
        # six in the first part: two tiles on the shortlist, two at each of two vocabularies
        if next(looks) == 8:
            raise tune.OutOfTime

    monkeypatch.setattr(tune, "check_time", check_time)
    out = tmp_path / "table.json"
    assert tune.main(["--dry-run", "--out", str(out), "--kernels", "stats", "grad"]) == 1
    said = capsys.readouterr().out
    assert "stats and fused: " in said
    assert "no time for: grad; they stay as they were" in said
    own, table = json.loads(tune.own_table().read_text()), json.loads(out.read_text())
    tune.check_table(table)
    assert of_kernel(table, "stats") != of_kernel(own, "stats")
    assert of_kernel(table, "grad") == of_kernel(own, "grad")
    assert [x.name for x in tmp_path.iterdir()] == ["table.json"]
