"""LoRA on the head, which TRL refuses: our trainer against TRL's own loss of all logits under plain autograd."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("peft")
import peft
import transformers
import trl

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.integrations.trl.head import adapters_allowed
from tests.support.trl_all_logits import Checked
from tests.support.trl_ranks import OursWritten, Written

TWICE = {"num_iterations": 2, "beta": 0.04}
SHAPE = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}  # both factors random: the adapter counts at once
ON_HEAD = {"r": 4, "target_modules": ["q_proj", "lm_head"], **SHAPE}


class AllLogits(Written, trl.GRPOTrainer):
    """TRL's trainer with log-probabilities out of the model's own logits; its refusal is not for these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with adapters_allowed():
            super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        ids: Tensor,
        attention_mask: Tensor,
        count: int,
        *_: Any,
        compute_entropy: bool = False,
        **__: Any,
    ) -> Any:
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, -count - 1 : -1] / self.temperature
        log_probs = logits.log_softmax(-1)
        labelled = attention_mask[:, -count:]
        logps = labelled * log_probs.gather(-1, ids[:, -count:, None])[..., 0]
        return logps, -labelled * (log_probs.exp() * log_probs).sum(-1) if compute_entropy else None, None


class Stock(Written, trl.GRPOTrainer):
    pass


def train(trainer_class: type, model: Any, steps: int = 2, **given: Any) -> tuple[list[dict[str, float]], Any]:
    """What was logged, and the trainer; `given` are options of the configuration, and two of the trainer."""
    tiny_run.quiet()
    arguments = {name: given.pop(name) for name in ("peft_config", "kl_estimator") if name in given}
    history = tiny_run.History()
    with tempfile.TemporaryDirectory() as folder:
        args = tiny_run.config(folder, steps, **{"optim": "sgd", "learning_rate": 0.1, **given})
        given = {"reward_funcs": tiny_run.reward, "train_dataset": tiny_run.dataset(), **arguments}
        trainer = trainer_class(model=model, args=args, processing_class=tiny_models.tokenizer(), **given)
        trainer.remove_callback(transformers.PrinterCallback)
        tiny_run.record(trainer, history)
        trainer.train()
    return history.steps, trainer


def assert_same(stock: tuple[Any, Any], ours: tuple[Any, Any]) -> None:
    """Everything that was logged, and how far each parameter has gone."""
    assert max(parity.differences(stock[0], ours[0]).values()) <= parity.TOLERANCE
    theirs = dict(stock[1].model.named_parameters())
    for name, x in ours[1].model.named_parameters():
        torch.testing.assert_close(x, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reference without adapters, two iterations": ("qwen3", ON_HEAD, TWICE),
    "entropy bonus, frozen bias": ("bias", ON_HEAD, {"entropy_coef": 0.01}),
    "tied, rank-stabilised": ("tied", {**ON_HEAD, "use_rslora": True}, TWICE),
    "soft-cap, bias of the adapter": ("softcap", {**ON_HEAD, "lora_bias": True}, {"loss_type": "grpo"}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_all_logits(name: str) -> None:
    kind, shape, options = CASES[name]
    stock, ours = (
        train(cls, tiny_models.model(kind, num_hidden_layers=1), peft_config=peft.LoraConfig(**shape), **options)
        for cls in (AllLogits, OursWritten)
    )
    assert_same(stock, ours)
    assert "lora_B" in "".join(name for name, _ in ours[1].model.get_output_embeddings().named_modules())


def test_an_adapter_that_is_there_already_is_its_own_reference() -> None:
    """TRL keeps a frozen copy of it for the reference."""

    def adapted() -> Any:
        torch.manual_seed(5)
        return peft.get_peft_model(tiny_models.model(num_hidden_layers=1), peft.LoraConfig(**ON_HEAD))

    stock, ours = (train(cls, adapted(), **TWICE) for cls in (AllLogits, OursWritten))
    assert_same(stock, ours)
    assert "ref" in ours[1].model.get_output_embeddings().lora_A
    assert ours[0][-1]["kl"] > 0
    with pytest.raises(ValueError, match="kl_estimator: expected 'k3' where the reference is an adapter of its own"):
        train(OursWritten, adapted(), kl_estimator="full", **TWICE)


@pytest.mark.parametrize(
    "shape", [{"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, {"target_modules": "all-linear"}], ids=str
)
def test_a_trained_copy_of_the_head_and_all_linear_layers_are_as_in_stock_trl(shape: dict[str, Any]) -> None:
    """PEFT's "all-linear" leaves the head out."""
    config = peft.LoraConfig(r=4, **shape, **SHAPE)
    model = partial(tiny_models.model, num_hidden_layers=1)
    assert_same(*(train(cls, model(), peft_config=config, **TWICE) for cls in (Stock, OursWritten)))


def test_the_exact_kl_has_the_adapter_in_the_policy_and_not_in_the_reference() -> None:
    class CheckedTrainer(Checked, FusedGRPOTrainer):
        kls: ClassVar[list[float]] = []

    config = peft.LoraConfig(**ON_HEAD)
    train(CheckedTrainer, tiny_models.model(num_hidden_layers=1), peft_config=config, kl_estimator="full", **TWICE)
    assert len(CheckedTrainer.kls) == 4
    assert min(CheckedTrainer.kls) > 1e-3


@pytest.mark.parametrize(
    ("config", "options", "error", "says"),
    [
        (peft.LoraConfig(**ON_HEAD, use_dora=True), {}, ValueError, "expected adapters that are plain LoRA, got Dora"),
        (peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), {}, TypeError, r"lm_head: .*ia3\.layer"),
        (
            peft.LoraConfig(**ON_HEAD),
            {"cast_lm_head_to_fp32": True},
            ValueError,
            "cast_lm_head_to_fp32: expected False",
        ),
    ],
    ids=["DoRA", "IA3", "fp32 head"],
)
def test_what_cannot_be_computed_is_refused(
    config: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        train(OursWritten, tiny_models.model(num_hidden_layers=1), peft_config=config, **options)


def test_stock_trl_refuses_as_before() -> None:
    train(OursWritten, tiny_models.model(num_hidden_layers=1), 1, peft_config=peft.LoraConfig(**ON_HEAD))
    with pytest.raises(ValueError, match="PEFT adapter to `lm_head` is not supported"):
        train(Stock, tiny_models.model(num_hidden_layers=1), peft_config=peft.LoraConfig(**ON_HEAD))
