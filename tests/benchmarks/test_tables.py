"""Tables, claims and figures of the results: the numbers of the file, those that are there, and no machine's path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks import __main__ as command
from benchmarks import figures, plots, tables, words
from benchmarks.machine import ROOT
from tests.support.bench_results import parsed, results, sparse

Data = dict[str, Any]


@pytest.fixture
def data() -> Data:
    return results()


def test_the_pages_are_what_the_results_say(tmp_path: Path) -> None:
    """Of the newest of those that are committed; nothing is measured."""
    newest = sorted((ROOT / "benchmarks" / "results").glob("cpu-20*.json"))[-1]
    assert command.main(["--report", str(newest), "--plot", "--docs", str(tmp_path)]) == 0
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs" / "benchmarks.md").read_text()
    made = {path.name for path in (tmp_path / "plots").iterdir()}
    assert made == {"memory.png", "step.png", "time.png"}
    shown = "".join(
        path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    others = {"real.png", "distillation.png", "unified-view.png"}
    assert all(f"plots/{name}" in shown for name in made | others)
    assert made | others == {path.name for path in (ROOT / "docs" / "plots").iterdir()}


def test_claims_are_of_the_results_and_begin_the_page(data: Data, tmp_path: Path) -> None:
    """And each figure's title is its claim; the commit and the versions come last."""
    trl, ours = (
        data["cases"]["main"]["providers"][name]["ms"]["full"]["median"] for name in ("trl", "ours")
    )
    assert (
        tables.time_claim(data) == f"Our head is {trl / ours:.1f} times as fast as TRL's fused head"
    )
    trl, ours = (
        data["cases"]["tokens 16384"]["providers"][name]["extra_mib"] for name in ("trl", "ours")
    )
    assert (
        tables.memory_claim(data)
        == f"At 16,384 tokens TRL's fused head takes {trl / ours:.1f} times our memory"
    )
    over = figures.faster(data["step"]["scenes"]["short prompts"], "defaults")[0]
    assert (
        tables.step_claim(data)
        == f"Our training step is {over:.1f} times as fast as stock TRL's on a CPU"
    )
    for name, draw in plots.DRAWN.items():
        with plots.looks():
            figure = draw(data)
        title, subtitle, *_ = (
            " ".join(text.get_text().split()).replace("\u00a0", " ") for text in figure.texts
        )
        run = figures.of_run(data, name)
        assert title == tables.CLAIMS[name](data)
        assert all(
            part in subtitle
            for part in ("fp32", f"CPU: {run['machine']['system']['cpu']}", run["date"][:10])
        )
    tables.write(data, tmp_path / "page.md", [tmp_path / "step.png"])
    text = (tmp_path / "page.md").read_text()
    first = text[: text.index("step.png")]
    assert all(claim(data) in first for claim in tables.CLAIMS.values())
    assert "nothing is claimed for GPUs" in first and data["commit"] not in first
    assert data["commit"] in text[text.index("## Conditions of the main run") :]
    data["cases"]["tokens 16384"]["providers"]["trl"] = {"status": "absent", "reason": "no room"}
    assert tables.memory_claim(data).startswith(
        "At 8,192 tokens all logits take"
    )  # the more of the two


def test_a_few_cells_of_each_table(data: Data) -> None:
    """The page as a whole is compared with the committed one."""
    text = tables.lines(data)

    def row(title: str, **where: str) -> dict[str, str]:
        ((column, value),) = where.items()
        return next(x for table in parsed(text, title) for x in table if x[column] == value)

    main = data["cases"]["main"]["providers"]
    ours, trl, products = (
        main[name]["ms"]["full"]["median"] for name in ("ours", "trl", "products")
    )
    cells = row("Main cases", provider="`trl`")
    assert (cells["/ ours"], cells["/ products"]) == (f"{trl / ours:.2f}", f"{trl / products:.2f}")
    assert (cells["seconds"], cells["FLOPs, NVH"]) == (f"{trl / 1e3:.4g}", "8")
    assert cells["extra MiB"] == f"{main['trl']['extra_mib']:.4g}"
    assert row("All cases", case="main")["ours, seconds"] == f"{ours / 1e3:.4g}"
    assert row("All cases", case="gspo")["which is"] == "off-policy, ratio of the sequence"
    llama = "Llama-3-8B: N 64, T 16, H 4096, V 128256; frozen head"
    assert row("All cases", case="Llama-3-8B")["which is"] == llama
    of_64 = data["cases"]["n 64"]["providers"]["ours"]["ms"]["full"]["median"]
    assert row("Scaling", value="64")["ours, ms"] == f"{of_64:.4g}"
    trl, ours = (data["cases"]["tokens 2048"]["providers"][x]["extra_mib"] for x in ("trl", "ours"))
    assert (
        row("Memory against tokens", tokens="2,048")["TRL's fused head / ours"]
        == f"{trl / ours:.2f}"
    )
    assert row("Memory against tokens", tokens="16,384")["all logits / ours"] == ""
    errors = data["cases"]["logits 10"]["providers"]["ours"]["errors"]
    cells = row("Accuracy", provider="`ours`")
    assert cells["logp, logits 10"] == f"{errors['logp_mean']:.1e}"
    assert cells["d hidden, logits 10"] == f"{errors['d_hidden']:.1e}"
    defaults = data["step"]["scenes"]["short prompts"]["variants"]["defaults"]
    cells = row("A whole training step", variant="defaults")
    assert (cells["seconds"], cells["saved MiB"]) == tuple(
        f"{x:.3g}" for x in (defaults["seconds"], defaults["saved_mib"]["max"])
    )


def test_a_limit_slower_than_what_does_more_is_noise(data: Data) -> None:
    providers = data["cases"]["main"]["providers"]
    providers["products"]["ms"]["full"]["median"] = 1.1 * providers["ours"]["ms"]["full"]["median"]
    text = tables.lines(data)
    rows = {
        row["provider"]: row for row in reversed(parsed(text, "Main cases")[0])
    }  # of the first case
    assert rows["`ours`"]["/ products"] == rows["`products`"]["/ ours"] == tables.NOISE
    assert float(rows["`trl`"]["/ products"]) > 1
    assert (
        next(row for row in parsed(text, "All cases")[0] if row["case"] == "main")[
            "products / ours"
        ]
        == tables.NOISE
    )


def test_goals_and_conditions_of_a_gpu() -> None:
    goals = [
        {
            "case": "main",
            "figure": "seconds, trl / ours",
            "goal": ">= 1.9",
            "value": 2.115,
            "verdict": "pass",
        },
        {
            "case": "gone",
            "figure": "seconds",
            "goal": "<= 1.05",
            "value": None,
            "verdict": "not measured",
        },
    ]
    devices = {
        "cpu": "x86_64",
        "cuda:0": "NVIDIA H200, capability 9.0, 140 GiB, CUDA 13.0",
        "driver_version": "580.1",
    }
    machine = {"versions": {"python": "3.12.1"}, "system": {"os": "Linux"}, "devices": devices}
    text = tables.lines(
        {"format": 2, "device": "NVIDIA H200", "machine": machine, "cases": {}, "goals": goals}
    )
    (rows,) = parsed(text, "Goals")
    assert [(row["measured"], row["verdict"]) for row in rows] == [
        ("2.115", "pass"),
        ("", "not measured"),
    ]
    for part in (
        "machine: NVIDIA H200",
        "capability 9.0, 140 GiB, CUDA 13.0",
        "580.1",
        "python 3.12.1",
    ):
        assert part in "\n".join(text)
    assert "triton" not in "\n".join(text) and "None" not in "\n".join(text)


def test_a_run_that_was_stopped_has_the_tables_of_what_it_has(tmp_path: Path) -> None:
    text = tables.lines(sparse())
    (rows,) = parsed(text, "Main cases")
    assert [(row["provider"], row.get("ms")) for row in rows] == [("`ours`", "12.5"), ("`trl`", "")]
    assert "extra MiB" not in rows[0]
    for line in (
        "- `eager`: wrong: d_hidden (a)",
        "- `cce`: out of memory (a)",
        "- `liger_ce`: not run (a)",
    ):
        assert line in text
    assert "None" not in "\n".join(text) and tables.summary(sparse()) == []
    assert tables.lines({"format": 2, "cases": {}})
    assert plots.render(sparse(), tmp_path) == []


def test_no_path_of_the_machine_and_no_number_that_wraps(data: Data, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    data["cases"]["main"]["providers"]["ours"] |= {
        "status": "error",
        "reason": "/home/someone/x.py:3 and ~/a/b.so",
    }
    tables.write(data, page)
    text = page.read_text()
    assert not [part for part in ("/home", "/opt", "someone", "~/", str(tmp_path)) if part in text]
    assert "x.py:3 and b.so" in text and "e\u20110" in text and "e-0" not in text
    assert (
        words.tidy("ours/torch, 3 / 4, https://a.org/b/c and N/A")
        == "ours/torch, 3 / 4, https://a.org/b/c and N/A"
    )
    assert words.tidy("at\n|x| /usr/lib/") == "at /x/ lib"


def test_names_and_features() -> None:
    versions = {"trl": "1.16.0", "torch": "2.13.0+cpu", "verl": "absent"}
    names = {"trl": "TRL 1.16 fused head", "linear_ce": "torch 2.13 linear_cross_entropy"}
    names |= {
        "verl_torch": "verl torch head",
        "ours@128": "grpo_kernels, 128 MiB",
        "new@64": "new, 64 MiB",
    }
    assert {x: words.label(x, versions) for x in names} == names
    wide = {
        "part": "distill",
        "divergence": 0.25,
        "teacher_h": 2048,
        "score": True,
        "frozen": False,
        "scale": 11.0,
    }
    said = "JSD of beta 0.25 from a teacher, whose H is 2048, without gradients, logits to about 11"
    assert words.features(wide) == said


def test_figures_draw_the_results(data: Data) -> None:
    with plots.looks():
        step, memory, time = (plots.DRAWN[name](data) for name in ("step", "memory", "time"))
    scene = data["step"]["scenes"]["short prompts"]["variants"]
    assert [bar.get_width() for bar in step.axes[0].patches] == [
        scene[name]["seconds"] for name in plots.STEP_SHOWN
    ]
    ours = {x["n"]: x["providers"]["ours"]["extra_mib"] for x in tables.memory_cases(data).values()}
    assert dict(zip(*memory.axes[0].lines[0].get_data(), strict=True)) == ours
    assert "would need about 28 GiB" in memory.texts[2].get_text()
    timed = {x: p["ms"]["full"] for x, p in data["cases"]["main"]["providers"].items() if "ms" in p}
    plain = sorted(
        (ms for x, ms in timed.items() if x in plots.COLORS), key=lambda ms: ms["median"]
    )
    assert [bar.get_width() for bar in time.axes[0].patches] == [ms["median"] / 1e3 for ms in plain]
    ends = [[ms[q] / 1e3 for q in ("p20", "p80")] for ms in plain]
    assert [list(line.get_xdata()) for line in time.axes[0].lines] == ends
