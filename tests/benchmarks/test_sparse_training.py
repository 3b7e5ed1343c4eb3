"""The scripts that train with sparse gradients: their gradients, what they say of known curves, a few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks import sparse_replay, sparse_training
from benchmarks.gradient_kinds import Fused, Loss, Rounded, Start, start
from benchmarks.sparse_training import KINDS, OPTIMIZERS, claim, ends, off, table

VOCAB = 512


def gradients(kind: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(3, 4, 16, generator=g), torch.randn(VOCAB, 16, generator=g)
    ids, mask = torch.randint(VOCAB, (3, 4), generator=g), torch.ones(3, 4)
    mask[1, 2:] = 0
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss, entropy = kind(*leaves, ids, mask, torch.tensor([1.0, -0.5, 2.0]))
    assert 0 < entropy < 6.3
    return torch.autograd.grad(loss, leaves)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "of_hidden", "of_weight"),
    [
        (Rounded(logits=False), (1e-4, 4e-3), (1e-4, 4e-3)),
        (Rounded(logits=True), (1e-3, 5e-2), (1e-3, 5e-2)),
        (Fused(1e-2), (1e-4, 2e-2), (0.0, 1e-5)),
        (Fused(1e-2, weight=True), (1e-4, 2e-2), (1e-4, 0.2)),
    ],
)
def test_each_gradient_is_off_by_its_own_kind_of_error(
    kind: Loss, of_hidden: tuple[float, float], of_weight: tuple[float, float]
) -> None:
    for got, want, (least, most) in zip(gradients(kind), gradients(Fused()), (of_hidden, of_weight), strict=True):
        assert least <= float((got - want).norm() / want.norm()) <= most


def test_a_sparse_gradient_has_no_dense_row_and_remembers_what_it_cost() -> None:
    kind = Fused(1e-2)
    gradients(kind)
    assert kind.sparse is not None
    found = kind.sparse.metrics()
    assert found["gradient/dense_rows"] == 0 and 1 < found["gradient/entries"] < VOCAB
    assert 0 < found["gradient/d_hidden_error"] < 1e-2


@pytest.fixture(scope="module")
def begin() -> Start:
    return start(steps=60, vocab=VOCAB)


def run(kind: str, optimizer: str, seed: int, reward: float) -> dict:
    curve = [0.0] * 6 + [reward] * 2
    return {"kind": kind, "optimizer": optimizer, "seed": seed, "reward": curve, "entropy": [1.0] * 8}


def test_what_is_said_of_curves_that_are_known() -> None:
    runs = [
        run(kind, name, seed, 0.5 + 0.1 * seed + (0.3 if kind == "both sparse, 1e-2" and name == "SGD" else 0.0))
        for kind in KINDS
        for name in OPTIMIZERS
        for seed in (0, 1)
    ]
    assert ends(runs[:2], "reward") == pytest.approx([0.5, 0.6])
    # 0.3 apart, the standard error of either mean being 0.05
    assert off(runs, "both sparse, 1e-2", "SGD", "reward") == pytest.approx(0.3 / (0.05 * 2**0.5))
    assert off(runs, "both sparse, 1e-2", "Adam", "reward") == 0
    assert "within 4.2 standard errors" in claim(runs)
    assert any("SGD | both sparse, 1e-2 | 0.850 +- 0.071" in line for line in table(runs))


def test_a_few_steps_written_and_drawn(begin: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_training, "PROMPTS", 4)
    monkeypatch.setattr(sparse_training, "PASS", 2)
    runs = [sparse_training.train(begin, kind, name, 1, 2) for kind in KINDS for name in OPTIMIZERS]
    assert all(len(x["reward"]) == len(x["entropy"]) == 2 for x in runs)
    assert {x["kind"] for x in runs if x.get("spent", {}).get("entries", 0) > 1} == {x for x in KINDS if "sparse" in x}
    saved, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    saved.write_text(json.dumps({"steps": 2, "runs": runs}))
    monkeypatch.setattr(sys, "argv", ["", "--report", str(saved), "--picture", str(picture)])
    sparse_training.main()
    assert picture.stat().st_size > 10_000


def test_a_replay_with_the_same_gradient_ends_at_the_same_weights_and_one_with_another_does_not(begin: Start) -> None:
    recorded = sparse_replay.record(begin, "Adam", 1, 2)
    assert 2 <= int(sparse_replay.occurring(recorded, VOCAB).sum()) <= 128

    def distances(kind: Loss) -> list[float]:
        return sparse_replay.distances(begin, recorded, sparse_replay.replay(begin, recorded, kind, "Adam"))

    assert distances(Fused()) == [0.0, 0.0, 0.0]
    exact_head, both = distances(Fused(1e-2)), distances(Fused(1e-2, weight=True))
    assert 0 < exact_head[0] < 0.5 and both[2] > 2 * exact_head[2]
