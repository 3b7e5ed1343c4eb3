"""Tables, claims and figures of the results: the numbers of the file, those that are there, and no machine's path."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import __main__ as command
from benchmarks import curves, figures, plots, tables, words
from benchmarks.machine import ROOT
from tests.support.bench_results import parsed, results, sparse

Data = dict[str, Any]


@pytest.fixture(scope="module")
def data() -> Data:
    return results()


def close(text: str, value: float) -> bool:
    """Whether the text is the value, in the digits it is written in."""
    return float(text) == pytest.approx(value, rel=6e-4, abs=1e-12)


def test_the_pages_are_what_the_results_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the newest of those that are committed; nothing is measured."""
    newest = sorted((ROOT / "benchmarks" / "results").glob("cpu-20*.json"))[-1]
    assert command.main(["--report", str(newest), "--plot", "--docs", str(tmp_path)]) == 0
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()
    assert curves.main(["--output", str(tmp_path / "plots")]) == 0
    made = {path.name for path in (tmp_path / "plots").iterdir()}
    assert made == {"memory.png", "step.png", "time.png", "distillation.png", "unified-view.png"}
    shown = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert all(f"plots/{name}" in shown for name in (*made, "real.png"))
    assert made | {"real.png"} == {path.name for path in (ROOT / "docs" / "plots").iterdir()}


def test_claims_are_of_the_results_and_begin_the_page(data: Data, tmp_path: Path) -> None:
    """And each figure's title is its claim; the commit and the versions come last."""
    of_case = data["cases"]["main"]["providers"]
    trl, ours = (of_case[name]["ms"]["full"]["median"] for name in ("trl", "ours"))
    assert tables.time_claim(data) == f"Our head is {trl / ours:.1f} times as fast as TRL's fused head"
    trl, ours = (data["cases"]["tokens 16384"]["providers"][name]["extra_mib"] for name in ("trl", "ours"))
    assert tables.memory_claim(data) == f"At 16,384 tokens TRL's fused head takes {trl / ours:.1f} times our memory"
    over = figures.faster(data["step"]["scenes"]["short prompts"], "defaults")[0]
    assert tables.step_claim(data) == f"Our training step is {over:.1f} times as fast as stock TRL's on a CPU"
    with plots.looks():
        drawn = {name: draw(data) for name, draw in plots.DRAWN.items()}
    for name, figure in drawn.items():
        title, subtitle, *_ = (" ".join(text.get_text().split()).replace("\u00a0", " ") for text in figure.texts)
        run = figures.of_run(data, name)
        assert title == tables.CLAIMS[name](data)
        assert all(part in subtitle for part in ("fp32", f"CPU: {run['machine']['system']['cpu']}", run["date"][:10]))
    tables.write(data, tmp_path / "page.md", [tmp_path / "step.png"])
    text = (tmp_path / "page.md").read_text()
    first = text[: text.index("step.png")]
    assert all(claim(data) in first for claim in tables.CLAIMS.values())
    assert "nothing is claimed for GPUs" in first and data["commit"] not in first
    assert data["commit"] in text[text.index("## Conditions of the main run") :]


def test_the_claim_on_memory_is_of_who_reached_the_most_tokens(data: Data) -> None:
    changed = copy.deepcopy(data)
    changed["cases"]["tokens 16384"]["providers"]["trl"] = {"status": "absent", "reason": "no room"}
    assert tables.memory_claim(changed).startswith("At 8,192 tokens all logits take")  # the more of the two


def test_a_few_cells_of_each_table(data: Data) -> None:
    """The page as a whole is compared with the committed one."""
    text = tables.lines(data)
    main = {name: x for name, x in data["cases"]["main"]["providers"].items() if x["status"] == "ok"}
    seconds = {name: x["ms"]["full"]["median"] / 1e3 for name, x in main.items()}
    rows = parsed(text, "Main cases")[0][: len(main)]
    assert [row["provider"] for row in rows] == [f"`{name}`" for name in main]
    trl = next(row for row in rows if row["provider"] == "`trl`")
    assert close(trl["seconds"], seconds["trl"]) and close(trl["extra MiB"], main["trl"]["extra_mib"])
    assert float(trl["/ ours"]) == pytest.approx(seconds["trl"] / seconds["ours"], abs=0.00501)
    assert float(trl["/ products"]) == pytest.approx(seconds["trl"] / seconds["products"], abs=0.00501)
    cases = {row["case"]: row for row in parsed(text, "All cases")[0]}
    assert close(cases["main"]["ours, seconds"], seconds["ours"])
    assert cases["gspo"]["which is"] == "off-policy, ratio of the sequence"
    assert cases["Llama-3-8B"]["which is"] == "Llama-3-8B: N 64, T 16, H 4096, V 128256; frozen head"
    points = {row["value"]: row for row in parsed(text, "Scaling")[0]}
    assert close(points["64"]["ours, ms"], data["cases"]["n 64"]["providers"]["ours"]["ms"]["full"]["median"])
    memory = {row["tokens"]: row for row in parsed(text, "Memory against tokens")[0]}
    trl, ours = (data["cases"]["tokens 2048"]["providers"][x]["extra_mib"] for x in ("trl", "ours"))
    assert float(memory["2,048"]["TRL's fused head / ours"]) == pytest.approx(trl / ours, abs=0.00501)
    assert memory["16,384"]["all logits / ours"] == ""
    (ours,) = (row for row in parsed(text, "Accuracy")[0] if row["provider"] == "`ours`")
    errors = data["cases"]["logits 10"]["providers"]["ours"]["errors"]
    assert ours["logp, logits 10"] == f"{errors['logp_mean']:.1e}"
    assert ours["d hidden, logits 10"] == f"{errors['d_hidden']:.1e}"
    step = {row["variant"]: row for row in parsed(text, "A whole training step")[0]}
    defaults = data["step"]["scenes"]["short prompts"]["variants"]["defaults"]
    assert float(step["defaults"]["seconds"]) == pytest.approx(defaults["seconds"], rel=6e-3)
    assert float(step["defaults"]["saved MiB"]) == pytest.approx(defaults["saved_mib"]["max"], rel=6e-3)


def test_a_limit_slower_than_what_does_more_is_noise(data: Data) -> None:
    changed = copy.deepcopy(data)
    providers = changed["cases"]["main"]["providers"]
    providers["products"]["ms"]["full"]["median"] = 1.1 * providers["ours"]["ms"]["full"]["median"]
    text = tables.lines(changed)
    rows = {row["provider"]: row for row in reversed(parsed(text, "Main cases")[0])}  # of the first case
    assert rows["`ours`"]["/ products"] == rows["`products`"]["/ ours"] == tables.NOISE
    assert float(rows["`trl`"]["/ products"]) > 1
    assert next(row for row in parsed(text, "All cases")[0] if row["case"] == "main")["products / ours"] == tables.NOISE


def test_goals_and_conditions(data: Data) -> None:
    goals = [
        {"case": "main", "figure": "seconds, trl / ours", "goal": ">= 1.9", "value": 2.115, "verdict": "pass"},
        {"case": "gone", "figure": "seconds", "goal": "<= 1.05", "value": None, "verdict": "not measured"},
    ]
    (rows,) = parsed(tables.lines({**data, "goals": goals}), "Goals")
    assert [(row["measured"], row["verdict"]) for row in rows] == [("2.115", "pass"), ("", "not measured")]
    devices = {"cpu": "x86_64", "cuda:0": "NVIDIA H200, capability 9.0, 140 GiB, CUDA 13.0", "driver_version": "580.1"}
    machine = {"versions": {"python": "3.12.1"}, "system": {"os": "Linux"}, "devices": devices}
    text = "\n".join(tables.lines({"format": 2, "device": "NVIDIA H200", "machine": machine, "cases": {}}))
    for part in ("machine: NVIDIA H200", "capability 9.0, 140 GiB, CUDA 13.0", "580.1", "python 3.12.1"):
        assert part in text
    assert "triton" not in text and "None" not in text


def test_a_run_that_was_stopped_has_the_tables_of_what_it_has(tmp_path: Path) -> None:
    text = tables.lines(sparse())
    (rows,) = parsed(text, "Main cases")
    assert [(row["provider"], row.get("ms")) for row in rows] == [("`ours`", "12.5"), ("`trl`", "")]
    assert "extra MiB" not in rows[0]
    for line in ("- `eager`: wrong: d_hidden (a)", "- `cce`: out of memory (a)", "- `liger_ce`: not run (a)"):
        assert line in text
    assert "None" not in "\n".join(text)
    assert tables.lines({"format": 2, "cases": {}})
    assert plots.render(sparse(), tmp_path) == []


def test_no_path_of_the_machine_and_no_number_that_wraps(data: Data, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    changed = copy.deepcopy(data)
    changed["cases"]["main"]["providers"]["ours"] |= {"status": "error", "reason": "/home/someone/x.py:3 and ~/a/b.so"}
    tables.write(changed, page)
    text = page.read_text()
    for part in ("/home", "/opt", "someone", "~/", str(tmp_path)):
        assert part not in text
    assert "x.py:3 and b.so" in text and "e\u20110" in text and "e-0" not in text
    assert words.tidy("ours/torch, 3 / 4, https://a.org/b/c and N/A") == "ours/torch, 3 / 4, https://a.org/b/c and N/A"
    assert words.tidy("at\n|x| /usr/lib/") == "at /x/ lib"


def test_names_and_features() -> None:
    versions = {"trl": "1.16.0", "torch": "2.13.0+cpu", "verl": "absent"}
    names = {"trl": "TRL 1.16 fused head", "linear_ce": "torch 2.13 linear_cross_entropy"}
    names |= {"verl_torch": "verl torch head", "ours@128": "grpo_kernels, 128 MiB", "new@64": "new, 64 MiB"}
    assert {x: words.label(x, versions) for x in names} == names
    wide = {"part": "distill", "divergence": 0.25, "teacher_h": 2048, "score": True, "frozen": False, "scale": 11.0}
    said = "JSD of beta 0.25 from a teacher, whose H is 2048, without gradients, logits to about 11"
    assert words.features(wide) == said


def test_figures_draw_the_results(data: Data) -> None:
    """The bars and lines of each; what was not measured is not drawn."""
    with plots.looks():
        step, memory, time = (plots.DRAWN[name](data) for name in ("step", "memory", "time"))
    scene = data["step"]["scenes"]["short prompts"]["variants"]
    assert [bar.get_width() for bar in step.axes[0].patches] == [scene[name]["seconds"] for name in plots.STEP_SHOWN]
    ours = {n: data["cases"][f"tokens {n}"]["providers"]["ours"]["extra_mib"] for n in (128, 512, 2048, 8192, 16384)}
    assert dict(zip(*memory.axes[0].lines[0].get_data(), strict=True)) == ours
    assert "would need about 28 GiB" in memory.texts[2].get_text()
    timed = {x: p["ms"]["full"]["median"] for x, p in data["cases"]["main"]["providers"].items() if "ms" in p}
    plain = sorted(ms / 1e3 for x, ms in timed.items() if x != "products" and "/" not in x and "@" not in x)
    assert [bar.get_width() for bar in time.axes[0].patches][: len(plain)] == plain


def test_curves_end_where_the_seeds_do() -> None:
    distilled, unified = (curves.read(path)[1] for path in curves.newest())
    with plots.looks():
        left, right = curves.draw_distillation(distilled).axes
        (axes,) = curves.draw_unified_view(unified).axes
    ends = [curves.final(distilled["runs"], name, distilled["pass"]) for name in curves.LOSSES]
    assert [line.get_ydata()[-1] for line in left.lines] == pytest.approx(ends)
    assert ends == sorted(ends) and len(right.lines) == 3
    for name, line in zip(curves.METHODS, axes.lines, strict=True):
        rewards = [run["reward"][-1] for run in unified["runs"] if run["method"] == name]
        assert line.get_ydata()[-1] == pytest.approx(100 * statistics.fmean(rewards))
    assert curves.distillation_claim(distilled) in " ".join((ROOT / "docs" / "divergences.md").read_text().split())
    assert curves.unified_claim(unified) in (ROOT / "docs" / "unified-view.md").read_text()
    assert plots.apart([1.0, 1.0, 9.0], 2.0) == [0.0, 2.0, 9.0]


def test_other_files_than_curves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"runs": [{"other": 1}]}))
    with pytest.raises(ValueError, match=r"x\.json: expected the curves of"):
        curves.read(path)
