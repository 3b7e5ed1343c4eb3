"""A head's constants are those of the model's own logits on every path, in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from benchmarks import tiny_models, tiny_run
from grpo_kernels import GRPOLoss
from grpo_kernels.base.checks import warn_once
from grpo_kernels.transformers import causal_lm_loss, completion_logprobs, describe_head
from tests.support import tiny_architectures as tiny
from tests.support.training_step import batch, said_by

SCORED = ("input_ids", "attention_mask", "completion_mask")
SCALED = (
    "hyperclovax",
    "recurrent_gemma",
    "granite",
    "cohere2",
    "gemma2",
    "minicpm3",
    "falcon_h1",
    "llama",
)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    warn_once.cache_clear()


def own_logps(model: Any, ids: Tensor, mask: Tensor, **inputs: Any) -> Tensor:
    """(B, L - 1), of each next token."""
    with torch.no_grad():
        logits = (
            type(model)
            .forward(model, input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
            .logits
        )
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", SCALED)
def test_verls_forward(kind: str) -> None:
    pytest.importorskip("verl")
    from tests.support import verl_peer

    given = batch()
    ids, mask = given["input_ids"], given["attention_mask"]
    with verl_peer.patched() as patch:
        model = verl_peer.with_own_class(tiny.text_model(kind, torch.float32))
        want = own_logps(model, ids, mask)
        patch.apply_monkey_patch(
            model,
            use_remove_padding=False,
            use_fused_kernels=True,
            fused_kernels_backend="grpo_kernels",
        )
        for _ in range(2):
            got = model(
                input_ids=ids, attention_mask=mask, return_dict=True, use_cache=False
            ).log_probs[:, :-1]
            counted = mask[:, 1:].bool() & mask[:, :-1].bool()
            torch.testing.assert_close(got[counted], want[counted], rtol=1e-4, atol=1e-4)


def trls(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Log-probabilities of trl's fused head, patched."""
    import trl.trainer.dpo_trainer as trl_dpo

    trl_dpo.add_fused_lm_head(model, outputs=("log_probs",))
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    inputs = {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "labels": labels,
    }
    for _ in range(2):
        found = model(**inputs, fused_lm_head=True).log_probs
    return found


@pytest.mark.parametrize("kind", SCALED)
def test_a_patched_trl(kind: str) -> None:
    pytest.importorskip("trl")
    from grpo_kernels.trl import patch_trl

    model, given = tiny.text_model(kind, torch.float32), batch()
    want = own_logps(model, given["input_ids"], given["attention_mask"])
    # which knows the head, not what is before it
    completion_logprobs(model, **{name: given[name] for name in SCORED})
    with patch_trl():
        said = said_by(
            lambda: torch.testing.assert_close(*compared(trls(model, given), want, given), **CLOSE)
        )
    assert (len(said) == 1 and "soft-cap and scale" in said[0]) == (kind == "recurrent_gemma"), said
    assert torch.equal(own_logps(model, given["input_ids"], given["attention_mask"]), want)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def compared(got: Tensor, want: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counted = given["attention_mask"][:, 1:].bool() & given["attention_mask"][:, :-1].bool()
    got = got if got.shape == want.shape else got[:, 1:]
    return got[counted], want[counted]


def test_a_body_whose_output_is_changed_before_the_head_is_refused_by_trls_seam() -> None:
    """BERT has a dense layer and a norm there, which trl leaves out."""
    pytest.importorskip("trl")
    import trl.trainer.dpo_trainer as trl_dpo

    from grpo_kernels.trl import patch_trl

    with patch_trl(), pytest.raises(ValueError, match="BertLMHeadModel changes it in between"):
        trl_dpo.add_fused_lm_head(tiny.text_model("bert", torch.float32))  # when a trainer is made


@pytest.mark.parametrize("kind", ["recurrent_gemma", "hyperclovax"])
def test_the_trainer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it scores is what the model's own logits say."""
    pytest.importorskip("trl")
    from grpo_kernels.trl import FusedGRPOTrainer
    from tests.support.trl_training import train

    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    class Watched(FusedGRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model: Any, ids: Tensor, mask: Tensor, *rest: Any, **k: Any
        ) -> Any:
            found = super()._get_per_token_logps_and_entropies(model, ids, mask, *rest, **k)
            count = found[0].shape[1]
            want = own_logps(self.accelerator.unwrap_model(model), ids, mask)[:, -count:]
            seen.append((found[0].detach(), want, mask[:, -count:]))
            return found

    model = tiny.text_model(
        kind, torch.float32, vocab_size=tiny_models.VOCAB, max_position_embeddings=256
    )
    monkeypatch.setattr(tiny_run, "model", lambda *_, **__: model)
    train(Watched, 1, temperature=1.0)
    assert seen
    for got, want, mask in seen:
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-3, atol=1e-3)


def test_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of student and teacher, under a name that trl does not read."""
    trl = pytest.importorskip("trl")
    from grpo_kernels.trl import FusedDistillationTrainer
    from tests.support.trl_training import Written, train

    class Ours(Written, FusedDistillationTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> list[list[int]]:
            return super()._generate_single_turn(*args, **kwargs)[0]  # type: ignore[no-any-return]

    sizes = {"vocab_size": tiny_models.VOCAB, "max_position_embeddings": 256}
    model = tiny.text_model("recurrent_gemma", torch.float32, **sizes)
    teacher = tiny.text_model("hyperclovax", torch.float32, **sizes)
    monkeypatch.setattr(tiny_run, "model", lambda *_, **__: model)
    options = {"config_class": trl.DistillationConfig, "beta": 0.5, "max_completion_length": 12}
    run = train(Ours, 1, teacher_model=teacher, per_device_train_batch_size=4, **options)
    student, other = run.trainer._heads
    assert (student.final_logit_softcapping, student.logit_scale) == (2.0, 1.0)
    assert (other.final_logit_softcapping, other.logit_scale) == (None, 3.0)


def test_an_argument_that_divides_the_logits_is_measured_for_each_value() -> None:
    model, given = tiny.text_model("llama", torch.float32), {name: batch()[name] for name in SCORED}
    plain = model.forward

    def forward(*args: Any, divisor: float = 1.0, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits / divisor
        return output

    model.forward = forward
    for layout in ("tree", "padded"):
        for divisor in (1.0, 2.0, torch.tensor(3.0), 1.0, torch.tensor(0.5)):
            got = completion_logprobs(model, **given, divisor=divisor, layout=layout).logps
            with torch.no_grad():
                logits = forward(
                    given["input_ids"], attention_mask=given["attention_mask"], divisor=divisor
                ).logits
            want = (
                logits[:, 7:-1]
                .log_softmax(-1)
                .gather(-1, given["input_ids"][:, 8:, None])
                .squeeze(-1)
            )
            counted = given["completion_mask"].bool()
            torch.testing.assert_close(got[counted], want[counted], rtol=1e-5, atol=1e-5)


def test_a_forward_that_is_replaced_later_is_measured_again() -> None:
    model, given = tiny.text_model("llama", torch.float32), {name: batch()[name] for name in SCORED}
    before = completion_logprobs(model, **given).logps
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = 0.5 * output.logits
        return output

    model.forward = forward
    assert not torch.allclose(completion_logprobs(model, **given).logps, before, atol=1e-2)
    assert describe_head(model).logit_scale == 0.5
    model.forward = plain
    torch.testing.assert_close(completion_logprobs(model, **given).logps, before)


def test_a_copy_of_a_tied_head_has_the_size_of_its_weight() -> None:
    """PEFT's copy of a head that stays tied says another number of outputs than it has."""
    peft = pytest.importorskip("peft")
    model = tiny.text_model("qwen2", torch.float32)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True
    )
    wrapped, given = peft.get_peft_model(model, config), batch()
    scored = {name: given[name] for name in SCORED}
    got = completion_logprobs(wrapped, **scored).logps
    with torch.no_grad():
        logits = wrapped(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"]
        ).logits
    want = logits[:, 7:-1].log_softmax(-1).gather(-1, given["input_ids"][:, 8:, None]).squeeze(-1)
    counted = given["completion_mask"].bool()
    torch.testing.assert_close(got[counted], want[counted], rtol=1e-5, atol=1e-5)
    causal_lm_loss(wrapped, GRPOLoss(), **given).loss.backward()
