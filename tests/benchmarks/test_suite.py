"""`python -m benchmarks` at toy size: its cases, their float64 truth, what is right, memory, operations."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

pytest.importorskip("trl")
pytest.importorskip("liger_kernel")

from benchmarks import machine, run
from benchmarks.__main__ import arguments, chosen, is_wrong, main, with_others
from benchmarks.cases import (
    HEADS,
    WORKLOADS,
    Absence,
    BenchCase,
    Inputs,
    case,
    make_inputs,
    policy_loss,
)
from benchmarks.flops import counter
from benchmarks.machine import ROOT, Watch
from benchmarks.memory import give_back_what_is_freed, is_measured
from benchmarks.plan import cpu_cases, gpu_cases, memory_cases
from benchmarks.providers import Outcome, build, cross_entropies, named, torch_heads
from benchmarks.reference import Reference, divergence, errors, is_right, reference
from benchmarks.run import How, Results, Step, check, check_room, measure_case

CPU = torch.device("cpu")
PLAIN = BenchCase("plain").toy()
POLICIES = {
    name: replace(case(name, workload=name).toy(), n=64, t=8)
    for name in WORKLOADS
    if name != "distill"
}
POLICIES |= {model: replace(case(model, model).toy(), n=24) for model in HEADS}
POLICIES |= {"more rows than are sampled, in two chunks": replace(PLAIN, n=320)}
POLICIES |= {"frozen policy": replace(PLAIN, frozen=True), "scored": replace(PLAIN, score=True)}
TOY = case("toy", workload="distill", part="distill", n=16, h=32, v=70, t=4)
DISTILLING = {
    **{f"beta {beta:g}": replace(TOY, divergence=beta) for beta in (0.0, 0.3, 1.0)},
    "wider, padding": replace(TOY, teacher_h=48, padding=0.5),
    "frozen": replace(TOY, frozen=True),
    "score": replace(TOY, score=True),
    "bf16": replace(TOY, dtype="bfloat16"),
    "soft-cap": replace(TOY, softcap=5.0, divergence=0.5),
}


def stepped(given: BenchCase, name: str = "eager") -> tuple[Any, Reference, Outcome]:
    inputs = make_inputs(given, CPU)
    want = reference(inputs)
    return inputs, want, Step(build(name, inputs))()


@pytest.mark.parametrize(
    "given", [*POLICIES.values(), *DISTILLING.values()], ids=[*POLICIES, *DISTILLING]
)
def test_reference_is_right_and_sees_errors(given: BenchCase) -> None:
    """Plain autograd in float32 agrees with the reference to its rounding; with a planted fault it does not."""
    inputs, want, outcome = stepped(given)
    found = errors(outcome, inputs, want)
    assert is_right(found, given)
    assert max(found.values()) < 1e-5 or given.dtype != "float32"
    assert found.get("ratio_off") == (0 if given.divergence is None else None)
    if not given.score:
        inputs.hidden.grad.mul_(1.5)
        assert not is_right(errors(outcome, inputs, want), given)
    assert not is_right({**found, "loss": 0.5, "logp_mean": float("nan")}, given)
    assert not is_right({}, given)


@pytest.mark.parametrize("given", DISTILLING.values(), ids=DISTILLING)
@pytest.mark.parametrize("name", ["ours/torch", "trl", "liger_jsd"])
def test_every_divergence_is_right(name: str, given: BenchCase) -> None:
    if name == "liger_jsd" and given.softcap is not None:
        with pytest.raises(Absence, match="no soft-cap"):
            build(name, make_inputs(given, CPU))
        return
    inputs, want, outcome = stepped(given, name)
    found = errors(outcome, inputs, want)
    assert is_right(found, given), found
    assert found["loss"] < 1e-6 or given.dtype != "float32"


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_truth_of_a_divergence_is_torchs(beta: float) -> None:
    p, q = (torch.randn(5, 9, dtype=torch.float64).softmax(dim=1) for _ in range(2))
    m = (1 - beta) * p + beta * q
    of_student, of_teacher = (kl_div(m.log(), x, reduction="none").sum(dim=1) for x in (p, q))
    want = {0.0: of_teacher, 1.0: of_student}.get(beta, (1 - beta) * of_student + beta * of_teacher)
    torch.testing.assert_close(divergence(p.log(), q.log(), beta), want, atol=1e-13, rtol=1e-12)


def nvh(name: str, given: BenchCase) -> float:
    inputs = make_inputs(given, CPU)
    checked = check(name, Step(build(name, inputs)), inputs, reference(inputs))
    assert checked["status"] == "checked"
    return float(checked["flops_nvh"])


@pytest.mark.parametrize(
    ("name", "counted"),
    {  # NVH of a policy loss, with half of the tokens masked, with a frozen head; of a divergence, with a frozen head,
        # without gradients
        "ours/torch": (6, 6, 4, 8, 6, 4),
        "products": (6, 6, 4, 8, 6, 4),
        "eager": (6, 12, 4, 8, 6, 4),
        "trl": (8, 16, 6, 12, 10, 4),
    }.items(),
)
def test_counted_operations(name: str, counted: tuple[int, ...]) -> None:
    given = replace(BenchCase("x"), n=64, t=8, h=32, v=700)
    cases = (given, replace(given, n=128, t=16, padding=0.5), replace(given, frozen=True))
    cases += (TOY, replace(TOY, frozen=True), replace(TOY, score=True))
    assert tuple(nvh(name, x) for x in cases) == counted
    wider = replace(TOY, teacher_h=64)
    assert name == "trl" or nvh(name, wider) == wider.products_nvh == 2 + 2 * 64 / 32 + 4


NEEDS_VERL = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)


@pytest.mark.parametrize("name", ["liger_torch", pytest.param("verl_torch", marks=NEEDS_VERL)])
def test_who_packs_computes_the_tokens_that_count_alone(name: str) -> None:
    assert nvh(name, replace(BenchCase("x"), n=128, t=16, h=32, v=700, padding=0.5)) == 8


def test_operations_of_a_product_with_another_dtype() -> None:
    """What torch's dispatch gives for ``torch.addmm(c, a, b, out_dtype=..., out=c)`` on a GPU."""
    formula = counter().flop_registry[torch.ops.aten.addmm]
    a, b, c = torch.zeros(3, 5), torch.zeros(5, 7), torch.zeros(3, 7)
    assert formula(c, a, b, torch.float32, beta=1, out=c, out_val=c) == 2 * 3 * 5 * 7


def test_what_other_processes_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 seconds on 4 cores all were at work for 26, of which 6 were this process's."""
    readings = iter(((1.0, 100.0, 3.0), (11.0, 126.0, 9.0)))
    monkeypatch.setattr(Watch, "_read", staticmethod(lambda: next(readings)))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    assert Watch().others() == 0.5


def test_share_of_ratios() -> None:
    """Counted exactly: a log-probability that is off by 2 % is a ratio that is."""
    inputs, want, outcome = stepped(replace(case("x", workload="off-policy").toy(), n=64, t=8))
    logps = outcome.logps.detach().clone()
    logps.view(-1)[:16] += 0.02
    assert errors(Outcome(logps=logps), inputs, want)["ratio_off"] == 0.25


def test_inputs_are_as_their_case_says() -> None:
    given = replace(case("x", workload="padding"), n=128, t=16, v=300, h=16)
    assert given.counted == int(make_inputs(given, CPU).mask.sum()) == 64
    half = replace(given, padding=0.0, zero_share=0.5)
    assert (given.products_nvh, half.graded, half.products_nvh) == (6.0, 64, 4.0)
    assert replace(half, beta=0.04).products_nvh == 6.0  # a KL term gives every token a gradient
    peaked = replace(BenchCase("peaked", peaked=True), n=256, t=16, h=256, v=8192)
    entropies = reference(make_inputs(peaked, CPU)).entropies
    assert 1e-4 < entropies.quantile(0.5) < 0.05 and 0.1 < entropies.quantile(0.8) < 1.0
    for scale in (10.0, 40.0):
        inputs = make_inputs(replace(BenchCase("x", scale=scale), n=64, t=8, h=256, v=16384), CPU)
        assert (
            0.8 * scale
            < float((inputs.hidden @ inputs.weight.t()).amax(dim=-1).mean().detach())
            < 1.2 * scale
        )
    distilled = make_inputs(replace(TOY, n=256, t=8, h=64, v=4000, teacher_h=96), CPU)
    assert distilled.teacher is not None and distilled.teacher.weight.shape == (4000, 96)
    assert 0.05 < float(reference(distilled).loss) < 0.5  # near the student, and another head


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "benchmarks.providers.policy_loss", lambda *given: 1.001 * policy_loss(*given)
    )
    given = replace(BenchCase("x", providers=("eager", "ours", "quack")).toy(), rounds=2)
    results = Results(tmp_path / "found.json", cases={})
    measure_case(given, given.providers, results, How(backend="torch"))
    found = results.data["cases"]["x"]["providers"]
    assert found["eager"]["status"] == "wrong" and "ms" not in found["eager"]
    assert found["quack"]["status"] == "absent" and found["quack"]["reason"]
    assert found["ours"]["status"] == "ok" and found["ours"]["ms"]["full"]["samples"] == 2


def test_what_there_was_no_time_for_is_noted(tmp_path: Path) -> None:
    results, given = (
        Results(tmp_path / "found.json", cases={}),
        replace(BenchCase("x").toy(), rounds=2),
    )
    measure_case(
        given, ("eager", "ours"), results, How(backend="torch", one_by_one=True, until=0.0)
    )
    found = results.data["cases"]["x"]
    assert found["status"] == "partial" and found["providers"]["ours"]["status"] == "ok"
    assert found["providers"]["eager"] == {"status": "skipped", "reason": "no time left"}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_fails_costs_no_other_provider(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its first call, or in a timed step; what was timed before is in the file when it fails."""
    path = tmp_path / "found.json"
    before: list[dict[str, Any]] = []

    eager = torch_heads.eager

    def breaking(calls: int) -> Any:
        def built(inputs: Inputs) -> Any:
            forward, left = eager(inputs), [calls]

            def step() -> Outcome:
                assert all(x.grad is None for x in inputs.leaves), (
                    "a step that adds to gradients does more"
                )
                if not left[0]:
                    before.append(json.loads(path.read_text())["cases"]["x"]["providers"])
                    raise RuntimeError("broken")
                left[0] -= 1
                return forward()

            return step

        return built

    monkeypatch.setattr(cross_entropies, "linear_ce", breaking(0))
    monkeypatch.setattr(torch_heads, "compiled", breaking(2))
    names = ("ours", "ours/torch", "linear_ce", "compiled", "eager")
    results = Results(path, cases={})
    measure_case(
        replace(BenchCase("x").toy(), rounds=3),
        names,
        results,
        How(one_by_one=one_by_one, backend="torch"),
    )
    found = results.data["cases"]["x"]["providers"]
    assert [found[x]["status"] for x in names] == ["ok", "ok", "error", "error", "ok"]
    assert "RuntimeError: broken" in found["compiled"]["reason"]
    assert [
        found[x]["ms"]["full"]["samples"] for x in ("ours", "ours/torch", "compiled", "eager")
    ] == [3, 3, 1, 3]
    assert [x for x in names if "anchors" in found[x]] == (
        ["ours/torch", "compiled", "eager"] if one_by_one else []
    )
    assert ("ms" in before[0]["ours"]) is one_by_one
    assert "ms" in before[1]["ours"]


@pytest.mark.skipif(not is_measured(CPU), reason="needs Linux's /proc")
def test_peaks_are_those_of_each_provider_and_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back_what_is_freed()
    shape = {"part": "memory", "t": 8, "h": 128, "v": 32768, "rounds": 0}
    cases = [
        BenchCase(f"tokens {n}", n=n, providers=("ours@4", "eager", "quack"), **shape)
        for n in (32, 128)
    ]
    results = Results(tmp_path / "found.json", cases={})
    for given in cases:
        measure_case(given, given.providers, results, How(backend="torch"))
    large = results.data["cases"]["tokens 128"]["providers"]
    assert [x["status"] for x in large.values()] == ["ok", "ok", "absent"] and large["quack"][
        "reason"
    ]
    assert large["eager"]["extra_mib"] > 30 > 12 > large["ours@4"]["extra_mib"]
    assert not any("ms" in x for x in large.values())
    monkeypatch.setattr(run, "available_bytes", lambda: 2**20)
    measure_case(
        replace(cases[0], name="tokens 512", n=512), ("eager",), results, How(backend="torch")
    )
    eager = results.data["cases"]["tokens 512"]["providers"]["eager"]
    assert eager == {"status": "absent", "reason": "would need about 0 GiB, and 0 GiB are free"}
    check_room("never measured", replace(cases[0], n=1024), results.data)


def test_plans() -> None:
    for plan in (cpu_cases(), gpu_cases()):
        assert len({x.name for x in plan}) == len(plan)
        assert all(x.n % x.t == 0 and all(map(named, x.providers)) for x in plan)
        assert {x.model for x in plan} == set(HEADS)
        assert {axis for x in plan for axis in (x.series or "").split()} == {"n", "v", "share"}
        distilled = [x for x in plan if x.part == "distill"]
        assert {x.divergence for x in distilled} == {0.0, 0.5, 1.0}
        assert all(x.providers[:2] == ("ours", "products") for x in distilled)
    for given in (
        x
        for x in cpu_cases()
        if "products" in x.providers and x.part in ("main", "workloads", "shapes")
    ):
        assert given.rounds >= 3, (
            given.name
        )  # the limit as often as the rest, and often enough to be one
    assert not {x.name for x in cpu_cases()} & {x.name for x in memory_cases()}


def test_choices_and_refusals() -> None:
    assert [x.name for x in chosen(arguments([]))] == [x.name for x in cpu_cases()]
    chosen_parts = chosen(arguments(["--parts", "accuracy", "memory"]))
    assert [x.name for x in chosen_parts if x.part != "memory"] == [
        "logits 10",
        "logits 20",
        "logits 40",
        "peaked",
    ]
    assert [x.n for x in chosen_parts if x.part == "memory"] == sorted(x.n for x in memory_cases())
    for given in (["--smoke", "--plot"], ["--report", "nowhere.json"]):
        with pytest.raises(SystemExit) as ended:
            arguments(given)
        assert ended.value.code == 2
    with pytest.raises(ValueError, match=r"expected some of ours, .*, or ours@MIB, got 'trl@64'"):
        named("trl@64")
    for name, given in (
        ("unsloth", TOY),
        ("liger_jsd", replace(TOY, divergence=None)),
        ("liger_jsd/fused", TOY),
    ):
        with pytest.raises(Absence, match=r"no divergence from a teacher|no policy loss|GPU"):
            build(name, make_inputs(given, CPU))


def test_parts_measured_apart_come_from_the_newest_run_on_such_a_device(tmp_path: Path) -> None:
    """Whatever was measured now: the page has all parts, each with the conditions of its run."""

    def results(day: int, *cases: str, device: str = "cpu", **more: Any) -> dict[str, Any]:
        made = {name: {"part": name, "day": day} for name in cases}
        return {"device": device, "date": f"day {day}", "commit": str(day), "cases": made, **more}

    whole, memory, step = results(1, "main"), results(2, "memory"), results(3, step={"scenes": {}})
    others = [
        whole,
        memory,
        step,
        results(4, "main", "memory", device="gpu"),
        {"format": "another"},
    ]
    for i, data in enumerate(others):
        (tmp_path / f"{i}.json").write_text(json.dumps(data))
    for data in (whole, memory, step):
        page = with_others(data, tmp_path)
        assert {name: case["day"] for name, case in page["cases"].items()} == {
            "main": 1,
            "memory": 2,
        }
        assert page["step"] == {"scenes": {}}
        assert (page["date"], page["runs"]["memory"]["date"], page["runs"]["step"]["commit"]) == (
            "day 1",
            "day 2",
            "3",
        )
    assert with_others({**memory, "smoke": True}, tmp_path) == {**memory, "smoke": True}


def test_exit_status() -> None:
    def data(status: str, ours: str) -> dict[str, Any]:
        return {
            "status": status,
            "cases": {"x": {"providers": {"ours": {"status": ours}, "trl": {"status": "wrong"}}}},
        }

    assert not is_wrong(data("complete", "ok"))
    assert is_wrong(data("complete", "wrong"))
    assert is_wrong(data("running", "ok"))


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """The whole command at toy size: every part, table and plot."""
    out, docs = tmp_path / "found.json", tmp_path / "docs"
    assert main(["--smoke", "--save", str(out), "--plot", "--docs", str(docs)]) == 0
    found = json.loads(out.read_text())
    assert found["status"] == "complete" and found["format"] == 2 and found["commit"]
    assert list(found["cases"]) == [x.name for x in cpu_cases()]
    for given in cpu_cases():
        providers = found["cases"][given.name]["providers"]
        assert list(providers) == list(given.providers)
        for name, x in providers.items():
            assert x["status"] == "ok" or (x["status"] == "absent" and x["reason"]), (
                given.name,
                name,
                x,
            )
            if name.split("/")[0] in ("ours", "eager", "trl") or (
                name == "products" and given.dtype == "float32"
            ):
                assert x["status"] == "ok", (given.name, name, x)
    page = (docs / "benchmarks.md").read_text()
    assert {plot.name for plot in (docs / "plots").iterdir()} == {
        "time.png"
    } and "plots/time.png" in page
    assert str(tmp_path) not in page and str(ROOT) not in page + out.read_text()
    assert main(["--report", str(out)]) == 0
