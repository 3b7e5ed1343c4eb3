"""The real run, with a tiny model in place of the real one: what is measured, compared, reported
and to be expected."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks import tiny_models
from benchmarks.figures import DEFAULTS, STOCK
from benchmarks.machine import ROOT
from benchmarks.real import __main__ as command
from benchmarks.real import expectations, report, train
from benchmarks.step import PHASES


def by_length(completions: list[Any], *_: Any, **__: Any) -> list[float]:
    """A reward that differs within a group."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(len(text) % 2) for text in texts]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two trainings of two steps."""
    folder, runs = tmp_path_factory.mktemp("model"), {}
    tiny_models.tokenizer().save_pretrained(folder)
    tiny_models.model("tied").save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "is_right", by_length)  # random words are never right
        for name in (STOCK, DEFAULTS):
            run = train.train(name, folder, seed=0, steps=2, short=True, tests=True)
            runs[f"{name}, seed 0"] = {"status": "ok", "name": name, "seed": 0, "wall": 1, **run}
    found = {"runs": runs, "short": False, "device": "cpu", "commit": "0" * 40}
    found["date"] = "2026-11-24T00:00:00+00:00"
    command.compare(found)
    return found


def test_both_are_timed_by_phase_and_train_alike(data: dict[str, Any]) -> None:
    stock, ours = data["runs"].values()
    for run in (stock, ours):
        seconds = [step["seconds"] for step in run["steps"]]
        assert [set(x) for x in seconds] == [{*PHASES, "other"}] * 2
        assert all(x["other"] >= 0 for x in seconds), "a phase within another counts once"
        assert all(x[phase] > 0 for x in seconds for phase in ("generation", "loss", "optimizer"))
        assert len(run["right"]) == 2
        assert all(step["logs"]["grad_norm"] > 0 for step in run["steps"])
    slow, fast = (sum(step["seconds"]["loss"] for step in run["steps"]) for run in (stock, ours))
    assert report.over(data, ours, slice(2), "loss") == pytest.approx(slow / fast)
    assert ours["alike"] == 2
    assert ours["worst"][1] <= command.TOLERANCE
    assert not command.is_wrong(data)


def test_a_difference_or_a_failure_is_wrong(data: dict[str, Any]) -> None:
    different, failed = copy.deepcopy(data), copy.deepcopy(data)
    run = different["runs"][f"{DEFAULTS}, seed 0"]
    run["steps"][1]["logs"]["reward"] += 0.125
    command.compare(different)
    assert (run["alike"], run["worst"][0]) == (1, "reward")
    failed["runs"][f"{DEFAULTS}, seed 0"]["status"] = "error"
    assert command.is_wrong(different) and command.is_wrong(failed)


def test_the_pages_are_what_the_committed_results_say(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results"
    newest = sorted(results.glob("cpu-real-*.json"))[-1]
    shutil.copy(ROOT / "docs" / "results.md", tmp_path)
    report.write(json.loads(newest.read_text()), tmp_path, tmp_path)
    for page in (ROOT / "docs" / "results.md", results / "real.md"):
        assert (tmp_path / page.name).read_text() == page.read_text()
    assert "\n".join(expectations.lines()) in (ROOT / "docs" / "results.md").read_text()


def test_the_reward_is_the_last_number() -> None:
    completions = ["3 + 4 = 7", "7, no, 8", "seven", "-7", [{"content": "It is 7."}]]
    assert train.is_right(completions, [7] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    held_out = {f"Calculate {a} + {b}." for a, b in train.HELD_OUT}
    asked = {row["prompt"][-1]["content"] for row in train.training_problems(2000, 0)}
    assert len(asked) == len(train.PAIRS) - len(held_out) and not asked & held_out
