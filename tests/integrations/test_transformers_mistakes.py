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

from grpo_kernels import GRPOLoss, LossConfig
from grpo_kernels.transformers import causal_lm_loss, completion_logprobs, describe_head
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import scene

pytestmark = pytest.mark.usefixtures("forget_warnings")

IDS, ATTENTION, MASK = scene()[1:]  # the second sequence ends two columns before the last
LOSS = {"loss_fn": GRPOLoss(), "advantages": torch.ones(3)}


def but(mask: torch.Tensor, row: int, columns: Any, value: int) -> torch.Tensor:
    mask = mask.clone()
    mask[row, columns] = value
    return mask


NOT_HERE = {
    "head": "it is the model's",
    "run": r"set it on the loss, GRPOLoss\(run=\.\.\.\)",
    "cu_seqlens": "pass packed rows with position_ids",
    "completion_ids": "they are the last columns of input_ids",
}
EXACT, OTHER = GRPOLoss(kl_estimator="full", beta=0.1), tiny.text_model("llama")
IN_PADDING = but(MASK, 1, slice(3, None), 1)  # both columns are padding
WITH_A_HOLE = but(ATTENTION, 2, 5, 0)
OWN_PLACES = (WITH_A_HOLE.cumsum(1) - 1).clamp(min=0)
OWN_POSITIONS = {"model": tiny.qwen2_vl()[0], "layout": "padded"}


def call(model: Any = None, **changes: Any) -> Any:
    """The loss if there are advantages, else log-probabilities; of a Llama if no model is named."""
    model = tiny.text_model("llama") if model is None else model
    given = {"input_ids": IDS, "attention_mask": ATTENTION, "completion_mask": MASK, **changes}
    return (causal_lm_loss if "advantages" in changes else completion_logprobs)(model, **given)


SHAPE = r"attention_mask: expected shape \(B, L\) = \(3, 12\), got \("
PADDING = "completion_mask: expected 0 where attention_mask is 0, got .* 11 of"
ROWS = r"completion_mask: expected shape \(B, T\) with B = 3 and 0 < T <= 12, got \(2, 5\)"
BESIDE = r"temperature: expected None beside loss_fn, .* got 1\.0"
# what is wrong -> what is said of it
VALUES: list[tuple[dict[str, Any], str]] = [
    *(({"attention_mask": torch.ones(x)}, SHAPE) for x in ((3, 11), (2, 12), (12,), (3, 1, 12))),
    *(({"completion_mask": IN_PADDING, **more}, PADDING) for more in ({}, LOSS)),
    ({"completion_mask": MASK[:2]}, ROWS),
    ({"completion_mask": torch.ones(3, 13)}, "completion_mask: expected shape"),
    ({"input_ids": IDS[0]}, r"input_ids: expected shape \(B, L\)"),
    ({"labels": IDS}, "labels: expected none"),
    ({"loss_fn": GRPOLoss(), "temperature": 1.0}, BESIDE),
    (
        {**LOSS, "loss_fn": EXACT},
        "reference: expected the reference model, since kl_estimator = 'f",
    ),
    ({**LOSS, "reference": OTHER}, "reference: expected None with kl_estimator = 'k3', .* got one"),
    *(({**LOSS, x: 1}, f"{x}: expected none here, got one: {say}") for x, say in NOT_HERE.items()),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": [[1] * 12] * 3}, "attention_mask: expected a tensor, got list"),
    ({"loss_fn": {}}, "loss_fn: expected a GRPOLoss, got dict"),
    ({**LOSS, "loss_fn": LossConfig()}, r"loss_fn: .*, got LossConfig; pass GRPOLoss\(config\)"),
    ({**LOSS, "loss_fn": GRPOLoss}, r"loss_fn: expected a GRPOLoss, got type; pass GRPOLoss\(..."),
    ({"input_ids": IDS.float()}, "input_ids: expected integer ids, got torch.float32"),
    ({**LOSS, "advantages": None}, "advantages: expected a tensor, got NoneType"),
    ({**LOSS, "loss_fn": EXACT, "reference": (IDS, OTHER)}, "reference: expected a transformers"),
    ({"run": "lean"}, "run: expected a Run, got str"),
]
ELSEWHERE = ("bias", "engine", "process_group", "final_logit_softcapping")  # of `Head` and `Run`
# transformers' forwards have **kwargs, in which a misspelt name vanishes: the loss was the
# on-policy one
NOTHING = "such (an )?input"
FIELD = "a field of LossConfig"
NAMES: list[tuple[dict[str, Any], str, str]] = [
    *((LOSS, name, "") for name in ELSEWHERE),
    (LOSS, "old_logps", rf"{NOTHING}; did you mean old_per_token_logps\?"),
    (LOSS, "num_items", rf"{NOTHING}; did you mean num_items_in_batch\?"),
    (LOSS, "mask", rf"{NOTHING}; did you mean attention_mask or completion_mask\?"),
    (LOSS, "output_hidden_state", rf"{NOTHING}; did you mean output_hidden_states\?"),
    (LOSS, "wandb", f"{NOTHING}$"),
    (LOSS, "temperature", rf"{FIELD}: set it on the loss, GRPOLoss\(temperature=\.\.\.\)"),
    (LOSS, "beta", rf"{FIELD}: set it on the loss, GRPOLoss\(beta=\.\.\.\)"),
    ({}, "temprature", r".*did you mean temperature\?"),
    ({}, "num_items_in_batch", f".*{NOTHING}"),
    ({}, "old_per_token_logps", f".*{NOTHING}"),
    ({}, "epsilon", f".*{FIELD}"),
]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [*((ValueError, *x) for x in VALUES), *((TypeError, *x) for x in TYPES)],
)
def test_wrong_arguments_are_named(
    error: type[Exception], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(**changes)


@pytest.mark.parametrize(("given", "name", "got"), NAMES)
def test_names_that_nothing_reads_are_refused_before_the_model_runs(
    given: dict[str, Any], name: str, got: str
) -> None:
    model = tiny.text_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))
    if "field" in got:
        reader = "LlamaForCausalLM or the loss" if given else "LlamaForCausalLM"
        start = f"expected an input of {reader}, got"
    else:
        start = "neither LlamaForCausalLM nor the loss has" if given else "LlamaForCausalLM has no"
    with pytest.raises(TypeError, match=f"^{name}: {start} {got}"):
        call(model, **given, **{name: None})


def test_logits_that_are_cut_off_before_the_completion() -> None:
    with pytest.raises(RuntimeError, match="is logits_to_keep too small"):
        call(logits_to_keep=5)
    assert call(logits_to_keep=6).logps.shape == (3, 5)


BART = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}  # fmt: skip
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(("kind", "sizes"), [("Bart", BART), ("T5", T5)])
def test_encoder_decoder_models_are_refused_by_name(kind: str, sizes: dict[str, int]) -> None:
    config = getattr(transformers, f"{kind}Config")(decoder_start_token_id=0, **sizes)
    name = f"{kind}ForConditionalGeneration"
    model = getattr(transformers, name)(config)
    message = f"^model: expected a model of one sequence, .* got {name}, an encoder-decoder model"
    for inputs in ({}, {"decoder_input_ids": IDS}):
        with pytest.raises(TypeError, match=message):
            call(model, **inputs)
    with pytest.raises(TypeError, match=message):
        describe_head(model)


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
        (
            {"completion_mask": ATTENTION},
            "it counts a token whose previous column has attention_mas",
        ),
    ],
)
def test_a_mask_that_is_likely_not_meant_warns_once(
    changes: dict[str, Any], said: str | None
) -> None:
    assert_warns_once(said, **changes)


def assert_warns_once(said: str | None, **changes: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
def test_padding_that_is_attended_to_is_warned_of(
    pad: int | None, columns: slice, warns: bool, forget_warnings: Callable[[], None]
) -> None:
    model = tiny.text_model("llama", pad_token_id=pad)
    given = {"model": model, "input_ids": but(IDS, 0, columns, pad or 0), "completion_mask": MASK}
    said = f"attention_mask: got None, and input_ids with padding tokens (pad_token_id = {pad})"
    assert_warns_once(said if warns else None, attention_mask=None, **given)
    forget_warnings()
    assert_warns_once(None, **given)
    assert_warns_once(said if warns else None, attention_mask=None, **LOSS, **given)


def test_weights_in_the_place_of_a_completion_mask(forget_warnings: Callable[[], None]) -> None:
    for inputs in ({}, LOSS):
        forget_warnings()
        with pytest.warns(UserWarning, match="completion_mask: it holds values other than 0 and 1"):
            call(completion_mask=0.5 * MASK, **inputs)


WHOLE = but(ATTENTION, 0, slice(3), 1)  # without padding on the left


@pytest.mark.parametrize("mask", [WHOLE, WHOLE.bool()], ids=["the same", "equal"])
def test_prompts_that_train_are_warned_of(mask: torch.Tensor) -> None:
    said = "completion_mask: it equals attention_mask, so the tokens of the prompts train too"
    assert_warns_once(said, **LOSS, attention_mask=WHOLE, completion_mask=mask)


def test_all_but_the_first_tokens_or_scores_of_prompts_are_not_warned_of() -> None:
    rest = but(WHOLE, slice(None), 0, 0)
    assert_warns_once(None, **LOSS, attention_mask=WHOLE, completion_mask=rest)
    assert_warns_once(None, attention_mask=WHOLE, completion_mask=WHOLE)


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
