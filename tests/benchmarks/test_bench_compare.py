"""Comparison of two benchmark runs: what counts as a regression, at the edge, and what does not."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.timing import quantiles
from benchmarks.report import compare
from tests.support.bench_results import results

Data = dict[str, Any]


def timed(scale: float, spread: float = 0.0, samples: int = 3) -> Data:
    median = 1000.0 * scale
    p20, p80 = median * (1 - spread / 2), median * (1 + spread / 2)
    full = {"samples": samples, "median": median, "p20": p20, "p80": p80, "min": p20}
    return {"status": "ok", "ms": {"full": full}, "flops_nvh": 6.0, "extra_mib": 200.0, "errors": {"logp_mean": 1e-5}}


def run(ours: float = 1.0, others: float = 1.0, spread: float = 0.0, samples: int = 3, **changed: Any) -> Data:
    """A run with one case: ours, the products and two peers."""
    scales = {"ours": ours, "products": others, "trl": 2 * others, "eager": 3 * others}
    providers = {name: timed(x, spread, samples) for name, x in scales.items()}
    providers["ours"] |= changed
    case = {
        "part": "main",
        "n": 8,
        "h": 4,
        "v": 16,
        "t": 2,
        "dtype": "float32",
        "zero_share": 0.0,
        "providers": providers,
    }
    return {"format": 2, "device": "cpu", "threads": 2, "versions": {"torch": "2.13.0"}, "cases": {"a": case}}


def flagged(old: Data, new: Data) -> list[tuple[str, str]]:
    found = compare.compare(old, new)
    assert compare.has_regressed(found) == any(x.regressed for x in found)
    return [(x.figure, x.verdict) for x in found if x.regressed]


def test_nothing_changed() -> None:
    data = results()
    found = compare.compare(data, data)
    assert {x.verdict for x in found} == {"same", "peer"}
    assert not compare.has_regressed(found)
    assert "0 of" in "\n".join(compare.lines(found))


def test_time_at_the_floor() -> None:
    assert flagged(run(), run(1.0 + compare.FLOOR)) == []
    assert flagged(run(), run(1.001 + compare.FLOOR)) == [("full, ms", "worse")]
    better = compare.compare(run(), run(1 / (1.001 + compare.FLOOR)))
    assert [x.verdict for x in better if x.provider == "ours"] == ["better", *["same"] * 3]


def test_drift_of_the_machine_is_no_regression() -> None:
    assert flagged(run(), run(1.2, 1.2)) == []
    assert flagged(run(), run(1.2 * 1.04, 1.2)) == [("full, ms", "worse")]
    assert flagged(run(), run(1.0, 0.9)) == [("full, ms", "worse")]  # the machine got faster, ours did not
    (time, *_) = compare.compare(run(), run(1.2, 1.1))
    assert (time.provider, time.ratio, time.drift) == ("ours", pytest.approx(1.2), pytest.approx(1.1))


@pytest.mark.parametrize("samples", [3, 5, 25])
def test_time_at_the_noise(samples: int) -> None:
    """2.5 standard errors of ours in two runs, and of the drift, which is the median of three ratios."""
    sigma = 0.08 / compare.normal_width(samples)
    median = compare.MEDIAN * sigma / samples**0.5
    noise = 2.5 * (2 * median**2 + (compare.MEDIAN * 2**0.5 * median / 3**0.5) ** 2) ** 0.5
    old = run(spread=0.08, samples=samples)
    (found, *_) = compare.compare(old, old)
    assert found.noise == pytest.approx(max(noise, compare.FLOOR))
    assert flagged(old, run(0.999 + found.noise, spread=0.08, samples=samples)) == []
    assert flagged(old, run(1.001 + found.noise, spread=0.08, samples=samples)) == [("full, ms", "worse")]


@pytest.mark.parametrize(("before", "now", "expected"), [(1.0, 3.0, []), (100.0, 129.0, []), (100.0, 131.0, ["worse"])])
def test_a_part_of_a_step_counts_by_the_step(before: float, now: float, expected: list[str]) -> None:
    """The step takes 1000 ms, of which 3 % are 30."""
    old, new = run(), run()
    for data, ms in ((old, before), (new, now)):
        providers = data["cases"]["a"]["providers"]
        for name, median in (("ours", ms), ("trl", 500.0)):
            providers[name]["ms"]["backward"] = {"samples": 3, "median": median, "p20": median, "p80": median}
    assert flagged(old, new) == [("backward, ms", verdict) for verdict in expected]


def test_few_samples_that_agree_are_not_believed() -> None:
    """Ours happens to have no spread, the others have: theirs counts."""
    old, new = run(spread=0.1), run(1.15, spread=0.1)
    for data in (old, new):
        ms = data["cases"]["a"]["providers"]["ours"]["ms"]["full"]
        ms["p20"] = ms["p80"] = ms["median"]
    assert flagged(old, new) == []
    assert flagged(run(samples=1), run(2.0, samples=1)) == []
    assert "unknown" in {x.verdict for x in compare.compare(run(samples=1), run(2.0))}


def test_without_others_the_drift_is_unknown() -> None:
    old, new = run(), run(1.04)
    for data in (old, new):
        data["cases"]["a"]["providers"] = {"ours": data["cases"]["a"]["providers"]["ours"]}
    found = compare.compare(old, new)
    assert found[0].drift is None
    assert found[0].verdict == "worse"
    assert "drift of the machine is unknown: a" in "\n".join(compare.lines(found))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"flops_nvh": 6.0}, {"flops_nvh": 6.0001}, "FLOPs, NVH"),
        ({"flops_nvh": 6.0}, {"flops_nvh": 5.0}, None),
        ({"flops_nvh": 6.0}, {"flops_nvh": None}, None),
        ({"extra_mib": 200.0}, {"extra_mib": 210.0}, None),
        ({"extra_mib": 200.0}, {"extra_mib": 210.1}, "extra MiB"),
        ({"extra_mib": 10.0}, {"extra_mib": 18.0}, None),
        ({"extra_mib": 10.0}, {"extra_mib": 18.1}, "extra MiB"),
        ({"errors": {"logp_mean": 1e-6}}, {"errors": {"logp_mean": 2e-6}}, None),
        ({"errors": {"logp_mean": 1e-6}}, {"errors": {"logp_mean": 2.1e-6}}, "error logp_mean"),
        ({"errors": {"logp_mean": 1e-7}}, {"errors": {"logp_mean": 1e-6}}, None),
        ({"errors": {"d_weight": 0.0}}, {"errors": {"d_weight": 1.1e-6}}, "error d_weight"),
        ({"errors": {"d_weight": 1.0}}, {"errors": {}}, None),
    ],
)
def test_figures_at_the_edge(old: Data, new: Data, expected: str | None) -> None:
    found = flagged(run(**old), run(**new))
    assert found == ([] if expected is None else [(expected, "worse")])


def test_ours_is_gone() -> None:
    assert flagged(run(), run(status="wrong", reason="loss")) == [("status", "gone")]
    assert flagged(run(status="absent"), run()) == []


def test_a_peer_that_got_worse_is_told_but_no_regression() -> None:
    new = run()
    new["cases"]["a"]["providers"]["trl"] |= {"flops_nvh": 9.0, "extra_mib": 900.0}
    new["cases"]["a"]["providers"]["eager"] = {"status": "error", "reason": "gone"}
    assert flagged(run(), new) == []
    told = "\n".join(compare.lines(compare.compare(run(), new)))
    assert "| a | `trl` | FLOPs, NVH | 6 | 9 | 1.500 |" in told
    assert "| a | `eager` | status | ok | error: gone |" in told


def test_only_what_both_have_is_compared() -> None:
    new = run(9.0)
    new["cases"]["b"] = new["cases"].pop("a")
    found = compare.compare(run(), new)
    assert [(x.figure, x.old, x.new) for x in found] == [("cases only in this run", "a", "b")]


def test_conditions_that_differ_are_told() -> None:
    new = run() | {"threads": 4, "versions": {"torch": "2.14.0"}, "machine": {"system": {"cpu": "another"}}}
    text = compare.lines(compare.compare(run(), new))
    assert text[:3] == [
        "threads: 2 before, 4 now",
        "CPU model: None before, another now",
        "version of torch: 2.13.0 before, 2.14.0 now",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.update(device="NVIDIA H200"), "device: cpu and NVIDIA H200"),
        (lambda x: x["cases"]["a"].update(dtype="bfloat16"), "case a, dtype: float32 and bfloat16"),
        (lambda x: x["cases"]["a"].update(v=32), "case a, v: 16 and 32"),
        (lambda x: x["cases"]["a"].update(zero_share=0.5), "case a, zero_share: 0.0 and 0.5"),
        (lambda x: x.update(format=1), "format: 2 and 1"),
    ],
)
def test_other_work_is_refused(change: Callable[[Data], None], words: str) -> None:
    new = run()
    change(new)
    with pytest.raises(ValueError, match=words):
        compare.compare(run(), new)


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 8, 25])
def test_width_of_the_quantiles(samples: int) -> None:
    """What the noise is computed from, against the quantiles that the suite takes."""
    rng = random.Random(samples)
    widths = []
    for _ in range(4000):
        found = quantiles([rng.gauss(100.0, 1.0) for _ in range(samples)])
        widths.append(found["p80"] - found["p20"])
    assert statistics.mean(widths) == pytest.approx(compare.normal_width(samples), rel=0.06)


def test_the_same_code_seldom_regresses() -> None:
    rng = random.Random(0)

    def drawn(drift: float) -> Data:
        data = run()
        for x in data["cases"]["a"]["providers"].values():
            x["ms"]["full"] = quantiles([drift * rng.gauss(1000.0, 30.0) for _ in range(3)])
        return data

    wrong = [compare.has_regressed(compare.compare(drawn(1.0), drawn(1.1))) for _ in range(500)]
    assert sum(wrong) <= 10  # 2 %
