"""The part "step" at toy size: every variant trains as stock TRL does, and what goes wrong is
noticed and shown; and the real run, with a tiny model in place of the real one."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from benchmarks import __main__ as command
from benchmarks import groups, step, tables, tiny_models
from benchmarks.figures import DEFAULTS, STOCK
from benchmarks.machine import ROOT
from benchmarks.memory import saved_bytes
from benchmarks.real import __main__ as of_real
from benchmarks.real import expectations, report, train
from benchmarks.step import PHASES, SCENES, VARIANTS

OTHER_ORDER = {"one group a micro-batch"}  # of sums


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("step") / "found.json"
    assert command.main(["--parts", "step", "--smoke", "--save", str(path)]) == 0
    return json.loads(path.read_text())["step"]


@pytest.mark.slow
def test_every_variant_is_timed_and_trains_as_stock_trl_does(measured: dict[str, Any]) -> None:
    variants = {name: tuple(x["variants"]) for name, x in measured["scenes"].items()}
    assert variants == {name: scene.toy().variants for name, scene in SCENES.items()}
    for scene in measured["scenes"].values():
        for name, x in scene["variants"].items():
            assert x["status"] == "ok" and x["options"] == VARIANTS[name] and x["seconds"] > 0
            assert [len(y) for y in x["samples"]] == [scene["steps"] - 1] * scene["rounds"]
            bound = 2e-5 if name in OTHER_ORDER else 1e-6
            assert max(x["differences"][key] for key in ("loss", "grad_norm")) <= bound


@pytest.mark.slow
def test_each_saving_computes_and_saves_less(measured: dict[str, Any]) -> None:
    variants = measured["scenes"]["short prompts"]["variants"]
    names = ("fused head alone", "trim", "TRL's micro-batches", "defaults", "skip")
    alone, trim, ungrouped, defaults, skip = (variants[name]["shares"] for name in names)
    assert set(alone.values()) == {1.0}
    assert defaults["sequences/gradient"] == 0.5, "half of the groups have equal rewards"
    assert ungrouped["tokens/gradient"] < ungrouped["tokens/computed"] < trim["tokens/computed"] < 1
    assert skip["tokens/computed"] == skip["tokens/gradient"] <= defaults["tokens/gradient"]
    assert defaults["tokens/computed"] < ungrouped["tokens/computed"]
    names = ("stock TRL", "trim", "TRL's micro-batches")
    saved = [variants[name]["saved_mib"]["mean"] for name in names]
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.slow
def test_a_tree_computes_what_is_necessary(measured: dict[str, Any]) -> None:
    """Of a group its prompt once, without the last tokens, which predict nothing."""
    shapes = measured["groups"]["shapes"]
    assert list(shapes) == [shape.name for shape in groups.TOY_SHAPES]
    for shape, x in zip(groups.TOY_SHAPES, shapes.values(), strict=True):
        p, c, g = shape
        assert x["status"] == "ok"
        assert x["computed"] == pytest.approx((p + g * (c - 1)) / (g * (p + c)))
        assert x["speed"] == x["seconds"]["padded"] / x["seconds"]["tree"]
        assert x["reached"] == x["speed"] / shape.allowed(groups.TOY_SIZE)
    of_hybrid = measured["hybrid_groups"]["shapes"][groups.TOY_SHAPES[1].name]
    assert of_hybrid["status"] == "ok" and {*of_hybrid["seconds"]} == {"padded", "trim", "tree"}
    allowed = [shape.allowed(groups.Size()) for shape in groups.SHAPES]  # docs/dev/design.md
    assert allowed == pytest.approx([1.19, 1.68, 1.62, 2.93], abs=0.005)


def test_saved_bytes_are_those_of_graphs_that_live_without_parameters() -> None:
    layer, x = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 8, requires_grad=True)
    with saved_bytes(layer) as count:
        y = layer(x)
        assert count() == x.nbytes, "the weight is a parameter"
        z = (y + layer(x)).exp()
        assert count() == x.nbytes + z.nbytes, "a tensor counts once"
        del y, z
        assert count() == 0


@pytest.mark.parametrize(
    ("name", "changed", "status"),
    [
        ("defaults", {}, "ok"),
        ("defaults", {"grad_norm": 2.0 + 3e-5}, "wrong"),
        ("defaults", {"loss": float("nan")}, "wrong"),
        ("defaults", {"entropy": 3.1}, "wrong"),
        ("skip", {"entropy": 3.1}, "ok"),
        ("skip", {"grad_norm": 2.0 + 3e-5}, "wrong"),
        ("one group a micro-batch", {"entropy": 3.1, "grad_norm": 2.0 + 3e-5}, "ok"),
        ("one group a micro-batch", {"grad_norm": 2.0 + 6e-5}, "wrong"),
    ],
)
def test_a_training_that_is_not_stock_trls_is_wrong(name: str, changed: Any, status: str) -> None:
    stock = {"loss": 0.5, "grad_norm": 2.0, "entropy": 3.0, **dict.fromkeys(tables.SHARES, 0.5)}
    found = {"logs": [stock | changed], "saved": [1, 3]}
    assert step._compared(name, [stock], found)["status"] == status


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_every_way_of_verl_trains_alike(packed: bool) -> None:
    """Its scoring and update at toy size: all heads find the same gradient."""
    pytest.importorskip("verl")
    from benchmarks import verl_step
    from tests.support import verl_peer

    with verl_peer.on_one_rank():
        found = verl_step.measure(verl_step.TOY_SIZE, verl_step.TOY_SHAPE, 1, 2, packed=packed)
    assert found["status"] == "ok"
    variants = verl_step.TORCH, verl_step.SCORED, verl_step.OURS, verl_step.TREE
    assert (*found["seconds"],) == variants
    assert all(x > 0 for x in found["seconds"].values())


def by_length(completions: list[Any], *_: Any, **__: Any) -> list[float]:
    """A reward that differs within a group."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(len(text) % 2) for text in texts]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two trainings of two steps."""
    folder, runs = tmp_path_factory.mktemp("model"), {}
    tiny_models.tokenizer().save_pretrained(folder)
    tiny_models.model("tied").save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "is_right", by_length)  # random words are never right
        for name in (STOCK, DEFAULTS):
            run = train.train(name, folder, seed=0, steps=2, short=True, tests=True)
            runs[f"{name}, seed 0"] = {"status": "ok", "name": name, "seed": 0, "wall": 1, **run}
    found = {"runs": runs, "short": False, "device": "cpu", "commit": "0" * 40}
    found["date"] = "2026-11-24T00:00:00+00:00"
    of_real.compare(found)
    return found


def test_both_are_timed_by_phase_and_train_alike(data: dict[str, Any]) -> None:
    stock, ours = data["runs"].values()
    for run in (stock, ours):
        seconds = [step["seconds"] for step in run["steps"]]
        assert [set(x) for x in seconds] == [{*PHASES, "other"}] * 2
        assert all(x["other"] >= 0 for x in seconds), "a phase within another counts once"
        assert all(x[phase] > 0 for x in seconds for phase in ("generation", "loss", "optimizer"))
        assert len(run["right"]) == 2
        assert all(step["logs"]["grad_norm"] > 0 for step in run["steps"])
    slow, fast = (sum(step["seconds"]["loss"] for step in run["steps"]) for run in (stock, ours))
    assert report.over(data, ours, slice(2), "loss") == pytest.approx(slow / fast)
    assert ours["alike"] == 2
    assert ours["worst"][1] <= of_real.TOLERANCE
    assert not of_real.is_wrong(data)


def test_a_difference_or_a_failure_is_wrong(data: dict[str, Any]) -> None:
    different, failed = copy.deepcopy(data), copy.deepcopy(data)
    run = different["runs"][f"{DEFAULTS}, seed 0"]
    run["steps"][1]["logs"]["reward"] += 0.125
    of_real.compare(different)
    assert (run["alike"], run["worst"][0]) == (1, "reward")
    failed["runs"][f"{DEFAULTS}, seed 0"]["status"] = "error"
    assert of_real.is_wrong(different) and of_real.is_wrong(failed)


def test_the_pages_are_what_the_committed_results_say(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results"
    newest = sorted(results.glob("cpu-real-*.json"))[-1]
    shutil.copy(ROOT / "docs" / "results.md", tmp_path)
    report.write(json.loads(newest.read_text()), tmp_path, tmp_path)
    for page in (ROOT / "docs" / "results.md", results / "real.md"):
        assert (tmp_path / page.name).read_text() == page.read_text()
    assert "\n".join(expectations.lines()) in (ROOT / "docs" / "results.md").read_text()


def test_the_reward_is_the_last_number() -> None:
    completions = ["3 + 4 = 7", "7, no, 8", "seven", "-7", [{"content": "It is 7."}]]
    assert train.is_right(completions, [7] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    held_out = {f"Calculate {a} + {b}." for a, b in train.HELD_OUT}
    asked = {row["prompt"][-1]["content"] for row in train.training_problems(2000, 0)}
    assert len(asked) == len(train.PAIRS) - len(held_out) and not asked & held_out
