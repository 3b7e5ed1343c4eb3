"""Tables of benchmark results: they show the figures of the file, those that are there, and no path of the machine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import columns, compare, labels, tables
from tests.support.bench_results import ABSENT, TRAINING, parsed, results, sparse

Data = dict[str, Any]


@pytest.fixture(scope="module")
def data() -> Data:
    return results()


def close(text: str, value: float) -> bool:
    """Whether the text is the value, in the digits it is written in."""
    return float(text) == pytest.approx(value, rel=6e-4, abs=1e-12)


def check_costs(row: dict[str, str], case: Data, x: Data, scale: float) -> None:
    """The figures of one row that was timed, against the file."""
    mode, name = "score" if case["score"] else "full", row["provider"].strip("`")
    ms, ours, products = (p["ms"][mode] for p in (x, case["providers"]["ours"], case["providers"]["products"]))
    time = next(text for name, text in row.items() if name.split(",")[0] in ("seconds", "ms"))
    assert close(time, ms["median"] / scale)
    low, high = row["20 to 80 %"].split(" to ")
    assert close(low, ms["p20"] / scale)
    assert close(high, ms["p80"] / scale)
    over_ours, over_products = ms["median"] / ours["median"], ms["median"] / products["median"]
    noise = {"/ ours": name == "products" and over_ours > 1, "/ products": over_products < 1}
    for column, over in (("/ ours", over_ours), ("/ products", over_products)):
        assert row[column] == columns.NOISE if noise[column] else float(row[column]) == pytest.approx(over, abs=0.00501)
    memory = x.get("extra_mib") if name != "products" else None
    for column, value in (("FLOPs, NVH", x["flops_nvh"]), ("extra MiB", memory)):
        assert row[column] == "" if value is None else close(row[column], value)
    for column, name in (("logp", "logp_mean"), ("d hidden", "d_hidden"), ("d weight", "d_weight")):
        value = x.get("errors", {}).get(name)
        assert row[column] == ("" if value is None else f"{value:.1e}")


def test_main_table(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Main case: main")
    case = data["cases"]["main"]
    assert [row["provider"] for row in rows] == [f"`{name}`" for name in case["providers"]]
    for row, (name, x) in zip(rows, case["providers"].items(), strict=True):
        if name in ABSENT:
            assert row["seconds"] == row["/ ours"] == row["extra MiB"] == ""
            assert row["note"].startswith(f"{x['status']}: {x['reason'][:12]}")
        else:
            check_costs(row, case, x, 1e3)
            assert all(close(row[mode], x["ms"][mode]["median"] / 1e3) for mode in ("forward", "backward"))
            assert row["note"] == x["note"]


@pytest.mark.parametrize("part", ["shapes", "workloads"])
def test_tables_of_several_cases(data: Data, part: str) -> None:
    (rows,), (overview,) = parsed(tables.lines(data), tables.TITLES[part]), parsed(tables.lines(data), "All cases")
    cases = {name: case for name, case in data["cases"].items() if case["part"] == part}
    overview = [row for row in overview if row["case"] in cases]
    assert [row["case"] for row in overview] == list(cases)
    seen = ""
    for row in rows:
        seen = row["case"] or seen
        name = row["provider"].strip("`")
        if name not in ABSENT:
            check_costs(row, cases[seen], cases[seen]["providers"][name], 1e3)
    assert len(rows) == sum(len(case["providers"]) for case in cases.values())
    for row, case in zip(overview, cases.values(), strict=True):
        mode = "score" if case["score"] else "full"
        trl, ours = (case["providers"][name]["ms"][mode]["median"] for name in ("trl", "ours"))
        assert close(row["ours, seconds"], ours / 1e3)
        assert float(row["trl / ours"]) == pytest.approx(trl / ours, abs=0.00501)


def test_a_case_says_what_it_has_of_its_own(data: Data) -> None:
    text = tables.lines(data)
    assert "- gspo: trainable head, off-policy, ratio of the sequence; products 6 NVH" in text
    assert any(line.startswith("- half zero: ") and "50 % of the groups with advantage 0" in line for line in text)


@pytest.mark.parametrize(("axis", "title"), tables.AXES.items())
def test_scaling_tables(data: Data, axis: str, title: str) -> None:
    (rows,) = parsed(tables.lines(data), f"Scaling: {title}")
    cases = [case for case in data["cases"].values() if case["series"] == axis]
    points = {labels.share(1 - x["zero_share"]) if axis == "share" else str(x[axis]): x for x in cases}
    seen: list[str] = []
    for row in rows:
        seen += [row[title]] if row[title] else []
        check_costs(row, points[seen[-1]], points[seen[-1]]["providers"][row["provider"].strip("`")], 1e3)
    assert len(seen) == 4
    assert seen == sorted(seen, key=lambda text: float(text.split()[0]))


def test_a_case_may_be_a_point_on_several_axes(data: Data) -> None:
    changed = copy.deepcopy(data)
    changed["cases"]["main"]["series"] = "n v"
    changed["cases"]["main"]["n"] = 384
    text = tables.lines(changed)
    assert [row["N"] for row in parsed(text, "Scaling: N")[0] if row["N"]] == ["256", "384", "512", "1024", "2048"]
    assert sum(row["provider"] == "`trl`" for row in parsed(text, "Scaling: V")[0]) == 5
    assert sum(row["provider"] == "`compiled`" for row in parsed(text, "Scaling: V")[0]) == 0  # not at every point


def test_accuracy_tables(data: Data) -> None:
    found = parsed(tables.lines(data), "Accuracy")
    for rows, name in zip(found, ("logits 10", "logits 20", "logits 40", "peaked"), strict=True):
        providers = data["cases"][name]["providers"]
        assert [row["provider"].strip("`") for row in rows] == [x for x in providers if x != "products"]
        for row in rows:
            errors = providers[row["provider"].strip("`")].get("errors", {})
            for column, name in (
                ("logp mean", "logp_mean"),
                ("logp max", "logp_max"),
                ("entropy mean", "entropy_mean"),
            ):
                assert row[column] == (f"{errors[name]:.1e}" if errors else "")
            for column, name in (("ratios off by > 1 %", "ratio_off"), ("clip decisions that differ", "clip_differs")):
                assert row[column] == (labels.share(errors[name]) if errors else "")


def test_training_table(data: Data) -> None:
    rows, variants = parsed(tables.lines(data), "The head in a training step")
    for row, model in zip(rows, TRAINING["models"], strict=True):
        what, scale = ("seconds", 1.0) if model["kind"] == "measured" else ("flops", 1e12)
        for name, value in model[what].items():
            number, share = row[name].split(" (")
            assert close(number, value / scale)
            assert share == f"{labels.share(value / sum(model[what].values()))})"
        assert row["head, V x H"] == " x ".join(map(str, model["head"]))
        total = sum(model[what].values())
        head, generation = model[what]["head"], model[what]["generation"]
        assert row["head"].endswith(f"({labels.share(model['head_share'])})")
        assert row["head, without generation"] == labels.share(head / (total - generation))
    assert variants[0]["head"] == labels.share(0.2)
    assert variants[0]["gradient checkpointing"] == "no"
    assert "- no measurement of Qwen3-8B: needs about 131 GiB, 5 GiB are free" in tables.lines(data)


def test_goals(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Goals")
    assert [row["verdict"] for row in rows] == ["pass", "not measured"]
    assert [row["measured"] for row in rows] == ["2.115", ""]


def test_memory_table(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Memory against tokens")
    assert [row["tokens"] for row in rows] == ["512", "4,096", "16,384"]
    for row in rows:
        mib = {
            x: p.get("extra_mib")
            for x, p in data["cases"][f"tokens {row['tokens']}".replace(",", "")]["providers"].items()
        }
        assert close(row["grpo_kernels, MiB"], mib["ours"])
        assert close(row["grpo_kernels, 128 MiB, MiB"], mib["ours@128"])
        assert float(row["TRL's fused head / ours"]) == pytest.approx(mib["trl"] / mib["ours"], abs=0.00501)
        assert (row["all logits, log_softmax, MiB"], row["all logits / ours"]).count("") == (
            2 if mib["eager"] is None else 0
        )
    assert "- 16,384 tokens, all logits: would need about 28 GiB" in tables.lines(data)


def test_a_limit_slower_than_what_does_more_is_noise(data: Data) -> None:
    changed = copy.deepcopy(data)
    providers = changed["cases"]["main"]["providers"]
    ours = providers["ours"]["ms"]["full"]["median"]
    providers["products"]["ms"]["full"]["median"] = 1.1 * ours
    text = tables.lines(changed)
    rows = {row["provider"]: row for row in parsed(text, "Main case: main")[0]}
    assert rows["`ours`"]["/ products"] == rows["`products`"]["/ ours"] == columns.NOISE
    assert float(rows["`trl`"]["/ products"]) > 1
    assert (
        next(row for row in parsed(text, "All cases")[0] if row["case"] == "main")["products / ours"] == columns.NOISE
    )


def test_conditions(data: Data) -> None:
    text = "\n".join(tables.lines(data))
    said = ("AMD EPYC", "2 cores", "2 threads", "python 3.11.7", "torch 2.13.0+cpu", "trl 1.16.0", "liger-kernel 0.8.5")
    for words in (*said, "cpp (CPU tensors)", data["commit"], data["date"], "rounds: 3", "`trl` | TRL 1.16 fused head"):
        assert words in text


def test_gpu_conditions() -> None:
    machine = {"capability": "9.0", "multiprocessors": 132, "memory_gib": 139.8, "driver": "580.1", "python": "3.12.1"}
    data = {"format": 2, "device": "NVIDIA H200", "machine": {**machine, "cuda": "13.0", "triton": None}, "cases": {}}
    text = "\n".join(tables.lines(data))
    for words in ("NVIDIA H200", "capability 9.0", "132 multiprocessors", "139.8 GiB", "cuda 13.0", "python 3.12.1"):
        assert words in text
    assert "triton" not in text
    assert "None" not in text


def test_sparse_tables() -> None:
    text = tables.lines(sparse())
    (rows,) = parsed(text, "Main case: a")
    by_name = {row["provider"].strip("`"): row for row in rows}
    assert by_name["ours"]["ms"] == "12.5"
    assert by_name["trl"]["ms"] == ""
    assert (by_name["eager"]["ms"], by_name["eager"]["/ ours"], by_name["eager"]["note"]) == (
        "10",
        "",
        "wrong: d_hidden",
    )
    assert by_name["cce"]["note"] == "out of memory"
    assert by_name["liger_ce"]["note"] == "not run"
    assert "extra MiB" not in rows[0]
    assert "None" not in "\n".join(text)
    assert tables.lines({"format": 2, "cases": {}})


def test_no_path_of_the_machine(data: Data, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    tables.write(data, page)
    changed = copy.deepcopy(data)
    changed["cases"]["main"]["providers"]["ours"] |= {"status": "error", "reason": "/home/someone/x.py:3 and ~/a/b.so"}
    told = "\n".join([*tables.lines(data), page.read_text(), *compare.lines(compare.compare(data, changed))])
    for words in ("/home", "/opt", "someone", "~/", str(tmp_path)):
        assert words not in told
    assert "x.py:3 and b.so" in told
    assert labels.tidy("ours/torch, 3 / 4, https://a.org/b/c and N/A") == "ours/torch, 3 / 4, https://a.org/b/c and N/A"
    assert labels.tidy("at C:\\Users\\me\\a.dll\nand |x| /usr/lib/") == "at a.dll and /x/ lib"


def test_labels() -> None:
    versions = {"trl": "1.16.0", "liger-kernel": "0.8.5", "torch": "2.13.0+cpu", "verl": "absent"}
    found = [labels.label(x, versions) for x in ("trl", "liger_ce", "linear_ce", "verl_torch", "ours@128", "new@64")]
    assert found == [
        "TRL 1.16 fused head",
        "Liger 0.8.5 scaled CE",
        "torch 2.13 linear_cross_entropy",
        "verl torch head",
        "grpo_kernels, 128 MiB",
        "new, 64 MiB",
    ]
