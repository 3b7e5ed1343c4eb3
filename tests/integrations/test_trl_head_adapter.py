"""LoRA on the head, which TRL refuses: our trainer against TRL's own loss of all logits under plain autograd."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("peft")
import peft
import trl

from grpo_kernels.trl import FusedGRPOTrainer
from grpo_kernels.trl.fused_head import adapters_allowed
from tests.support import trl_training
from tests.support.trl_all_logits import Checked
from tests.support.trl_training import Run, Written, mixed

TWICE = {"num_iterations": 2, "beta": 0.04}
SHAPE = {
    "init_lora_weights": False,
    "task_type": "CAUSAL_LM",
}  # both factors random: the adapter counts at once
ON_HEAD = {"r": 4, "target_modules": ["q_proj", "lm_head"], **SHAPE}
on_head = partial(peft.LoraConfig, **ON_HEAD)
Ours, Stock = mixed(Written, FusedGRPOTrainer), mixed(Written, trl.GRPOTrainer)


class AllLogits(Written, trl.GRPOTrainer):
    """TRL's trainer with log-probabilities out of the model's own logits; its refusal is not for these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with adapters_allowed():
            super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Tensor, attention_mask: Tensor, count: int, *_: Any, **options: Any
    ) -> Any:
        logits = (
            model(input_ids=ids, attention_mask=attention_mask).logits[:, -count - 1 : -1]
            / self.temperature
        )
        log_probs = logits.log_softmax(-1)
        labelled = attention_mask[:, -count:]
        logps = labelled * log_probs.gather(-1, ids[:, -count:, None])[..., 0]
        entropies = -labelled * (log_probs.exp() * log_probs).sum(-1)
        return logps, entropies if options.get("compute_entropy") else None, None


def train(trainer_class: type, **options: Any) -> Run:
    return trl_training.train(trainer_class, **{"optim": "sgd", "learning_rate": 0.1, **options})


def assert_same(stock: Run, ours: Run) -> None:
    """Everything that was logged, and how far each parameter has gone."""
    trl_training.assert_same(stock, ours)
    theirs = dict(stock.trainer.model.named_parameters())
    for name, x in ours.trainer.model.named_parameters():
        torch.testing.assert_close(
            x, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reference without adapters, two iterations": ("qwen3", ON_HEAD, TWICE),
    "entropy bonus, frozen bias": ("bias", ON_HEAD, {"entropy_coef": 0.01}),
    "tied, rank-stabilised": ("tied", {**ON_HEAD, "use_rslora": True}, TWICE),
    "soft-cap, bias of the adapter": (
        "softcap",
        {**ON_HEAD, "lora_bias": True},
        {"loss_type": "grpo"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_all_logits(name: str) -> None:
    kind, shape, options = CASES[name]
    config = peft.LoraConfig(**shape)
    stock, ours = (
        train(cls, model=kind, peft_config=config, **options) for cls in (AllLogits, Ours)
    )
    assert_same(stock, ours)
    assert "lora_B" in "".join(
        name for name, _ in ours.trainer.model.get_output_embeddings().named_modules()
    )


class Adapted:
    """In front of a trainer: its model has an adapter already."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        super().__init__(model=peft.get_peft_model(model, on_head()), **kwargs)


def test_an_adapter_that_is_there_already_is_its_own_reference() -> None:
    """TRL keeps a frozen copy of it for the reference."""
    stock, ours = (train(mixed(Adapted, cls), **TWICE) for cls in (AllLogits, Ours))
    assert_same(stock, ours)
    assert "ref" in ours.trainer.model.get_output_embeddings().lora_A
    assert ours.steps[-1]["kl"] > 0
    with pytest.raises(
        ValueError, match="kl_estimator: expected 'k3' where the reference is an adapter of its own"
    ):
        train(mixed(Adapted, Ours), kl_estimator="full", **TWICE)


@pytest.mark.parametrize(
    "shape",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_a_trained_copy_of_the_head_and_all_linear_layers_are_as_in_stock_trl(
    shape: dict[str, Any],
) -> None:
    """PEFT's "all-linear" leaves the head out."""
    options = {"peft_config": peft.LoraConfig(r=4, **shape, **SHAPE), **TWICE}
    assert_same(*(train(cls, **options) for cls in (Stock, Ours)))


def test_the_exact_kl_has_the_adapter_in_the_policy_and_not_in_the_reference() -> None:
    options = {"peft_config": on_head(), "kl_estimator": "full", **TWICE}
    kls = train(mixed(Checked, FusedGRPOTrainer), **options).trainer.kls
    assert len(kls) == 4
    assert min(kls) > 1e-3


class Doubled(torch.nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = head, head.weight, head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * self.inner(hidden)


class Wrapped:
    """In front of a trainer: such a wrapper is around the head."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        model.set_output_embeddings(Doubled(model.get_output_embeddings()))
        super().__init__(model=model, **kwargs)


TOKENS = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
WRAPPERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "token indices": (
        Ours,
        {"peft_config": peft.LoraConfig(trainable_token_indices={"lm_head": [3, 4]}, **TOKENS)},
        r"TrainableTokensWrapper; train it by LoRA \(target_modules=\['lm_head'\]\), whole",
    ),
    "token indices of a tied embedding": (
        Ours,
        {
            "model": "tied",
            "peft_config": peft.LoraConfig(
                trainable_token_indices={"embed_tokens": [3, 4]}, **TOKENS
            ),
        },
        r"TrainableTokensWrapper; train it .* \(what trains a tied embedding trains it, too\)",
    ),
    "target parameters": (
        Ours,
        {"peft_config": peft.LoraConfig(target_parameters=["lm_head.weight"], **TOKENS)},
        r"ParamWrapper; train it by LoRA \(target_modules=\['lm_head'\]\)",
    ),
    "unknown": (mixed(Wrapped, Ours), {}, r"Doubled; take off, or merge, what is around it"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_around_the_head_is_refused_when_the_trainer_is_made(name: str) -> None:
    trainer_class, options, says = WRAPPERS[name]
    made: list[Any] = []
    with pytest.raises(TypeError, match=rf"lm_head: expected an nn\.Linear .* got .*{says}"):
        train(trainer_class, prepare=made.append, **options)
    assert not made


IA3 = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
FP32 = {"cast_lm_head_to_fp32": True}


@pytest.mark.parametrize(
    ("config", "options", "error", "says"),
    [
        (on_head(use_dora=True), {}, ValueError, "expected adapters that are plain LoRA, got Dora"),
        (IA3, {}, TypeError, r"lm_head: .*ia3\.layer"),
        (on_head(), FP32, ValueError, "cast_lm_head_to_fp32: expected False"),
    ],
    ids=["DoRA", "IA3", "fp32 head"],
)
def test_what_cannot_be_computed_is_refused(
    config: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        train(Ours, peft_config=config, **options)


def test_stock_trl_refuses_as_before() -> None:
    train(Ours, steps=1, peft_config=on_head())
    with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
        train(Stock, peft_config=on_head())
