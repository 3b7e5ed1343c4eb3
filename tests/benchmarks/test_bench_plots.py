"""Figures of benchmark results: what they draw and claim is in the file, and they are the same bytes again."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from benchmarks import claims, figures, labels, plots, tables
from benchmarks.providers import PROVIDERS
from tests.support.bench_results import results, sparse

Data = dict[str, Any]
NAMES = ["step", "memory", "time"]
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def data() -> Data:
    return results()


@pytest.fixture(scope="module")
def rendered(data: Data, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plots.render(data, tmp_path_factory.mktemp("plots"))


def drawn(name: str, data: Data) -> Figure:
    with plots.looks():
        figure = plots.DRAWN[name](data)
    assert figure is not None
    return figure


def words(figure: Figure) -> str:
    """All that is written in a figure."""
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    labelled = [text for axes in figure.axes for text in (*axes.get_yticklabels(), *axes.get_xticklabels())]
    return " ".join(text.get_text().replace("\u00a0", " ") for text in (*texts, *labelled))


def test_figures_are_made(rendered: list[Path]) -> None:
    assert [path.name for path in rendered] == [f"{name}.png" for name in NAMES]
    for path in rendered:
        content = path.read_bytes()
        assert len(content) > 20_000
        assert b"/home" not in content
        assert b"Software" not in content


def test_figures_are_the_same_bytes_again(rendered: list[Path], tmp_path: Path) -> None:
    for first, second in zip(rendered, plots.render(results(), tmp_path), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_a_figure_stays_within_its_card(data: Data) -> None:
    """Nothing that is written runs over an edge, and the card is light and solid: it is legible on any page."""
    for name in NAMES:
        figure = drawn(name, data)
        figure.draw_without_rendering()
        box = figure.bbox
        for text in figure.findobj(lambda x: hasattr(x, "get_text") and x.get_text() and x.get_visible()):
            extent = text.get_window_extent()
            if extent.width:
                assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1, text.get_text()
        assert to_hex(figure.get_facecolor()) == plots.CARD


@pytest.mark.parametrize("name", NAMES)
def test_a_title_is_the_claim_and_the_subtitle_has_the_conditions(name: str, data: Data) -> None:
    """What was measured, dtype, device, shape and date, of the run that the figure is from."""
    title, subtitle, *_ = (" ".join(text.get_text().split()).replace("\u00a0", " ") for text in drawn(name, data).texts)
    run = figures.of_run(data, name)
    assert title == claims.CLAIMS[name](data)
    for part in ("fp32", "CPU: ", labels.cpu(run), f"{run['threads']} thread", run["date"][:10]):
        assert part in subtitle
    assert re.search(r"V \d+, H \d+|H \d+, V \d+", subtitle)
    assert subtitle.count("\n") == 0 and len(subtitle) < 3 * 92


def test_step_bars_are_the_figures_of_the_variants_that_ran(data: Data) -> None:
    figure = drawn("step", data)
    scenes = figures.scenes(data)
    every = scenes["short prompts"]["variants"]
    variants = [x for name, x in every.items() if name in plots.STEP_SHOWN and x["status"] == "ok"]
    assert len(variants) > 2
    for axes, wanted in zip(
        figure.axes, ([x["seconds"] for x in variants], [x["saved_mib"]["max"] for x in variants]), strict=True
    ):
        assert [bar.get_width() for bar in axes.patches] == wanted
        assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [
            plots.COLORS["trl"].lower(), *[plots.BLUE.lower()] * (len(wanted) - 1)
        ]  # fmt: skip
    ours, over = every["defaults"], {x: figures.faster(scenes["short prompts"], x)[0] for x in every}
    assert claims.step_claim(data) == f"Stock TRL's training step takes {over['defaults']:.1f} times our CPU time"
    said = words(figure)
    elsewhere = figures.faster(scenes["long prompts"], "defaults")[0]
    for part in (
        f"{plots.three(ours['seconds'])} s   {over['defaults']:.1f}x",
        f"{plots.three(ours['saved_mib']['max'])} MiB",
        f"long prompts, {elsewhere:.1f} times as fast",
        "1 thread",
        "equal rewards",
    ):
        assert part in said


def test_memory_lines_are_the_figures_of_the_cases(data: Data) -> None:
    figure = drawn("memory", data)
    (axes,) = figure.axes
    found = {to_hex(line.get_color()): list(zip(*line.get_data(), strict=True)) for line in axes.lines[:1]}
    wanted = [
        (n, data["cases"][f"tokens {n}"]["providers"]["ours"]["extra_mib"]) for n in (128, 512, 2048, 8192, 16384)
    ]
    assert found == {plots.BLUE.lower(): wanted}
    assert len(axes.lines) == 5
    said = words(figure)
    for part in ("H is 64", "all logits", "would need about 28 GiB", "2026-11-23", "67db0b09da", "V 151936", "16,384"):
        assert part in said
    trl, ours = (data["cases"]["tokens 16384"]["providers"][name]["extra_mib"] for name in ("trl", "ours"))
    assert claims.memory_claim(data) == f"At 16,384 tokens TRL's fused head takes {trl / ours:.1f} times our memory"


def test_memory_claim_is_of_who_reached_the_most_tokens(data: Data) -> None:
    changed = copy.deepcopy(data)
    changed["cases"]["tokens 16384"]["providers"]["trl"] = {"status": "absent", "reason": "no room"}
    assert claims.memory_claim(changed).startswith("At 8,192 tokens all logits take")  # the more of the two


def test_time_bars_are_the_figures_of_the_case(data: Data) -> None:
    case = data["cases"]["main"]
    shown = {x: p["ms"]["full"] for x, p in case["providers"].items() if "ms" in p and "/" not in x and "@" not in x}
    limit = shown.pop("products")["median"]
    figure = drawn("time", data)
    (axes,) = figure.axes
    ordered = sorted(shown.values(), key=lambda ms: ms["median"])
    assert [bar.get_width() for bar in axes.patches] == [ms["median"] / 1e3 for ms in ordered]
    whiskers = [list(line.get_xdata()) for line in axes.lines[: len(ordered)]]
    assert whiskers == [[ms["p20"] / 1e3, ms["p80"] / 1e3] for ms in ordered]
    fastest = ordered[0]["median"]
    assert (axes.lines[-1].get_xdata()[0] == limit / 1e3) == (limit < fastest)
    over = case["providers"]["trl"]["ms"]["full"]["median"] / shown["ours"]["median"]
    assert claims.time_claim(data) == f"TRL's fused head takes {over:.1f} times our time"
    for part in ("N 128", "V 151936", "fp32", "AMD EPYC", "2 threads", "TRL 1.16", "0b9e116e58", "2026-11-21"):
        assert part in words(figure)


def test_a_limit_is_never_drawn_as_slower_than_the_whole(data: Data) -> None:
    changed = copy.deepcopy(data)
    for slower, said in ((1.2, True), (0.5, False)):
        ours = changed["cases"]["main"]["providers"]["ours"]["ms"]["full"]["median"]
        changed["cases"]["main"]["providers"]["products"]["ms"]["full"]["median"] = slower * ours
        figure = drawn("time", changed)
        assert ("within noise" in words(figure)) is said
        assert ("matrix products alone:" in words(figure)) is not said


def test_a_provider_has_one_colour() -> None:
    colours = {name: plots.color(name) for name in PROVIDERS}
    assert {colours[name] for name in colours if name.startswith("ours")} == {plots.BLUE}
    assert plots.color("ours@64") == plots.BLUE
    others = {name: x for name, x in colours.items() if not name.startswith("ours")}
    assert plots.BLUE not in others.values()
    assert colours["trl"] not in {x for name, x in others.items() if name != "trl"}
    text = (ROOT / "examples" / "demo_report.py").read_text()
    assert f'THEIRS, OURS, INK, CARD = "{colours["trl"]}", "{plots.BLUE}", "{plots.INK}", "{plots.CARD}"' in text


def test_missing_parts_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plots.render(sparse(), tmp_path) == []
    told = capsys.readouterr().err
    for name in NAMES:
        assert f"no figures for {name}\n" in told
    assert list(tmp_path.iterdir()) == []


def test_page_has_each_figure_once_above_its_table(data: Data, rendered: list[Path], tmp_path: Path) -> None:
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
    titles = [line.removeprefix("## ") for line in text if line.startswith("## ")]
    assert len(titles) == len(set(titles))
    *sections, reading, conditions = titles
    assert reading == "How to read the tables" and conditions == "Conditions of the main run"
    assert sum(line.startswith("Conditions: ") for line in text) == len(sections)


def test_page_begins_with_the_claims_and_the_first_figure(data: Data, rendered: list[Path], tmp_path: Path) -> None:
    """The date, the versions and the commit come last."""
    page = tmp_path / "docs" / "benchmarks.md"
    tables.write(data, page, rendered)
    text = page.read_text()
    first = text[: text.index("step.png")]
    assert all(claim(data) in first for claim in claims.CLAIMS.values())
    assert "nothing is claimed for GPUs" in first and "Faster than ours" in first
    assert len(first.splitlines()) < 20 and data["commit"] not in first
    assert data["commit"] in text[text.index("## Conditions of the main run") :]


def test_the_summary_says_where_ours_is_behind(data: Data) -> None:
    case = data["cases"]["bf16"]["providers"]
    ours, eager = (case[name]["ms"]["full"]["median"] for name in ("ours", "eager"))
    said = " ".join(claims.summary(data))
    assert f"in the case `bf16`: all logits ({eager / ours:.2f} times our time)" in said
    assert "Liger's fused GRPO takes 0.4 times ours" in said
    assert claims.summary(sparse()) == []


def test_every_picture_of_the_docs_is_shown_somewhere() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    pictures = list((ROOT / "docs" / "plots").iterdir())
    assert pictures
    assert [path.name for path in pictures if f"plots/{path.name}" not in pages] == []
