"""Operations of a training step, computed and counted; the clock; a measured toy step of both trainers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from benchmarks import training
from benchmarks.harness.child import Ran
from benchmarks.training import clock, flops, measured
from benchmarks.training.flops import OURS, TRL, Batch
from benchmarks.training.models import MODELS, build, sizes

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3-8B": 8_030_261_248,
    "Gemma-2-2B": 2_614_341_888,
    "gpt-oss-20B": 20_914_757_184,
}
ARCHITECTURES = ("Qwen3-0.6B", "Llama-3-8B", "Gemma-2-2B", "gpt-oss-20B")
BATCH = Batch(sequences=3, prompt=5, completion=6, generations=3)  # longer than the toy's windows of 4


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    size = sizes(name)
    assert size.parameters == PUBLISHED[name]
    tied = name in ("Qwen3-0.6B", "Qwen3-1.7B", "Gemma-2-2B")
    body = size.parameters - (1 if tied else 2) * size.vocab * size.hidden
    if name == "gpt-oss-20B":  # 3.6 billion active parameters, one of the two matrices of the vocabulary among them
        assert size.matrices + size.vocab * size.hidden == pytest.approx(3.6e9, rel=0.01)
    else:
        assert size.matrices == pytest.approx(body, rel=1e-3)  # the rest: norms
        assert size.matrices < body


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_operations_of_the_body(name: str, checkpointing: bool) -> None:
    model = build(name, toy=True).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(3, model.config.vocab_size, (BATCH.sequences, BATCH.length))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with clock.counter() as counter:
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden.sum().backward()
    size = sizes(name, toy=True)
    assert counter.get_total_flops() == flops.body(size, BATCH, checkpointing=checkpointing)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_operations_of_generation(name: str) -> None:
    model = build(name, toy=True).eval()
    ids = torch.randint(3, model.config.vocab_size, (BATCH.sequences, BATCH.prompt))
    length = BATCH.completion
    with clock.counter() as counter, torch.no_grad():
        model.generate(input_ids=ids, min_new_tokens=length, max_new_tokens=length, do_sample=True, top_k=0)
    assert counter.get_total_flops() == flops.generation(sizes(name, toy=True), BATCH)


def test_computed() -> None:
    entries = training.computed()
    assert [(x["model"], x["trainer"]) for x in entries] == [(name, who) for name in MODELS for who in (TRL, OURS)]
    for theirs, ours in zip(entries[::2], entries[1::2], strict=True):
        nvh = theirs["tokens"] * theirs["head"][0] * theirs["head"][1]
        assert {x["kind"] for x in (theirs, ours)} == {"computed"}
        assert (theirs["flops"]["head"], ours["flops"]["head"]) == (8 * nvh, 6 * nvh)
        assert all(theirs["flops"][part] == ours["flops"][part] for part in ("body", "generation"))
        head, body, generation = ours["flops"].values()
        assert ours["head_share"] == pytest.approx(head / (head + body + generation))
        assert ours["head_share_of_update"] == pytest.approx(head / (head + body))
        half = next(x for x in ours["variants"] if x["gradient_checkpointing"] and x["live_share"] == 0.5)
        assert half["head_share"] == pytest.approx(4 * nvh / (4 * nvh + body + generation))
        without = [x for x in theirs["variants"] if not x["gradient_checkpointing"]]
        assert [x["head_share"] > theirs["head_share"] for x in without] == [True]
    assert json.loads(json.dumps(entries)) == entries


def test_clock_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watch = clock.Clock(torch.device("cpu"))
    a = torch.ones(2, 3)
    watch.enter("head")  # between steps: nothing
    watch.start(count=True)
    for part, seconds in (("generation", 1.0), ("body", 2.0), ("head", 4.0), ("body", 8.0), ("optimizer", 16.0)):
        a @ a.T
        watch.enter(part)
        now[0] += seconds
    found = watch.stop()
    assert found["seconds"] == {"generation": 1.0, "head": 4.0, "body": 10.0, "optimizer": 16.0, "other": 0.0}
    assert found["flops"] == {"generation": 24, "head": 24, "body": 48, "optimizer": 0, "other": 24}
    watch.start(count=False)
    a @ a.T
    assert not any(watch.stop()["flops"].values())


@pytest.fixture(scope="module")
def measurement() -> dict[str, Any]:
    return training.measure_all(["Qwen3-0.6B"], toy=True)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [TRL, OURS])
def test_measured(measurement: dict[str, Any], trainer: str) -> None:
    assert measurement["not_measured"] == {}
    (entry,) = (x for x in measurement["models"] if (x["kind"], x["trainer"]) == ("measured", trainer))
    batch, size = measured.TOY_BATCH, sizes("Qwen3-0.6B", toy=True)
    assert set(entry["seconds"]) == set(clock.PARTS)
    assert len(entry["samples"]) == 2
    assert all(seconds > 0 for sample in entry["samples"] for seconds in sample.values())
    for part, seconds in entry["seconds"].items():
        assert seconds == pytest.approx(sum(x[part] for x in entry["samples"]) / 2)
    whole = sum(entry["seconds"].values())
    assert entry["head_share"] == pytest.approx(entry["seconds"]["head"] / whole)
    # On a CPU TRL's head gets every position of a sequence but the last.
    rows = batch.sequences * (batch.length - 1) if trainer == TRL else batch.tokens
    assert entry["flops"] == {
        "head": flops.head(size, rows, trainer),
        "body": flops.body(size, batch, checkpointing=True),
        "generation": flops.generation(size, batch),
    }
    assert entry["tokens"] == batch.tokens
    assert entry["head_nvh"] == (8 * rows / batch.tokens if trainer == TRL else 6)


def test_all_of_it(measurement: dict[str, Any]) -> None:
    assert set(measurement) == {"conditions", "models", "not_measured"}
    assert [x["kind"] for x in measurement["models"]] == ["measured"] * 2 + ["computed"] * 2 * len(MODELS)
    assert "toy shapes" in measurement["conditions"]["measured"]
    assert json.loads(json.dumps(measurement)) == measurement


def test_what_does_not_fit_is_computed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=4 * measured.GIB)
    monkeypatch.setattr(measured, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    found = training.measure_all(device="cpu")
    assert set(found["not_measured"]) == set(MODELS)
    assert found["not_measured"]["Qwen3-0.6B"] == "needs about 12 GiB, 4 GiB are free"
    assert {x["kind"] for x in found["models"]} == {"computed"}


def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    late = training.measure(["Qwen3-0.6B"], toy=True, seconds=0.1)
    assert (late["models"], late["failed"]) == ([], {"Qwen3-0.6B": "took more than 0.1 s"})
    monkeypatch.setattr(measured, "run", lambda *_, **__: Ran(1, 0.1, "the reason"))
    broken = training.measure(["Qwen3-0.6B"], toy=True)
    assert (broken["models"], broken["failed"]) == ([], {"Qwen3-0.6B": "exit status 1: the reason"})


@pytest.mark.parametrize("complete", [1, 2, 3])
def test_a_process_that_is_stopped_keeps_its_steps(monkeypatch: pytest.MonkeyPatch, complete: int) -> None:
    step = {"seconds": dict.fromkeys(clock.PARTS, 1.0), "flops": dict.fromkeys(clock.PARTS, 1), "peak_mib": None}

    def stopped(command: list[str], **_: Any) -> Ran:
        steps = {TRL: [step] * complete, OURS: [step] * min(complete, 2)}
        Path(json.loads(command[-1])["output"]).write_text(json.dumps(steps))
        return Ran(None, 9.0, "")

    monkeypatch.setattr(measured, "run", stopped)
    found = training.measure(["Qwen3-0.6B"], toy=True, seconds=9)
    assert found["failed"] == {"Qwen3-0.6B": "took more than 9 s"}
    samples = [(x["trainer"], len(x["samples"]), x["head_share"]) for x in found["models"]]
    assert samples == ([] if complete == 1 else [(TRL, complete - 1, 0.2), (OURS, 1, 0.2)])
