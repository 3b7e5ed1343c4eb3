"""`python -m benchmarks` at toy size: its cases, their float64 truth, what is right, operations,
and its page."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("liger_kernel")

from benchmarks import __main__ as command
from benchmarks import tables
from benchmarks.cases import HEADS, WORKLOADS, BenchCase, Inputs, case, make_inputs, policy_loss
from benchmarks.machine import ROOT
from benchmarks.plan import cpu_cases, gpu_cases
from benchmarks.providers import Outcome, build, heads, named, peers
from benchmarks.reference import Reference, errors, is_right, reference
from benchmarks.run import How, Results, check, measure_case, step

CPU = torch.device("cpu")
PLAIN = BenchCase("plain").toy()
POLICIES = {name: replace(case(name, workload=name).toy(), n=64, t=8) for name in WORKLOADS}
POLICIES |= {model: replace(case(model, model).toy(), n=24) for model in HEADS}
POLICIES |= {"more rows than are sampled, in two chunks": replace(PLAIN, n=320)}
POLICIES |= {"frozen": replace(PLAIN, frozen=True), "scored": replace(PLAIN, score=True)}


def stepped(given: BenchCase) -> tuple[Any, Reference, Outcome]:
    inputs = make_inputs(given, CPU)
    want = reference(inputs)
    return inputs, want, step(build("eager", inputs))


@pytest.mark.parametrize("given", POLICIES.values(), ids=POLICIES)
def test_reference_is_right_and_sees_errors(given: BenchCase) -> None:
    """Plain autograd in float32 agrees with the reference to its rounding; with a planted fault it
    does not."""
    inputs, want, outcome = stepped(given)
    found = errors(outcome, inputs, want)
    assert is_right(found, given)
    assert max(found.values()) < 1e-5
    assert found["ratio_off"] == 0
    if not given.score:
        inputs.hidden.grad.mul_(1.5)
        assert not is_right(errors(outcome, inputs, want), given)
    assert not is_right({**found, "loss": 0.5, "logp_mean": float("nan")}, given)
    assert not is_right({}, given)


@pytest.mark.parametrize(
    ("name", "counted"),
    {  # NVH of a policy loss, with half of the tokens masked, with a frozen head
        "ours/torch": (6, 6, 4),
        "products": (6, 6, 4),
        "eager": (6, 12, 4),
        "trl": (8, 16, 6),
        "liger_torch": (8, 8, 8),  # packs
    }.items(),
)
def test_counted_operations(name: str, counted: tuple[int, ...]) -> None:
    given = replace(BenchCase("x"), n=64, t=8, h=32, v=700)
    found = []
    for x in (given, replace(given, n=128, t=16, padding=0.5), replace(given, frozen=True)):
        inputs = make_inputs(x, CPU)
        checked = check(name, build(name, inputs), inputs, reference(inputs))
        assert checked["status"] == "checked"
        found.append(checked["flops_nvh"])
    assert tuple(found) == counted


def test_inputs_are_as_their_case_says() -> None:
    given = replace(case("x", workload="padding"), n=128, t=16, v=300, h=16)
    assert given.counted == int(make_inputs(given, CPU).mask.sum()) == 64
    half = replace(given, padding=0.0, zero_share=0.5)
    assert (given.products_nvh, half.graded, half.products_nvh) == (6.0, 64, 4.0)
    assert replace(half, beta=0.04).products_nvh == 6.0  # a KL term gives every token a gradient
    peaked = replace(BenchCase("peaked", peaked=True), n=256, t=16, h=256, v=8192)
    entropies = reference(make_inputs(peaked, CPU)).entropies
    assert 1e-4 < entropies.quantile(0.5) < 0.05 and 0.1 < entropies.quantile(0.8) < 1.0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = lambda *given: 1.001 * policy_loss(*given)  # noqa: E731
    monkeypatch.setattr("benchmarks.providers.policy_loss", wrong)
    given = replace(BenchCase("x", providers=("eager", "ours", "cce")).toy(), rounds=2)
    found = Results(tmp_path / "found.json", cases={})
    measure_case(given, given.providers, found, How(backend="torch"))
    providers = found.data["cases"]["x"]["providers"]
    assert providers["eager"]["status"] == "wrong" and "ms" not in providers["eager"]
    assert providers["cce"]["status"] == "absent" and providers["cce"]["reason"]
    assert providers["ours"]["status"] == "ok" and providers["ours"]["ms"]["full"]["samples"] == 2


def test_what_fails_costs_no_other_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its first call, or in a timed step; what was timed before is in the file when it fails."""
    path, before, eager = tmp_path / "found.json", [], heads.eager

    def breaking(calls: int) -> Any:
        def built(inputs: Inputs) -> Any:
            forward, left = eager(inputs), [calls]

            def step() -> Outcome:
                assert all(x.grad is None for x in inputs.leaves), "adding to gradients does more"
                if not left[0]:
                    before.append(json.loads(path.read_text())["cases"]["plain"]["providers"])
                    raise RuntimeError("broken")
                left[0] -= 1
                return forward()

            return step

        return built

    monkeypatch.setattr(peers, "linear_ce", breaking(0))
    monkeypatch.setattr(heads, "compiled", breaking(2))
    names, stored = ("ours", "linear_ce", "compiled", "eager"), Results(path, cases={})
    how = How(one_by_one=True, backend="torch")
    measure_case(replace(PLAIN, rounds=3), names, stored, how)
    found = stored.data["cases"]["plain"]["providers"]
    assert [found[x]["status"] for x in names] == ["ok", "error", "error", "ok"]
    assert "RuntimeError: broken" in found["compiled"]["reason"]
    samples = [found[x]["ms"]["full"]["samples"] for x in names if x != "linear_ce"]
    assert samples == [3, 1, 3]
    assert [x for x in names if "anchors" in found[x]] == ["compiled", "eager"]
    assert all("ms" in x["ours"] for x in before)


def test_plans() -> None:
    for plan in (cpu_cases(), gpu_cases()):
        assert len({x.name for x in plan}) == len(plan)
        assert all(x.n % x.t == 0 and all(map(named, x.providers)) for x in plan)
        assert {x.model for x in plan} == set(HEADS)
    limited = [x for x in cpu_cases() if "products" in x.providers]
    assert all(x.rounds >= 3 for x in limited)  # often enough to be a limit


def test_choices() -> None:
    chosen = command.chosen(command.arguments(["--parts", "accuracy"]))
    assert [x.name for x in chosen] == ["logits 10", "logits 20", "logits 40", "peaked"]
    with pytest.raises(ValueError, match=r"expected some of ours, .*, got 'trl@64'"):
        named("trl@64")


def test_exit_status() -> None:
    def data(status: str, ours: str) -> dict[str, Any]:
        providers = {"ours": {"status": ours}, "trl": {"status": "wrong"}}
        return {"status": status, "cases": {"x": {"providers": providers}}}

    assert not command.is_wrong(data("complete", "ok"))
    assert command.is_wrong(data("complete", "wrong"))
    assert command.is_wrong(data("running", "ok"))


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """The whole command at toy size: every part and table."""
    out, folder = tmp_path / "found.json", tmp_path / "page"
    assert command.main(["--smoke", "--save", str(out), "--page", "--into", str(folder)]) == 0
    found = json.loads(out.read_text())
    assert found["status"] == "complete" and found["format"] == 2 and found["commit"]
    assert list(found["cases"]) == [x.name for x in cpu_cases()]
    for given in cpu_cases():
        providers = found["cases"][given.name]["providers"]
        assert list(providers) == list(given.providers)
        for name, x in providers.items():
            assert x["status"] == "ok" or (x["status"] == "absent" and x["reason"]), (name, x)
            limit = name == "products" and given.dtype == "float32"
            if limit or name.split("/")[0] in ("ours", "eager", "trl"):
                assert x["status"] == "ok", (given.name, name, x)
    page = (folder / "README.md").read_text()
    assert str(tmp_path) not in page and str(ROOT) not in page + out.read_text()


# The page.


@pytest.fixture
def data() -> dict[str, Any]:
    """The results that are committed: all parts, each from the newest run that has it."""
    newest = sorted(command.RESULTS.glob("cpu-20*.json"))[-1]
    return command.with_others(json.loads(newest.read_text()), command.RESULTS)


def parsed(text: list[str], title: str) -> list[list[dict[str, str]]]:
    """The tables under a heading, each a list of rows by column."""
    section = "\n".join([*text, "## "]).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = []
    for block in section.strip().split("\n\n"):
        if block.startswith("| "):
            head, _, *rows = ([x.strip() for x in x[1:-1].split("|")] for x in block.splitlines())
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def test_the_page_is_what_the_committed_results_say(tmp_path: Path) -> None:
    newest = sorted(command.RESULTS.glob("cpu-20*.json"))[-1]
    assert command.main(["--report", str(newest), "--page", "--into", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == (newest.parent / "README.md").read_text()


def numbers(text: str) -> set[float]:
    found = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text.replace("\u2011", "-"))
    return {float(x) for x in found}


@pytest.mark.parametrize("title", ["A whole training step", "The head alone"])
def test_the_numbers_of_the_documentation_are_those_of_the_page(title: str) -> None:
    """Those of its tables, but in the first column."""
    page = numbers((ROOT / "benchmarks" / "results" / "README.md").read_text())
    for table in parsed((ROOT / "docs" / "results.md").read_text().splitlines(), title):
        quoted = set().union(*(numbers(" ".join([*row.values()][1:])) for row in table))
        assert quoted and quoted <= page


def test_a_limit_slower_than_what_does_more_is_noise(data: dict[str, Any]) -> None:
    providers = data["cases"]["main"]["providers"]
    providers["products"]["ms"]["full"]["median"] = 1.1 * providers["ours"]["ms"]["full"]["median"]
    text = tables.lines(data)
    rows = {x["provider"]: x for x in reversed(parsed(text, "Main cases")[0])}  # of the first case
    assert rows["`ours`"]["/ products"] == rows["`products`"]["/ ours"] == tables.NOISE
    assert float(rows["`trl`"]["/ products"]) > 1
    every = {x["case"]: x for x in parsed(text, "All cases")[0]}
    assert every["main"]["products / ours"] == tables.NOISE


def test_no_path_of_the_machine_and_no_number_that_wraps(
    data: dict[str, Any], tmp_path: Path
) -> None:
    wrong = {"status": "error", "reason": "/home/someone/x.py:3 and ~/a/b.so"}
    data["cases"]["main"]["providers"]["ours"] |= wrong
    tables.write(data, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert not [part for part in ("/home", "/opt", "someone", "~/", str(tmp_path)) if part in text]
    assert "x.py:3 and b.so" in text and "e\u20110" in text and "e-0" not in text
    kept = "ours/torch, 3 / 4, https://a.org/b/c and N/A"
    assert tables.tidy(kept) == kept
    assert tables.tidy("at\n|x| /usr/lib/") == "at /x/ lib"


def test_steps_of_another_run_come_with_its_conditions(tmp_path: Path) -> None:
    def run(day: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
        cases = {"main": {"part": "main", "day": day}} if "step" not in more else {}
        return {"device": device, "date": f"day {day}", "commit": str(day), "cases": cases, **more}

    whole, step = run(1), run(3, step={"scenes": {}})
    for i, data in enumerate((whole, step, run(4, "gpu"), {"format": "another"})):
        (tmp_path / f"{i}.json").write_text(json.dumps(data))
    for data in (whole, step):
        page = command.with_others(copy.deepcopy(data), tmp_path)
        assert page["cases"]["main"]["day"] == 1 and page["step"] == {"scenes": {}}
        assert (page["date"], page["runs"]["step"]["commit"]) == ("day 1", "3")
    assert command.with_others({**whole, "smoke": True}, tmp_path) == {**whole, "smoke": True}
