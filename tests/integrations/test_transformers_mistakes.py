"""A newcomer's mistakes with a transformers model: each is refused, or warned of once, in words
that say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from grpo_kernels import GRPOLoss, LossConfig, presets
from grpo_kernels.transformers import (
    causal_lm_divergence,
    causal_lm_logps,
    causal_lm_loss,
    describe_head,
)
from tests.support import tiny_architectures as tiny

pytestmark = pytest.mark.usefixtures("forget_warnings")

IDS, ATTENTION, MASK = tiny.scene()[1:]  # the second sequence ends two columns before the last
SWAPPED = {"input_ids": ATTENTION, "attention_mask": IDS}
LOSS = {"loss_fn": GRPOLoss(), "advantages": torch.ones(3)}


def but(mask: torch.Tensor, row: int, columns: Any, value: int) -> torch.Tensor:
    mask = mask.clone()
    mask[row, columns] = value
    return mask


EXACT, OTHER = GRPOLoss(kl_estimator="full", beta=0.1), tiny.text_model("llama")
IN_PADDING = but(MASK, 1, slice(3, None), 1)  # both columns are padding
WITH_A_HOLE = but(ATTENTION, 2, 5, 0)
OWN_PLACES = (WITH_A_HOLE.cumsum(1) - 1).clamp(min=0)
ONES = torch.ones_like(ATTENTION)
PACKED = {  # in each row a sequence of 6 tokens behind another
    "attention_mask": None,
    "position_ids": torch.arange(6).repeat(3, 2),
    "completion_mask": but(ONES, slice(None), 0, 0),
}
APART = {**LOSS, **PACKED, "advantages": torch.ones(3, 12)}
APART["completion_mask"] = but(ONES, slice(None), [0, 6], 0)
BY_ROW = {"loss_type": "grpo"}, {"loss_type": "vespo"}, vars(presets.GSPO)
OWN_POSITIONS = {"model": tiny.qwen2_vl()[0], "layout": "padded"}


def call(model: Any = None, **changes: Any) -> Any:
    """The loss if there are advantages, the divergence from a teacher, or log-probabilities; of a
    Llama if no model is named."""
    model = tiny.text_model("llama") if model is None else model
    given = {"input_ids": IDS, "attention_mask": ATTENTION, "completion_mask": MASK, **changes}
    if "teacher" in changes:
        return causal_lm_divergence(model, **given)
    return (causal_lm_loss if "advantages" in changes else causal_lm_logps)(model, **given)


IS_FIELD = r"expected an input of LlamaForCausalLM.*, got a field of LossConfig: set it on the loss"
# what is wrong -> what is said of it; transformers' forwards ignore names that they do not know
WRONG: list[tuple[type[Exception], dict[str, Any], str]] = [
    *(
        (ValueError, {"attention_mask": torch.ones(shape)}, r"attention_mask: .*shape \(B, L\)")
        for shape in ((3, 11), (2, 12), (12,), (3, 1, 12))
    ),
    (ValueError, {"completion_mask": IN_PADDING}, "completion_mask: expected 0 where .* 11 of"),
    (ValueError, {"completion_mask": MASK[:2]}, r"completion_mask: expected shape \(B, T\)"),
    (ValueError, {"completion_mask": torch.ones(3, 13)}, "completion_mask: expected shape"),
    (ValueError, {"input_ids": IDS[0]}, r"input_ids: expected shape \(B, L\)"),
    (ValueError, SWAPPED, "input_ids, attention_mask: .*swapped"),
    (ValueError, SWAPPED | LOSS, "input_ids, attention_mask: .*swapped"),
    (ValueError, {"position_ids": torch.arange(12)}, r"position_ids: expected shape \(B, L\)"),
    (ValueError, {"position_ids": MASK}, r"position_ids: expected shape \(B, L\)"),
    (ValueError, {"labels": IDS}, "labels: expected none"),
    (ValueError, {"loss_fn": GRPOLoss(), "temperature": 1.0}, "temperature: expected None beside"),
    (ValueError, {**LOSS, "loss_fn": EXACT}, "reference: expected the reference model"),
    (ValueError, {**LOSS, "reference": OTHER}, "reference: expected None with kl_estimator"),
    (ValueError, {**LOSS, "run": 1}, "run: expected none here, got one: set it on the loss"),
    (ValueError, {**LOSS, "cu_seqlens": 1}, "cu_seqlens: expected none here.* position_ids"),
    (TypeError, {"attention_mask": [[1] * 12] * 3}, "attention_mask: expected a tensor"),
    (TypeError, {"loss_fn": {}}, "loss_fn: expected a GRPOLoss, got dict"),
    (TypeError, {"loss_fn": "dapo"}, r"loss_fn: .* got str; config=presets.DAPO has"),
    (TypeError, {**LOSS, "loss_fn": LossConfig()}, r"loss_fn: .* pass GRPOLoss\(config\)"),
    (TypeError, {"loss_fn": GRPOLoss}, "loss_fn: .* an instance"),
    (TypeError, {"input_ids": IDS.float()}, "input_ids: expected integer ids"),
    (TypeError, {**LOSS, "advantages": None}, "advantages: expected a tensor"),
    (TypeError, {**LOSS, "loss_fn": EXACT, "reference": (IDS, OTHER)}, "reference: expected a tr"),
    (TypeError, {"run": "lean"}, "run: expected a Run"),
    (TypeError, {**LOSS, "bias": None}, "bias: .* causal_lm_loss, .* LlamaForCausalLM or the loss"),
    (TypeError, {**LOSS, "ref_model": OTHER}, r"ref_model: .* did you mean ref_per_token_logps\?"),
    (TypeError, {**LOSS, "loss_fn": EXACT, "ref_model": OTHER}, r"ref_.* did you mean reference\?"),
    (TypeError, {**LOSS, "old_logps": None}, r"old_logps: .* did you mean old_per_token_logps\?"),
    (TypeError, {**LOSS, "position_id": 1}, r"position_id: .* did you mean position_ids\?$"),
    (TypeError, {**LOSS, "wandb": None}, "wandb: .* an input of .*; it has reference, router_aux"),
    (TypeError, {**LOSS, "beta": None}, f"beta: {IS_FIELD}"),
    (TypeError, {"epsilon": None}, f"epsilon: {IS_FIELD}"),
    (TypeError, {"temprature": None}, r"temprature: .*did you mean temperature\?"),
    (TypeError, {"num_items_in_batch": None}, "num_items_in_batch: .* of LlamaForCausalLM"),
]


@pytest.mark.parametrize(("error", "changes", "message"), WRONG)
def test_wrong_arguments_are_named_before_the_model_runs(error, changes, message):
    model = tiny.text_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))
    with pytest.raises(error, match=f"^{message}"):
        call(model, **changes)


def test_logits_that_are_cut_off_before_the_completion() -> None:
    with pytest.raises(RuntimeError, match="is logits_to_keep too small"):
        call(logits_to_keep=5)
    assert call(logits_to_keep=6).logps.shape == (3, 5)


def test_encoder_decoder_models_are_refused_by_name() -> None:
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    config = transformers.T5Config(num_heads=2, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    for function in (call, describe_head):
        with pytest.raises(TypeError, match=r"^model: .* an encoder-decoder model"):
            function(model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # an end token that is the padding token, too, may count
        ({"completion_mask": but(MASK, 1, 3, 1)}, None),
        # a hole with positions of its own is meant
        ({"attention_mask": WITH_A_HOLE, "position_ids": OWN_PLACES}, None),
        # ... and they are counted from it where the model takes them
        ({"attention_mask": WITH_A_HOLE}, None),
        ({"attention_mask": WITH_A_HOLE, **OWN_POSITIONS}, "attention_mask: it has zeros between"),
        ({"completion_mask": ATTENTION}, "it counts a token whose previous column has attention"),
        # packed sequences, whose first tokens nothing predicts
        (PACKED, "it counts a token whose previous column has attention_mask 0, or whose position"),
        ({**PACKED, "completion_mask": but(ONES, slice(None), 6, 0)}, None),
        # ... each of which counts as a sequence in a mean over sequences
        *((APART | {"loss_fn": GRPOLoss(**x)}, "position_ids: a row holds") for x in BY_ROW),
        (APART, None),
        (APART | {"advantages": torch.ones(3)}, "advantages: one per row"),
        ({"attention_mask": ATTENTION * 2}, "attention_mask: it holds values other than 0 and 1"),
    ],
)
def test_a_mask_that_is_likely_not_meant_warns_once(changes: Any, said: str | None) -> None:
    assert_warns_once(said, **changes)


def test_models_that_are_likely_not_meant_warn_once() -> None:
    model, copy = tiny.scene()[0], tiny.scene()[0]
    for first, said in ((copy, None), (model, "reference: it is the very model that")):
        assert_warns_once(said, model=model, **LOSS | {"loss_fn": EXACT, "reference": first})
    copy.requires_grad_(False)
    assert_warns_once(None, model=model, teacher=copy)
    assert_warns_once("student, teacher: only the teacher", model=copy, teacher=model)
    random = tiny.scene(attention_dropout=0.5)[0]
    with torch.no_grad():
        assert_warns_once(None, model=random, layout="padded")
        assert_warns_once("model: it is in train mode", model=random.train(), layout="padded")


def assert_warns_once(said: str | None, **changes: Any) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            call(**changes)
    assert [x.filename for x in caught] == [__file__] * (said is not None)
    assert said is None or said in str(caught[0].message)


@pytest.mark.parametrize(
    ("pad", "columns", "warns"),
    [
        (0, slice(0, 3), True),
        (0, slice(8, 9), True),  # within the completion
        (0, slice(11, 12), False),  # after the last token that counts
        (None, slice(0, 3), False),
        (2, slice(0, 3), True),
        (2, slice(5, 6), False),  # of a conversation: the padding token ends turns, too
    ],
)
def test_padding_that_is_attended_to_is_warned_of(pad, columns, warns, forget_warnings):
    model = tiny.text_model("llama", pad_token_id=pad)
    given = {"model": model, "input_ids": but(IDS, 0, columns, pad or 0), "completion_mask": MASK}
    said = f"attention_mask: got None, and input_ids with padding tokens (pad_token_id = {pad})"
    assert_warns_once(said if warns else None, attention_mask=None, **given)
    forget_warnings()
    if columns.start == 0:
        assert_warns_once(None, **given)  # the tokenizer's mask
    # with a mask, only padding at the beginning is surely none of the text
    said = said.replace("None", "ones", 1) if columns.start == 0 and warns else None
    assert_warns_once(said, attention_mask=torch.ones_like(ATTENTION), **given)


WHOLE = but(ATTENTION, 0, slice(3), 1)  # without padding on the left


def test_prompts_that_train_are_warned_of(forget_warnings: Callable[[], None]) -> None:
    said = "completion_mask: it equals attention_mask, so the tokens of the prompts train too"
    for mask in (WHOLE, WHOLE.bool()):
        assert_warns_once(said, **LOSS, attention_mask=WHOLE, completion_mask=mask)
        forget_warnings()
    rest = but(WHOLE, slice(None), 0, 0)  # all but the first tokens
    assert_warns_once(None, **LOSS, attention_mask=WHOLE, completion_mask=rest)
    assert_warns_once(None, attention_mask=WHOLE, completion_mask=WHOLE)


def test_sequences_that_share_the_masks_of_dropout_are_warned_of(forget_warnings):
    model, *batch = tiny.scene(attention_dropout=0.5)
    four = [x[:1].expand(4, -1) for x in batch]
    model.train()
    with pytest.warns(UserWarning, match=r"in train mode .* layout='trim'.* model\.eval\(\)"):
        logps = causal_lm_logps(model, *four).logps
    assert torch.equal(logps, logps[:1].expand_as(logps))
    with warnings.catch_warnings(action="error"):
        logps = causal_lm_logps(model, *four, layout="trim").logps
        assert len(logps.sum(dim=1).unique()) == 4
        causal_lm_logps(model.eval(), *four)
    forget_warnings()
    adapted = tiny.peft_model(tiny.scene()[0], target_modules=["q_proj"], lora_dropout=0.5).train()
    with adapted.disable_adapter(), warnings.catch_warnings(action="error", category=UserWarning):
        causal_lm_logps(adapted, *four)


def test_log_probabilities_have_the_temperature_of_the_loss() -> None:
    loss = {**LOSS, "loss_fn": GRPOLoss(temperature=0.7)}
    for logits_dtype in ("float32", "input"):
        options = {"logits_dtype": logits_dtype}
        old = call(loss_fn=loss["loss_fn"], **options).logps
        torch.testing.assert_close(old, call(temperature=0.7).logps, rtol=1e-2, atol=1e-2)
        ratio = call(**loss, old_per_token_logps=old.detach(), **options).metrics["ratio"]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)


@pytest.mark.parametrize("wrong", [-100, 10**6])
def test_ids_that_the_model_lacks_are_named(wrong: int) -> None:
    """As a label's -100, or ids of a larger tokenizer; what attention leaves out is not read."""
    for options in ({}, LOSS):
        message = rf"^input_ids: expected ids in \[0, \d+\), got {wrong};"
        with pytest.raises(ValueError, match=message):
            call(**options, input_ids=but(IDS, 0, 5, wrong))
        call(**options, input_ids=torch.where(ATTENTION != 0, IDS, wrong))


def test_a_flat_part_of_the_embedding_is_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP1 shows it between forwards."""
    model = tiny.text_model("llama")
    part = SimpleNamespace(weight=torch.zeros(3))
    monkeypatch.setattr(model, "get_input_embeddings", lambda: part)
    call(model)
