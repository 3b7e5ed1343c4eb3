"""Figures of curves: what they draw and claim is in the stored JSON, and they are the same bytes again."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from benchmarks import curves, plots

NAMES = list(curves.DRAWN)
STORED = dict(zip(NAMES, curves.newest(), strict=True))


def drawn(name: str) -> Figure:
    with plots.looks():
        figure = curves.DRAWN[name](curves.read(STORED[name])[1])
    figure.draw_without_rendering()
    return figure


def plain(text: str) -> str:
    return " ".join(text.split()).replace("\u00a0", " ")


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_states_its_claim_and_its_conditions_within_its_card(name: str) -> None:
    figure = drawn(name)
    title, subtitle, notes = (plain(text.get_text()) for text in figure.texts)
    data = curves.read(STORED[name])[1]
    assert title == {"distillation": curves.distillation_claim, "unified-view": curves.unified_claim}[name](data)
    for part in ("fp32", "CPU", "H 64, 2 layers", "V 64", data["date"]):
        assert part in subtitle
    assert "means of 5 seeds" in notes and STORED[name].stem.endswith(data["date"])
    for text in figure.findobj(lambda x: hasattr(x, "get_text") and x.get_text() and x.get_visible()):
        extent = text.get_window_extent()
        assert not extent.width or (extent.x0 >= -1 and extent.x1 <= figure.bbox.x1 + 1), text.get_text()


def test_distillation_draws_the_means_of_the_seeds_on_plain_ticks() -> None:
    data, figure = curves.read(STORED["distillation"])[1], drawn("distillation")
    left, right = figure.axes
    ends = {name: curves.final(data["runs"], name, data["pass"]) for name in curves.LOSSES}
    assert [line.get_ydata()[-1] for line in left.lines] == pytest.approx(list(ends.values()))
    assert [label.get_text() for label in left.get_yticklabels()] == ["0.1", "0.2", "0.5", "1"]
    said = " ".join(text.get_text() for text in (*left.texts, *right.texts))
    assert f"whole vocabulary: {ends[curves.FULL]:.2f}" in said
    assert ends[curves.FULL] < ends[curves.TOP] < ends[curves.SAMPLED]
    page = plots.labels.tidy((curves.ROOT / "docs" / "divergences.md").read_text(), 10**6)
    first = statistics.fmean(run["kl"][0] for run in data["runs"])
    for value in (first, *ends.values()):
        assert f"{value:.2f}" in page[page.index("compares the three") :][:400]
    assert curves.distillation_claim(data) in page


def test_unified_view_ends_are_those_of_the_runs() -> None:
    data, figure = curves.read(STORED["unified-view"])[1], drawn("unified-view")
    (axes,) = figure.axes
    for name, line in zip(curves.METHODS, axes.lines, strict=True):
        rewards = [run["reward"][-1] for run in data["runs"] if run["method"] == name]
        assert line.get_ydata()[-1] == pytest.approx(100 * statistics.fmean(rewards))
    assert curves.unified_claim(data) in (curves.ROOT / "docs" / "unified-view.md").read_text()


def test_figures_are_the_same_bytes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves.main(["--output", str(tmp_path / "a")]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.split()] == [f"{name}.png" for name in NAMES]
    for path in curves.render(list(STORED.values()), tmp_path / "b"):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"runs": [{"other": 1}]}))
    with pytest.raises(ValueError, match=r"x\.json: expected the curves of"):
        curves.read(path)


def test_labels_are_moved_apart() -> None:
    assert curves.apart([1.0, 1.0, 9.0], 2.0) == [0.0, 2.0, 9.0]
