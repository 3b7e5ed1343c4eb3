"""TRL's GKD and IW-OPD trainers without logits against TRL's own: same losses and gradients, fewer products."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from benchmarks import tiny_models
from grpo_kernels.trl.gkd import FusedGKDTrainer
from grpo_kernels.trl.iw_opd import FusedIWOPDTrainer
from tests.support.trl_training import Run, assert_same, train


def conversations(rows: int = 32) -> Dataset:
    draw = random.Random(5)

    def text(words: int) -> str:
        return " ".join(f"w{draw.randrange(tiny_models.WORDS)}" for _ in range(words))

    turns = [(text(draw.randrange(2, 6)), text(draw.randrange(1, 7))) for _ in range(rows)]
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": x}, {"role": "assistant", "content": y}]
                for x, y in turns
            ]
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the teacher's tokenizer, which IW-OPD compares with the student's."""
    saved = str(tmp_path_factory.mktemp("teacher"))
    tiny_models.tokenizer().save_pretrained(saved)
    return saved


def trained(trainer_class: type, folder: str, student: str, teacher: str, **options: Any) -> Run:
    is_gkd = issubclass(trainer_class, GKDTrainer)
    model = tiny_models.model(teacher, seed=5, num_hidden_layers=1)
    model.config._name_or_path = folder
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 32}
    sizes["max_new_tokens" if is_gkd else "max_completion_length"] = 6
    given = {
        "model": student,
        "teacher_model": model,
        "train_dataset": conversations(),
        **sizes,
        **options,
    }
    return train(trainer_class, config_class=GKDConfig if is_gkd else IWOPDConfig, **given)


def assert_trains_the_same(stock: Run, ours: Run) -> None:
    assert len(stock.steps) == 2
    assert abs(stock.steps[0]["loss"]) > 1e-3
    assert {"loss", "grad_norm"} <= stock.steps[0].keys()
    assert_same(stock, ours)


@pytest.mark.parametrize(
    ("student", "teacher", "beta", "lmbda"),
    [
        ("qwen3", "tied", 0.0, 0.0),
        ("softcap", "qwen3", 0.5, 0.0),
        ("logit_scale", "softcap", 0.3, 1.0),  # of completions that the student writes
        ("bias", "logits_scaling", 1.0, 0.0),
    ],
)
def test_gkd_trains_the_same(
    folder: str, student: str, teacher: str, beta: float, lmbda: float
) -> None:
    given = (folder, student, teacher)
    stock, ours = (
        trained(x, *given, beta=beta, lmbda=lmbda) for x in (GKDTrainer, FusedGKDTrainer)
    )
    assert_trains_the_same(stock, ours)


@pytest.mark.parametrize(
    ("student", "teacher", "options"),
    [
        ("softcap", "qwen3", {"temperature": 0.7}),
        ("tied", "logit_scale", {"iw_opd_gamma": 0.8}),
        (
            "qwen3",
            "tied",
            {"lmbda": 0.0, "distillation_objective": "jsd", "beta": 0.5, "loss_top_k": 0},
        ),  # TRL's own
    ],
)
def test_iw_opd_trains_the_same(
    folder: str, student: str, teacher: str, options: dict[str, Any]
) -> None:
    stock, ours = (
        trained(x, folder, student, teacher, **options) for x in (IWOPDTrainer, FusedIWOPDTrainer)
    )
    assert ("iw_opd/mean_weight" in stock.steps[0]) == ("distillation_objective" not in options)
    assert_trains_the_same(stock, ours)


def batch(trainer: Any) -> dict[str, Tensor]:
    inputs = next(iter(trainer.get_train_dataloader()))
    return trainer.data_collator(inputs) if isinstance(inputs, list) else inputs


@pytest.mark.parametrize(
    ("trainer_classes", "products"),
    [((GKDTrainer, FusedGKDTrainer), (8, 8)), ((IWOPDTrainer, FusedIWOPDTrainer), (8, 10))],
)
def test_only_tokens_with_a_label_are_projected(
    folder: str, trainer_classes: tuple[type, type], products: tuple[int, int]
) -> None:
    """Products of both heads, in NVH: of all positions in TRL's, of the tokens with a label in ours."""
    flops: list[int] = []
    gradients: list[list[Tensor]] = []
    sizes: dict[str, int] = {}

    def prepare(trainer: Any) -> None:
        inputs = batch(trainer)
        counted = inputs["labels"][:, 1:] != -100
        sizes.update(positions=inputs["labels"].numel(), counted=int(counted.sum()))
        trainer.compute_loss(trainer.model, dict(inputs))  # the first call checks the head
        with FlopCounterMode(display=False) as counter:
            loss = trainer.compute_loss(
                trainer.model, dict(inputs), num_items_in_batch=torch.tensor(40)
            )
            gradients.append([*torch.autograd.grad(loss, [*trainer.model.parameters()])])
        flops.append(counter.get_total_flops())

    for trainer_class in trainer_classes:
        options = {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "steps": 1,
            "lmbda": 1.0,
        }
        trained(trainer_class, folder, "qwen3", "qwen3", prepare=prepare, **options)
    head = tiny_models.VOCAB * 32
    theirs, ours = products
    assert sizes["counted"] < sizes["positions"] / 2
    assert flops[0] - flops[1] == head * (theirs * sizes["positions"] - ours * sizes["counted"])
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-6)


def test_rows_are_logged_and_evaluation_is_trls_own(folder: str) -> None:
    evaluated: list[float] = []

    def prepare(trainer: Any) -> None:
        inputs = batch(trainer)
        with torch.no_grad():
            evaluated.append(float(trainer.compute_loss(trainer.model, dict(inputs))))
            evaluated.append(
                float(trainer.compute_loss(trainer.model, dict(inputs), return_outputs=True)[0])
            )

    run = trained(FusedGKDTrainer, folder, "qwen3", "tied", prepare=prepare, lmbda=0.0)
    logged = run.trainer.state.log_history[0]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert 0.1 < logged["rows/projected"] < 0.9
    assert logged["rows/gradient"] == 1.0
