"""Tables of benchmark results: they show the figures of the file, those that are there, and no path of the machine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import labels, tables
from tests.support.bench_results import parsed, results, sparse

Data = dict[str, Any]


@pytest.fixture(scope="module")
def data() -> Data:
    return results()


def close(text: str, value: float) -> bool:
    """Whether the text is the value, in the digits it is written in."""
    return float(text) == pytest.approx(value, rel=6e-4, abs=1e-12)


def test_timed_tables(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Main cases")
    case = data["cases"]["main"]
    ran = {name: x for name, x in case["providers"].items() if x["status"] == "ok"}
    rows = rows[: len(ran)]
    assert rows[0]["case"] == "main" and not any(row["case"] for row in rows[1:])
    assert [row["provider"] for row in rows] == [f"`{name}`" for name in ran]
    ours, products = (ran[name]["ms"]["full"]["median"] for name in ("ours", "products"))
    for row, (name, x) in zip(rows, ran.items(), strict=True):
        ms = x["ms"]["full"]
        assert close(row["seconds"], ms["median"] / 1e3)
        assert [
            close(text, ms[q] / 1e3) for text, q in zip(row["20 to 80 %"].split(" to "), ("p20", "p80"), strict=True)
        ]
        for column, over in (("/ ours", ms["median"] / ours), ("/ products", ms["median"] / products)):
            is_noise = name == "products" and over > 1 if column == "/ ours" else over < 1
            assert row[column] == tables.NOISE if is_noise else float(row[column]) == pytest.approx(over, abs=0.00501)
        memory = x["extra_mib"] if name != "products" else None
        for column, value in (("FLOPs, NVH", x["flops_nvh"]), ("extra MiB", memory)):
            assert row[column] == "" if value is None else close(row[column], value)
        assert row["logp"] == (f"{x['errors']['logp_mean']:.1e}" if "logp_mean" in x["errors"] else "")
        assert row["note"] == x["note"]
    text = "\n".join(tables.lines(data))
    for name in case["providers"].keys() - ran.keys():
        assert f"- `{name}`: absent: {case['providers'][name]['reason'][:12]}" in text


def test_all_cases(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "All cases")
    cases = {x: case for x, case in data["cases"].items() if case["part"] in ("main", "shapes", "workloads")}
    assert {row["case"] for row in rows} == cases.keys()
    for row in rows:
        providers = cases[row["case"]]["providers"]
        mode = "score" if cases[row["case"]]["score"] else "full"
        trl, ours = (providers[name]["ms"][mode]["median"] for name in ("trl", "ours"))
        assert close(row["ours, seconds"], ours / 1e3)
        assert float(row["trl / ours"]) == pytest.approx(trl / ours, abs=0.00501)
        assert close(row["NVH, ours"], providers["ours"]["flops_nvh"])
        assert close(row["MiB, ours"], providers["ours"]["extra_mib"])
    which = {row["case"]: row["which is"] for row in rows}
    assert which["gspo"] == "off-policy, ratio of the sequence"
    assert which["half zero"] == "50 % of the groups with advantage 0"
    assert which["Llama-3-8B"] == "Llama-3-8B: N 64, T 16, H 4096, V 128256; frozen head"


def test_scaling(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Scaling")
    assert [row["axis"] for row in rows if row["axis"]] == list(tables.AXES.values())
    axis = ""
    for row in rows:
        axis = row["axis"] or axis
        key = next(key for key, words in tables.AXES.items() if words == axis)
        cases = [case for case in data["cases"].values() if key in (case["series"] or "").split()]
        points = {labels.share(1 - x["zero_share"]) if key == "share" else str(x[key]): x["providers"] for x in cases}
        ours, trl = (points[row["value"]][name] for name in ("ours", "trl"))
        assert close(row["ours, ms"], ours["ms"]["full"]["median"])
        over = trl["ms"]["full"]["median"] / ours["ms"]["full"]["median"]
        assert float(row["trl / ours, time"]) == pytest.approx(over, abs=0.00501)
        assert float(row["trl / ours, MiB"]) == pytest.approx(trl["extra_mib"] / ours["extra_mib"], abs=0.00501)
    assert len(rows) == 9


def test_accuracy(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Accuracy")
    cases = {name: case for name, case in data["cases"].items() if case["part"] == "accuracy"}
    assert {row["provider"].strip("`") for row in rows} == cases["peaked"]["providers"].keys() - {"verl_triton", "cce"}
    for row in rows:
        for name, case in cases.items():
            found = case["providers"][row["provider"].strip("`")]["errors"]
            assert row[f"d hidden, {name}"] == f"{found['d_hidden']:.1e}"
            if "logp_mean" in found:
                assert row[f"logp, {name}"] == f"{found['logp_mean']:.1e}"
                assert row[f"ratios off, {name}"] == labels.share(float(f"{found['ratio_off']:.3g}"))


def test_goals(data: Data) -> None:
    goals = [
        {"case": "main", "figure": "seconds, trl / ours", "goal": ">= 1.9", "value": 2.115, "verdict": "pass"},
        {"case": "gone", "figure": "seconds", "goal": "<= 1.05", "value": None, "verdict": "not measured"},
    ]
    (rows,) = parsed(tables.lines({**data, "goals": goals}), "Goals")
    assert [(row["measured"], row["verdict"]) for row in rows] == [("2.115", "pass"), ("", "not measured")]


def test_memory_against_tokens(data: Data) -> None:
    (rows,) = parsed(tables.lines(data), "Memory against tokens")
    assert [row["tokens"] for row in rows] == ["128", "512", "2,048", "8,192", "16,384"]
    for row in rows:
        providers = data["cases"][f"tokens {row['tokens']}".replace(",", "")]["providers"]
        mib = {x: p.get("extra_mib") for x, p in providers.items()}
        assert close(row["grpo_kernels, MiB"], mib["ours"])
        assert close(row["grpo_kernels, 64 MiB, MiB"], mib["ours@64"])
        assert float(row["TRL's fused head / ours"]) == pytest.approx(mib["trl"] / mib["ours"], abs=0.00501)
        assert (row["all logits, log_softmax, MiB"] == row["all logits / ours"] == "") is (mib["eager"] is None)
    assert "- `eager`: absent: would need about 28 GiB, and 22 GiB are free (tokens 16384)" in tables.lines(data)


def test_a_limit_slower_than_what_does_more_is_noise(data: Data) -> None:
    changed = copy.deepcopy(data)
    providers = changed["cases"]["main"]["providers"]
    providers["products"]["ms"]["full"]["median"] = 1.1 * providers["ours"]["ms"]["full"]["median"]
    text = tables.lines(changed)
    rows = {row["provider"]: row for row in reversed(parsed(text, "Main cases")[0])}  # of the first case
    assert rows["`ours`"]["/ products"] == rows["`products`"]["/ ours"] == tables.NOISE
    assert float(rows["`trl`"]["/ products"]) > 1
    assert next(row for row in parsed(text, "All cases")[0] if row["case"] == "main")["products / ours"] == tables.NOISE


def test_conditions(data: Data) -> None:
    text = "\n".join(tables.lines(data))
    said = ("AMD EPYC", "2 cores", "2 threads", "python 3.11.7", "torch 2.13.0+cpu", "trl 1.16.0", "liger-kernel 0.8.5")
    for words in (
        *said,
        "cpp (CPU tensors;",
        data["commit"],
        data["date"],
        "rounds: 2 to 3",
        "`trl` | TRL 1.16 fused head",
    ):
        assert words in text


def test_gpu_conditions() -> None:
    devices = {"cpu": "x86_64", "cuda:0": "NVIDIA H200, capability 9.0, 140 GiB, CUDA 13.0", "driver_version": "580.1"}
    machine = {"versions": {"python": "3.12.1"}, "system": {"os": "Linux"}, "devices": devices}
    text = "\n".join(tables.lines({"format": 2, "device": "NVIDIA H200", "machine": machine, "cases": {}}))
    for words in ("machine: NVIDIA H200", "capability 9.0, 140 GiB, CUDA 13.0", "580.1", "python 3.12.1"):
        assert words in text
    assert "triton" not in text
    assert "None" not in text


def test_a_run_that_was_stopped_has_the_tables_of_what_it_has() -> None:
    text = tables.lines(sparse())
    (rows,) = parsed(text, "Main cases")
    assert [(row["provider"], row.get("ms")) for row in rows] == [("`ours`", "12.5"), ("`trl`", "")]
    assert "extra MiB" not in rows[0]
    for words in ("- `eager`: wrong: d_hidden (a)", "- `cce`: out of memory (a)", "- `liger_ce`: not run (a)"):
        assert words in text
    assert "None" not in "\n".join(text)
    assert tables.lines({"format": 2, "cases": {}})


def test_no_path_of_the_machine(data: Data, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    changed = copy.deepcopy(data)
    changed["cases"]["main"]["providers"]["ours"] |= {"status": "error", "reason": "/home/someone/x.py:3 and ~/a/b.so"}
    tables.write(changed, page)
    told = "\n".join([*tables.lines(data), page.read_text()])
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
