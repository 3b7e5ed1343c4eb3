"""The workload `sparse` at toy size: what is right, the operations that remain, what CCE's filter keeps as modelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("pytest_benchmark")

from benchmarks.cases import BenchCase, case, make_inputs
from benchmarks.harness import suite
from benchmarks.harness.measure import check
from benchmarks.harness.reference import is_right, reference
from benchmarks.harness.results import Results
from benchmarks.plan import NATS, cpu_cases
from benchmarks.providers import PROVIDERS, build, named
from benchmarks.providers.cce import LEAST, TILE, is_kept
from benchmarks.report import tables

CPU = torch.device("cpu")
SMALL = case("small", workload="sparse", part="sparse", n=32, h=32, v=8192, t=4)
CASES = {"trainable": SMALL, "frozen": replace(SMALL, frozen=True)}


def found(name: str, given: BenchCase) -> dict:
    inputs = make_inputs(given, CPU)
    return check(name, build(name, inputs), inputs, reference(inputs))


def test_where_no_row_is_dense_the_products_of_d_hidden_are_gone_and_of_d_weight_where_it_is_asked_for() -> None:
    counted = {
        (name, kind): found(name, given)["flops_nvh"]
        for kind, given in CASES.items()
        for name in ("ours", "ours/sparse", "ours/sparse_both")
    }
    assert counted == {
        ("ours", "trainable"): 6,
        ("ours/sparse", "trainable"): 4,
        ("ours/sparse_both", "trainable"): 2,
        ("ours", "frozen"): 4,
        ("ours/sparse", "frozen"): 2,
        ("ours/sparse_both", "frozen"): 2,
    }
    assert found("ours/sparse", SMALL)["spent"]["dense"] == 0
    assert 1 < found("ours/sparse", SMALL)["spent"]["entries"] < 8192 // 32


def test_rows_that_stay_dense_cost_their_products() -> None:
    flat = replace(SMALL, peaked=False, scale=3.0, v=1024)
    got = found("ours/sparse", flat)
    assert 0.5 < got["spent"]["dense"] <= 1
    assert got["flops_nvh"] == pytest.approx(4 + 2 * got["spent"]["dense"], abs=2e-3)


def test_the_errors_of_a_sparse_gradient_are_told_and_those_of_the_exact_part_are_not_forgiven() -> None:
    got = found("ours/sparse", SMALL)
    assert got["status"] == "checked"
    assert 1e-4 < got["errors"]["d_hidden"] < 2e-2
    assert max(got["errors"][x] for x in ("loss", "d_weight", "d_weight_others")) < 1e-5
    allowed = named("ours/sparse").allowed
    for name in ("d_weight", "loss", "d_hidden"):
        assert not is_right({**got["errors"], name: 3e-2}, SMALL, allowed)
    assert not is_right(got["errors"], SMALL)
    both = found("ours/sparse_both", SMALL)
    assert both["status"] == "checked" and both["errors"]["d_weight_others"] > 0.05


def test_the_filter_keeps_a_tile_for_one_number_that_is_large_enough_whatever_its_row_and_sign() -> None:
    rows = torch.full((5, 2 * TILE + 3), LEAST / 2)
    assert is_kept(rows).tolist() == [False, False, False]
    rows[4, TILE] = -LEAST
    assert is_kept(rows).tolist() == [False, True, False]
    rows[0, -1] = LEAST
    assert is_kept(rows).tolist() == [False, True, True]


def test_the_filter_drops_what_is_small_and_nothing_where_every_tile_has_a_target() -> None:
    got = found("cce/filter", replace(SMALL, lead=18.0))
    assert 0 < got["spent"]["tiles"] < 1
    assert got["errors"]["logp_max"] < 1e-4 and 1e-6 < got["errors"]["d_hidden"] < 0.1
    whole = found("cce/filter", replace(SMALL, v=100))
    assert whole["spent"]["tiles"] == 1
    assert max(whole["errors"][x] for x in ("d_hidden", "d_weight")) < 1e-5


def test_the_plan_goes_from_nearly_certain_policies_to_flat_ones_with_both_kinds_of_head() -> None:
    cases = [x for x in cpu_cases() if x.part == "sparse"]
    assert len(cases) == 2 * len(NATS) and sum(x.frozen for x in cases) == len(NATS)
    assert all(x.providers[:2] == ("ours", "ours/sparse") for x in cases)
    assert {name for x in cases for name in x.providers} <= PROVIDERS.keys()
    some = [replace(x, n=64, t=8, h=128, v=8192) for x in cases if not x.frozen]
    means = [inputs_mean(x) for x in some]
    assert means == sorted(means)


def inputs_mean(given: BenchCase) -> float:
    inputs = make_inputs(given, CPU)
    return reference(inputs).mean_entropy(inputs)


def test_the_suite_times_what_can_be_timed_and_the_table_shows_entropy_entries_and_tiles(tmp_path: Path) -> None:
    given = replace(SMALL, rounds=1, providers=("ours", "ours/sparse", "cce/filter", "cce"))
    results = Results(tmp_path / "found.json", device="cpu", cases={})
    assert suite.run(suite.Suite([given], results, backend="auto", forward_only=False)) == 0
    providers = results.data["cases"]["small"]["providers"]
    assert {name: x["status"] for name, x in providers.items()} == {
        "ours": "ok", "ours/sparse": "ok", "cce/filter": "ok", "cce": "absent",
    }  # fmt: skip
    assert "ms" not in providers["cce/filter"] and providers["ours/sparse"]["ms"]["full"]["samples"] == 1
    text = "\n".join(tables.lines(results.data))
    assert (
        "## Sparse gradients" in text and f"mean entropy {results.data['cases']['small']['mean_entropy']:.2f}" in text
    )
    assert "entries a row | dense rows | tiles kept" in text
