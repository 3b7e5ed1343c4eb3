"""A head's constants are those of the model's own logits on every path, in every call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models, tiny_run
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss, describe_head
from tests.support import tiny_architectures as tiny
from tests.support.training_step import SCORED, batch

pytestmark = pytest.mark.usefixtures("forget_warnings")


def own_logps(model: Any, given: dict[str, Tensor], **inputs: Any) -> Tensor:
    """(B, L), of each token from the model's own logits; the first column is 0."""
    inputs |= {"attention_mask": given["attention_mask"], "use_cache": False}
    with torch.no_grad():
        return tiny.plain_logprobs(model, given["input_ids"], **inputs)[0]


def assert_own(got: Tensor, want: Tensor, given: dict[str, Tensor], **bound: float) -> None:
    """Equal at the tokens that follow a token, or at those that count in a completion."""
    mask = given["attention_mask"]
    counted = (mask * nn.functional.pad(mask[:, :-1], (1, 0))).bool()
    if got.shape[1] < mask.shape[1]:
        counted = given["completion_mask"].bool()
    close = {"rtol": 1e-4, "atol": 1e-4, **bound}
    torch.testing.assert_close(got[counted].double(), want[:, -got.shape[1] :][counted], **close)


def test_verls_forward() -> None:
    """FSDP2's precision of what a model returns holds for its log-probabilities."""
    pytest.importorskip("verl")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from tests.support import verl_peer
    from tests.support.ranks import one_rank

    given = batch()
    inputs = {**{name: given[name] for name in SCORED[:2]}, "return_dict": True}
    with verl_peer.patched() as patch, one_rank():
        model = verl_peer.with_own_class(tiny.text_model("hyperclovax", torch.float32))
        want = own_logps(model, given)
        ours = {"use_fused_kernels": True, "fused_kernels_backend": "grpo_kernels"}
        patch.apply_monkey_patch(model, use_remove_padding=False, **ours)
        for _ in range(2):
            got = model(**inputs, use_cache=False).log_probs
            assert_own(nn.functional.pad(got[:, :-1], (1, 0)), want, given)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float16))
        for _ in range(2):
            assert model(**inputs).log_probs.dtype == torch.float16


@pytest.mark.parametrize("kind", ["hyperclovax", "recurrent_gemma", "bert"])
def test_a_patched_trl(kind: str) -> None:
    """A factor named as others' divisor, a soft-cap under another name, a dense layer and a norm
    before the head: stock TRL leaves them out."""
    pytest.importorskip("trl")
    import trl.trainer.dpo_trainer as trl_dpo

    from grpo_kernels.trl import patch_trl

    model, given = tiny.text_model(kind, torch.float32), batch()
    want, inputs = own_logps(model, given), {name: given[name] for name in SCORED[:2]}
    inputs["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)

    with patch_trl():
        trl_dpo.add_fused_lm_head(model, outputs=("log_probs",))
    for _ in range(2):
        got = nn.functional.pad(model(**inputs, fused_lm_head=True).log_probs, (1, 0))
        assert_own(got, want, given)
    assert torch.equal(own_logps(model, given), want)


def test_distillation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of student and teacher, under a name that trl does not read."""
    trl = pytest.importorskip("trl")
    from grpo_kernels.trl import FusedDistillationTrainer
    from tests.support.trl_training import Drawn, Run, mixed, train

    def distilled(student: str, teacher: str) -> Run:
        sizes = {"vocab_size": tiny_models.VOCAB, "max_position_embeddings": 256}
        model, other = (tiny.text_model(x, torch.float32, **sizes) for x in (student, teacher))
        monkeypatch.setattr(tiny_run, "model", lambda *_, **__: model)
        options = {"config_class": trl.DistillationConfig, "beta": 0.5, "max_completion_length": 12}
        options["prepare"] = lambda _: warnings.simplefilter("always")  # a tiny run is silent
        options |= {"teacher_model": other, "per_device_train_batch_size": 4}
        return train(mixed(Drawn, FusedDistillationTrainer), 1, **options)

    with pytest.warns(UserWarning, match="TRL's head would use the soft-cap and scale"):
        run = distilled("recurrent_gemma", "hyperclovax")
    student, teacher = run.trainer._heads
    assert (student.final_logit_softcapping, student.logit_scale) == (2.0, 1.0)
    assert (teacher.final_logit_softcapping, teacher.logit_scale) == (None, 3.0)
    # a dense layer and a norm before the head, which trl's divergence leaves out
    with pytest.raises(ValueError, match="BertLMHeadModel changes it in between"):
        distilled("llama", "bert")


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
            got = causal_lm_logps(model, **given, divisor=divisor, layout=layout).logps
            assert_own(got, own_logps(model, given, divisor=divisor), given, rtol=1e-5, atol=1e-5)


def test_a_forward_that_is_replaced_later_is_measured_again() -> None:
    model, given = tiny.text_model("llama", torch.float32), {name: batch()[name] for name in SCORED}
    before = causal_lm_logps(model, **given).logps
    plain = model.forward
    tiny.with_logits(model, lambda logits: 0.5 * logits)
    assert not torch.allclose(causal_lm_logps(model, **given).logps, before, atol=1e-2)
    assert describe_head(model).logit_scale == 0.5
    model.forward = plain
    torch.testing.assert_close(causal_lm_logps(model, **given).logps, before)


def test_a_copy_of_a_tied_head_has_the_size_of_its_weight() -> None:
    """PEFT's copy of a head that stays tied says another number of outputs than it has."""
    peft = pytest.importorskip("peft")
    model = tiny.text_model("qwen2", torch.float32)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True
    )
    wrapped, given = peft.get_peft_model(model, config), batch()
    scored = {name: given[name] for name in SCORED}
    got = causal_lm_logps(wrapped, **scored).logps
    assert_own(got, own_logps(wrapped, given), given, rtol=1e-5, atol=1e-5)
    causal_lm_loss(wrapped, GRPOLoss(), **given).loss.backward()
