"""``python -m benchmarks.cpu`` at a tiny shape; what it counts as right, as products, as memory, and as a goal met."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from benchmarks.cpu import measure, memory
from benchmarks.cpu.__main__ import main
from benchmarks.cpu.cases import CASES, make_inputs
from benchmarks.cpu.providers import PROVIDERS, build
from benchmarks.cpu.report import judge
from benchmarks.gpu.cases import policy_loss
from grpo_kernels.engine.products import Products

TINY = ["--rows", "16", "--length", "4", "--hidden", "32", "--vocab", "700", "--threads", "1", "--repetitions", "2"]
MIB = 2**20


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "found.json"
    main([*TINY, "--backend", "torch", "--no-memory", "--save", str(file), *arguments])
    return json.loads(file.read_text()), capsys.readouterr().out


def test_all_providers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = run(tmp_path, capsys)
    assert list(found["cases"]) == [case.name for case in CASES]
    for case in found["cases"].values():
        assert list(case["providers"]) == list(PROVIDERS)
        for name, x in case["providers"].items():
            assert f"| {name} |" in text
            if name == "liger" and x["status"] == "absent":  # not among what tests need
                continue
            assert x["status"] == "ok", x
            assert x["ms"]["samples"] == len(x["samples_ms"]) == 2
    assert {goal["verdict"] for goal in found["goals"]} <= {"pass", "fail", "not measured"}
    assert found["commit"] and found["machine"]["versions"]["torch"] == torch.__version__


def test_workspaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = run(tmp_path, capsys, "--workspaces", "1", "2", "--cases", "half_zero")
    providers = found["cases"]["half_zero"]["providers"]
    assert list(providers) == ["ours@1", "products@1", "ours@2", "products@2", "eager"]
    assert {x["status"] for x in providers.values()} == {"ok"}
    assert "/ ours@1" in text
    assert "goals" not in found


def test_products_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls in the same order, on tensors of the same shapes, with a workspace of several chunks."""
    calls: list[tuple[Any, ...]] = []

    def logged(name: str) -> Any:
        method = getattr(Products, name)

        def log(self: Products, *args: Any, **kwargs: Any) -> None:
            calls.append((name, *(x.shape for x in args), *(x.stride() for x in args), kwargs))
            method(self, *args, **kwargs)

        return log

    case = replace(CASES[1], n=64, t=8, h=32, v=7000)
    inputs = make_inputs(case)
    for name in ("logits", "d_hidden", "d_weight"):
        monkeypatch.setattr(Products, name, logged(name))
    ours, products = build("ours@1", inputs, "torch"), build("products@1", inputs, "torch")
    calls.clear()
    ours()
    inputs.clear_gradients()
    expected = calls.copy()
    assert [name for name, *_ in expected].count("logits") > 3
    calls.clear()
    outcome = products()
    assert calls == expected
    assert outcome.loss is None
    assert inputs.hidden.grad is None


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0].toy()
    inputs = make_inputs(case)
    want = measure.reference(inputs)
    assert measure._checked(case, "eager", inputs, want, "torch")[0]["status"] == "checked"
    monkeypatch.setattr("benchmarks.cpu.providers.policy_loss", lambda *given: 1.001 * policy_loss(*given))
    found, step = measure._checked(case, "eager", inputs, want, "torch")
    assert (found["status"], step) == ("wrong", None)
    assert measure._checked(case, "ours", inputs, want, "triton")[0]["status"] in ("absent", "checked")
    assert not case.is_right({"loss": 0.0})
    assert not case.is_right({"loss": float("nan"), "d_hidden": 0.0, "d_weight": 0.0})
    with pytest.raises(ValueError, match="providers: expected some of ours"):
        build("theirs", inputs, "torch")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory() -> None:
    """Eager needs its logits, and their gradient, beyond inputs and gradients; ours its workspace."""
    case = replace(CASES[0], n=64, t=16, h=8, v=65536)
    logits = case.n * case.v * 4 / MIB
    eager = memory.extra_memory(case, "eager", "torch", 1)
    assert 1.9 * logits < eager["extra_mib"] < 8 * logits, eager
    ours = memory.extra_memory(case, "ours@8", "torch", 1)
    assert 4 < ours["extra_mib"] < 16, ours
    assert "exit status 1" in memory.extra_memory(case, "theirs", "torch", 1)["memory_reason"]


def test_goals() -> None:
    def ok(ms: float, mib: float) -> dict[str, Any]:
        return {"status": "ok", "ms": {"median": ms}, "extra_mib": mib}

    full = {"ours": ok(2900, 150), "trl": ok(6000, 1), "liger": ok(4000, 1), "eager": ok(2800, 1000)}
    full["products"] = {"status": "error", "ms": {"median": 2900}}
    cases = {"trainable": {"providers": full}}
    verdicts = {(x["case"], x["figure"]): x["verdict"] for x in judge(cases)}
    assert verdicts == {
        ("trainable", "seconds, trl / ours"): "pass",
        ("trainable", "seconds, liger / ours"): "fail",
        ("trainable", "seconds, ours / eager"): "pass",
        ("trainable", "seconds, ours / products"): "not measured",
        ("trainable", "extra memory, ours / eager"): "pass",
        ("half_zero", "seconds, trl / ours"): "not measured",
    }
