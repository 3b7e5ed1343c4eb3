"""`python -m benchmarks` at toy size: its cases, their float64 truth, what is right, memory, operations."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")


from benchmarks import run
from benchmarks.__main__ import arguments, chosen, is_wrong, main, with_others
from benchmarks.cases import HEADS, WORKLOADS, Absence, BenchCase, Inputs, case, make_inputs, policy_loss
from benchmarks.flops import counter
from benchmarks.machine import ROOT
from benchmarks.memory import Peak, is_measured
from benchmarks.plan import TOKENS, cpu_cases, gpu_cases, memory_cases
from benchmarks.providers import Outcome, build, named, torch_heads
from benchmarks.reference import Reference, errors, is_right, reference
from benchmarks.run import How, Results, Step, check, check_room, measure_case, measure_peaks, times

CPU = torch.device("cpu")
MIB = 2**20
CASES = [replace(case(name, workload=name).toy(), n=64, t=8) for name in WORKLOADS]
CASES += [replace(case(model, model).toy(), n=24) for model in HEADS]
CASES += [replace(BenchCase("plain").toy(), frozen=True), replace(BenchCase("plain").toy(), score=True)]


def eager(given: BenchCase) -> tuple[Any, Reference, Outcome]:
    inputs = make_inputs(given, CPU)
    want = reference(inputs)
    return inputs, want, Step(build("eager", inputs))()


@pytest.mark.parametrize(
    "given", CASES, ids=lambda x: f"{x.name}-{'frozen' if x.frozen else ''}{'score' if x.score else ''}"
)
def test_reference_is_right_and_sees_errors(given: BenchCase) -> None:
    """Plain autograd in float32 agrees with the reference to its rounding; with a planted fault it does not."""
    inputs, want, outcome = eager(given)
    found = errors(outcome, inputs, want)
    assert is_right(found, given)
    assert max(x for name, x in found.items() if name not in ("ratio_off", "clip_differs")) < 1e-5
    assert found.get("ratio_off") == (0 if given.divergence is None else None) and not found.get("clip_differs")
    if not given.score:
        inputs.hidden.grad.mul_(1.5)
        assert not is_right(errors(outcome, inputs, want), given)
    assert not is_right({**found, "logp_mean": float("nan")}, given)
    assert not is_right({}, given)


def test_shares_of_ratios_and_clip_decisions() -> None:
    """Counted exactly: a log-probability that is off by 2 % is a ratio that is, and turns decisions near the clip."""
    inputs, want, outcome = eager(replace(case("x", workload="off-policy").toy(), n=64, t=8))
    logps = outcome.logps.detach().clone()
    logps.view(-1)[:16] += 0.02
    assert errors(Outcome(logps=logps), inputs, want)["ratio_off"] == 0.25
    drift = want.logps - inputs.old.double().reshape(-1)
    moved = drift.exp().sub(1).abs() > 0.2
    away = errors(Outcome(logps=inputs.old.clone()), inputs, want)["clip_differs"]  # a ratio of 1: never clipped
    assert away == float(moved.double().mean()) > 0.1


def test_padding_and_unit() -> None:
    given = replace(case("x", workload="padding"), n=128, t=16, v=300, h=16)
    inputs = make_inputs(given, CPU)
    assert given.counted == int(inputs.mask.sum()) == 64
    assert given.products_nvh == 6.0
    half = replace(given, padding=0.0, zero_share=0.5)
    assert (half.graded, half.products_nvh) == (64, 4.0)
    assert replace(half, beta=0.04).products_nvh == 6.0  # a KL term gives every token a gradient
    assert replace(half, frozen=True).products_nvh == 3.0
    assert replace(half, score=True).products_nvh == 2.0


def test_peaked_is_like_a_trained_policy() -> None:
    given = replace(BenchCase("peaked", peaked=True), n=512, t=16, h=256, v=8192)
    entropies = reference(make_inputs(given, CPU)).entropies
    assert 1e-4 < entropies.quantile(0.5) < 0.05
    assert 0.1 < entropies.quantile(0.8) < 1.0
    flat = reference(make_inputs(replace(given, peaked=False), CPU)).entropies
    assert flat.quantile(0.5) > 2


@pytest.mark.parametrize("scale", [10.0, 40.0])
def test_scale_is_about_the_largest_logit(scale: float) -> None:
    inputs = make_inputs(replace(BenchCase("x", scale=scale), n=64, t=8, h=256, v=65536), CPU)
    largest = (inputs.hidden @ inputs.weight.t()).amax(dim=-1)
    assert 0.8 * scale < float(largest.mean().detach()) < 1.2 * scale


def test_counted_operations() -> None:
    for given, ours, trl in ((BenchCase("x"), 6.0, 8.0), (BenchCase("x", frozen=True), 4.0, 6.0)):
        inputs = make_inputs(replace(given, n=64, t=8, h=32, v=700), CPU)
        want = reference(inputs)
        counted = {
            name: check(name, build(name, inputs), inputs, want)["flops_nvh"] for name in ("ours", "trl", "products")
        }
        assert counted == {"ours": ours, "trl": trl, "products": ours}


def test_operations_of_a_product_with_another_dtype() -> None:
    """What torch's dispatch gives for ``torch.addmm(c, a, b, out_dtype=..., out=c)`` on a GPU."""
    formula = counter().flop_registry[torch.ops.aten.addmm]
    a, b, c = torch.zeros(3, 5), torch.zeros(5, 7), torch.zeros(3, 7)
    assert formula(c, a, b, torch.float32, beta=1, out=c, out_val=c) == 2 * 3 * 5 * 7


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.providers.policy_loss", lambda *given: 1.001 * policy_loss(*given))
    given = replace(BenchCase("x", providers=("eager", "ours", "quack")).toy(), rounds=2)
    results = Results(tmp_path / "found.json", cases={})
    measure_case(given, given.providers, results, How(backend="torch"))
    found = results.data["cases"]["x"]["providers"]
    assert found["eager"]["status"] == "wrong" and "ms" not in found["eager"]
    assert found["quack"]["status"] == "absent" and found["quack"]["reason"]
    assert found["ours"]["status"] == "ok" and found["ours"]["ms"]["full"]["samples"] == 2


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_fails_costs_no_other_provider(one_by_one: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its first call, or in a timed step; what was timed before is in the file when it fails."""
    path = tmp_path / "found.json"
    before: list[dict[str, Any]] = []

    def breaking(calls: int) -> Any:
        def built(inputs: Inputs) -> Any:
            forward, left = torch_heads.eager(inputs), [calls]

            def step() -> Outcome:
                if not left[0]:
                    before.append(json.loads(path.read_text())["cases"]["x"]["providers"])
                    raise RuntimeError("broken")
                left[0] -= 1
                return forward()

            return step

        return built

    monkeypatch.setattr(torch_heads, "selective", breaking(0))
    monkeypatch.setattr(torch_heads, "compiled", breaking(2))
    names = ("ours", "ours/torch", "eager/selective", "compiled", "eager")
    results = Results(path, cases={})
    measure_case(replace(BenchCase("x").toy(), rounds=3), names, results, How(one_by_one=one_by_one, backend="torch"))
    found = results.data["cases"]["x"]["providers"]
    assert {x: found[x]["status"] for x in names} == {
        "ours": "ok", "ours/torch": "ok", "eager/selective": "error", "compiled": "error", "eager": "ok",
    }  # fmt: skip
    assert "RuntimeError: broken" in found["compiled"]["reason"]
    assert all(found[x]["ms"]["full"]["samples"] == 3 for x in ("ours", "ours/torch", "eager"))
    assert found["compiled"]["ms"]["full"]["samples"] == 1
    assert [x for x in names if "anchors" in found[x]] == (["ours/torch", "compiled", "eager"] if one_by_one else [])
    assert ("ms" in before[0]["ours"]) is one_by_one
    assert "ms" in before[1]["ours"]


def test_backend_that_cannot_serve_is_absent(tmp_path: Path) -> None:
    given = replace(BenchCase("x", providers=("ours",)).toy(), rounds=1)
    results = Results(tmp_path / "found.json", cases={})
    measure_case(given, given.providers, results, How(backend="triton"))
    assert results.data["cases"]["x"]["providers"]["ours"]["status"] in ("absent", "ok")


@pytest.mark.skipif(not is_measured(CPU), reason="needs Linux's /proc")
def test_memory() -> None:
    """Eager needs its logits, and their gradient, beyond inputs and gradients; ours its workspace."""
    given = BenchCase("x", n=64, t=16, h=8, v=65536)
    inputs = make_inputs(given, CPU)
    logits = given.n * given.v * 4 / MIB

    def extra(name: str) -> float:
        step = Step(build(name, inputs, "torch"))
        for _ in range(2):  # the first time, libraries take scratch space that they keep
            inputs.clear_gradients()
            peak = Peak(CPU)
            step()
            found = peak.extra_bytes(sum(x.nbytes for x in inputs.leaves))
        assert found is not None
        return found / MIB

    assert 1.9 * logits < extra("eager") < 8 * logits
    assert 4 < extra("ours@8") < 16


def test_forward_and_backward_are_the_step() -> None:
    found = times([10.0, 12.0], [4.0, 5.0])
    assert found["samples_ms"] == {"full": [10.0, 12.0], "forward": [4.0, 5.0], "backward": [6.0, 7.0]}
    assert found["ms"]["backward"]["median"] == 6.5
    assert list(times([3.0], [], mode="score")["ms"]) == ["score"]


def test_plans() -> None:
    for plan in (cpu_cases(), gpu_cases()):
        assert len({x.name for x in plan}) == len(plan)
        for given in plan:
            assert given.n % given.t == 0
            assert all(named(name) for name in given.providers)
        assert {x.model for x in plan} == set(HEADS)
        assert {x.scale for x in plan if x.part == "accuracy"} >= {10.0, 20.0, 40.0}
        assert {axis for x in plan for axis in (x.series or "").split()} == {"n", "v", "share"}
    for given in (x for x in cpu_cases() if "products" in x.providers and x.part in ("main", "workloads", "shapes")):
        assert given.rounds >= 3, given.name  # the limit as often as the rest, and often enough to be one
    assert [x.n for x in memory_cases()] == list(TOKENS)
    assert not {x.name for x in cpu_cases()} & {x.name for x in memory_cases()}
    with pytest.raises(ValueError, match="providers: expected some of ours"):
        named("theirs")


def test_choices() -> None:
    def names(*given: str) -> set[str]:
        return {x.name for x in chosen(arguments(given))}

    assert "Gemma-2-2B" in names("--shapes", "Gemma-2-2B") and "main" not in names("--shapes", "Gemma-2-2B")
    assert names("--cases", "gspo", "kl") == {"gspo", "kl"}
    assert names("--parts", "distill") > {"reverse KL", "forward KL", "JSD"}
    assert names("--parts", "accuracy") == {"logits 10", "logits 20", "logits 40", "peaked"}
    (only,) = {x.providers for x in chosen(arguments(["--providers", "ours@64", "trl"]))}
    assert only == ("ours@64", "trl")
    with pytest.raises(SystemExit):
        arguments(["--providers", "theirs"])


def test_parts_measured_apart_come_from_the_newest_run_on_such_a_device(tmp_path: Path) -> None:
    """Whatever was measured now: the page has all parts, each with the conditions of its run."""

    def results(day: int, *cases: str, device: str = "cpu", **more: Any) -> dict[str, Any]:
        made = {name: {"part": name, "day": day} for name in cases}
        return {"device": device, "date": f"day {day}", "commit": str(day), "cases": made, **more}

    whole, memory, step = results(1, "main"), results(2, "memory"), results(3, step={"scenes": {}})
    others = [whole, memory, step, results(4, "main", "memory", device="gpu"), {"format": "another"}]
    for i, data in enumerate(others):
        (tmp_path / f"{i}.json").write_text(json.dumps(data))
    for data in (whole, memory, step):
        found = with_others(data, tmp_path)
        assert {name: case["day"] for name, case in found["cases"].items()} == {"main": 1, "memory": 2}
        assert found["step"] == {"scenes": {}}
        assert (found["date"], found["runs"]["memory"]["date"], found["runs"]["step"]["commit"]) == (
            "day 1",
            "day 2",
            "3",
        )
    newer = with_others(results(5, "main", "memory"), tmp_path)
    assert {case["day"] for case in newer["cases"].values()} == {5} and "memory" not in newer["runs"]
    assert with_others({**memory, "smoke": True}, tmp_path) == {**memory, "smoke": True}


@pytest.mark.skipif(not is_measured(CPU), reason="needs Linux's /proc")
def test_peaks_are_those_of_each_provider_and_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"part": "memory", "t": 8, "h": 8, "v": 32768, "rounds": 0}
    cases = [BenchCase(f"tokens {n}", n=n, providers=("ours@4", "eager", "quack"), **shape) for n in (256, 64)]
    results = Results(tmp_path / "found.json", cases={})
    measure_peaks(cases, results, backend="torch")
    assert list(results.data["cases"]) == ["tokens 64", "tokens 256"]
    small, large = (results.data["cases"][f"tokens {n}"]["providers"] for n in (64, 256))
    assert {x["status"] for x in (*small.values(), *large.values())} == {"ok", "absent"}
    assert large["quack"]["reason"]
    assert large["eager"]["extra_mib"] > 60 > 12 > large["ours@4"]["extra_mib"]
    assert not any("ms" in x for x in (*small.values(), *large.values()))

    monkeypatch.setattr(run, "available_bytes", lambda: 2**20)
    with pytest.raises(Absence, match="would need about 0 GiB, and 0 GiB are free"):
        check_room("eager", replace(cases[0], n=1024), results.data)
    check_room("never measured", replace(cases[0], n=1024), results.data)


@pytest.mark.parametrize(
    "given",
    [["--smoke", "--plot"], ["--rows", "100"], ["--report", "nowhere.json"], ["--providers", "ours/expected@64"]],
)
def test_wrong_options_are_refused_before_anything_runs(given: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(given)
    assert ended.value.code == 2


def test_exit_status() -> None:
    def data(status: str, ours: str) -> dict[str, Any]:
        return {"status": status, "cases": {"x": {"providers": {"ours": {"status": ours}, "trl": {"status": "wrong"}}}}}

    assert not is_wrong(data("complete", "ok"))
    assert is_wrong(data("complete", "wrong"))
    assert is_wrong(data("running", "ok"))


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """The whole command at toy size: every part, table and plot."""
    out, docs = tmp_path / "found.json", tmp_path / "docs"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--smoke",
        "--threads",
        "1",
        "--save",
        str(out),
        "--plot",
        "--docs",
        str(docs),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["status"] == "complete" and found["format"] == 2 and found["commit"]
    assert found["versions"]["torch"] == torch.__version__
    assert list(found["cases"]) == [x.name for x in cpu_cases()]
    for given in cpu_cases():
        providers = found["cases"][given.name]["providers"]
        assert list(providers) == list(given.providers)
        for name, x in providers.items():
            assert x["status"] in ("ok", "absent"), (given.name, name, x)
            assert x["status"] == "ok" or x["reason"]
            if name.split("/")[0] in ("ours", "eager", "trl") or (name == "products" and given.dtype == "float32"):
                assert x["status"] == "ok", (given.name, name, x)
    page = (docs / "benchmarks.md").read_text()
    assert all(f"plots/{plot.name}" in page for plot in (docs / "plots").iterdir())
    assert {plot.name for plot in (docs / "plots").iterdir()} == {"time.png"}
    assert str(tmp_path) not in page and str(ROOT) not in page + out.read_text()
    assert main(["--report", str(out)]) == 0
