"""How the tuner finds tiles, and how it writes the table."""

from __future__ import annotations

import json
import math

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
