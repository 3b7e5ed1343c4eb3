"""Plots of benchmark results: of the figures there are, the same bytes each time, above their tables on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks.report import plots, tables
from benchmarks.report.plots import accuracy, bars, relative, scaling, style, training
from tests.support.bench_results import TRAINING, results, sparse

Data = dict[str, Any]
NAMES = ["time-main", "memory-main", "shapes", "workloads", "scaling", "accuracy", "training"]


@pytest.fixture(scope="module")
def data() -> Data:
    return results()


@pytest.fixture(scope="module")
def rendered(data: Data, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plots.render(data, tmp_path_factory.mktemp("plots"))


def test_plots_are_made(rendered: list[Path]) -> None:
    assert [path.name for path in rendered] == [f"{name}.png" for name in NAMES]
    for path in rendered:
        content = path.read_bytes()
        assert len(content) > 20_000
        assert b"/home" not in content
        assert b"Software" not in content


def test_plots_are_the_same_bytes_again(rendered: list[Path], tmp_path: Path) -> None:
    for first, second in zip(rendered, plots.render(results(), tmp_path), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_bars_are_the_figures_of_the_case(data: Data) -> None:
    case = data["cases"]["main"]
    shown = {name: x for name, x in case["providers"].items() if "ms" in x and name != "products"}
    with style.looks():
        time, memory = bars.time(data, case), bars.memory(data, case)
    for figure, values in (
        (time, [x["ms"]["full"]["median"] / 1e3 for x in shown.values()]),
        (memory, [x["extra_mib"] for x in shown.values()]),
    ):
        (axes,) = figure.axes
        assert [bar.get_width() for bar in axes.patches] == sorted(values)
    *whiskers, limit = (list(line.get_xdata()) for line in time.axes[0].lines)
    times = sorted((x["ms"]["full"] for x in shown.values()), key=lambda ms: ms["median"])
    assert whiskers == [[ms["p20"] / 1e3, ms["p80"] / 1e3] for ms in times]
    assert limit[0] == case["providers"]["products"]["ms"]["full"]["median"] / 1e3
    names = [text.get_text() for text in time.axes[0].get_yticklabels()]
    assert names[0] == "grpo_kernels"
    assert names[-1] == "Liger 0.8.5 fused GRPO loss"
    words = " ".join(text.get_text() for text in time.texts)
    for part in ("N 512", "V 151936", "fp32", "AMD EPYC", "2 threads", "TRL 1.16", "0123456789", "2026-11-21", "cce"):
        assert part in words


def test_points_are_the_figures_of_the_cases(data: Data) -> None:
    """The lines of ours along N, the points of one provider by its logits, and of one workload by provider."""
    cases = data["cases"]
    with style.looks():
        grown, exact, work = scaling.draw(data), accuracy.draw(data), relative.draw(data, "workloads", "")
    sizes = (256, 512, 1024, 2048)
    ours = [cases[f"n_{n}"]["providers"]["ours"] for n in sizes]
    assert list(grown.axes[0].lines[0].get_xdata()) == list(sizes)
    assert list(grown.axes[0].lines[0].get_ydata()) == [x["ms"]["full"]["median"] / 1e3 for x in ours]
    assert list(grown.axes[3].lines[0].get_ydata()) == [x["extra_mib"] for x in ours]

    worst = {line.get_xdata()[0] for line in exact.axes[0].lines if list(line.get_ydata()) == [11]}
    logits = [cases[name]["providers"] for name in ("logits 10", "logits 20", "logits 40", "peaked")]
    assert worst in ({x[name]["errors"]["logp_mean"] for x in logits} for name in ("liger_grpo", "liger_ce"))

    first = {line.get_xdata()[0] for line in work.axes[0].lines if list(line.get_ydata()) == [0]}
    times = {name: x["ms"]["full"]["median"] for name, x in cases["half zero"]["providers"].items() if "ms" in x}
    assert first == {ms / times["ours"] for ms in times.values()}


def test_training_bars_are_shares(data: Data) -> None:
    with style.looks():
        (axes,) = training.draw(data).axes
    rows = {round(bar.get_y(), 6): [] for bar in axes.patches}
    for bar in axes.patches:
        rows[round(bar.get_y(), 6)].append(bar)
    for bars_of_one, model in zip(rows.values(), TRAINING["models"], strict=True):
        parts = model["seconds" if model["kind"] == "measured" else "flops"]
        widths = sorted(bar.get_width() for bar in bars_of_one)
        assert widths == pytest.approx(sorted(100 * x / sum(parts.values()) for x in parts.values()))
        assert {bar.get_hatch() for bar in bars_of_one} == {"///" if model["kind"] == "measured" else None}


def test_missing_parts_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [path.name for path in plots.render(sparse(), tmp_path)] == ["time-a.png"]
    told = capsys.readouterr().err
    for name in ("memory-a", "time-b", "memory-b", "shapes", "workloads", "scaling", "accuracy", "training"):
        assert f"no figures for {name}\n" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["time-a.png"]


def test_page_has_each_plot_above_its_table(data: Data, rendered: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    tables.write(data, page, rendered)
    text = page.read_text().splitlines()
    for path in rendered:
        (at,) = (i for i, line in enumerate(text) if line.endswith(f"/{path.name})"))
        place = text[at].split("(")[-1].rstrip(")")
        assert not Path(place).is_absolute()
        assert (page.parent / place).resolve() == path.resolve()
        section = text[at : next(i for i in range(at, len(text)) if text[i].startswith("Conditions: "))]
        assert any(line.startswith("| ---") for line in section)
    assert sum(line.startswith("Conditions: AMD EPYC") for line in text) == sum(x.startswith("## ") for x in text)
