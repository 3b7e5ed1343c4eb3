"""Models, adapters and batches that a forward in parts could get wrong, with the default options:
loss and gradients are those of the padded batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers.integrations.neftune import activate_neftune

from grpo_kernels.transformers import completion_logprobs
from tests.support import all_architectures as every
from tests.support import tiny_architectures as tiny
from tests.support.training_step import (
    MODES,
    PADDED,
    SCORED,
    assert_right,
    assert_same,
    batch,
    family,
    lengthened,
    loss_of,
    reader,
    said_by,
)

pytestmark = pytest.mark.usefixtures("forget_warnings")

INVOCATION = [91, 92]
KL = {"beta": 0.04}


def logps_of(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return completion_logprobs(model, **{name: given[name] for name in SCORED}).logps


def adapted(**fields: Any) -> Any:
    """A model with LoRA on attention."""
    peft = pytest.importorskip("peft")
    fields |= {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **fields)
    return peft.get_peft_model(family("llama"), lora).float().eval()


def invoked() -> tuple[Any, dict[str, Any]]:
    """An aLoRA model, whose adapter acts after the invocation tokens; and a batch in which each
    prompt has them."""
    given = batch()
    given["input_ids"][:, 6:8] = torch.tensor(INVOCATION)
    return adapted(alora_invocation_tokens=INVOCATION, init_lora_weights=False), given


def test_an_invoked_adapter_is_seen_at_the_first_call_and_after_one_without_adapters() -> None:
    """The reference of a run with a KL term is scored first, with adapters off."""
    assert_right(*invoked(), "aLoRA begins at columns of the padded batch")
    model, given = invoked()
    with model.disable_adapter():
        given["ref_per_token_logps"] = logps_of(model, given)
    assert_same(loss_of(model, given, **KL)[1], loss_of(model, given, **PADDED, **KL)[1])
    mask = given["completion_mask"]
    with torch.no_grad():
        ids, attended = given["input_ids"], given["attention_mask"]
        want, _ = tiny.plain_logprobs(model, ids, use_cache=False, attention_mask=attended)
    want = want[:, -mask.shape[1] :] * mask
    torch.testing.assert_close(logps_of(model, given).double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("context", "width", "positions"), [(12, 12, False), (12, 8, True), (6, 6, False)]
)
def test_a_context_may_be_short(context: int, width: int, positions: bool) -> None:
    """A model with few positions takes every batch that fits, whatever rows its modes are tried
    on."""
    model, given = tiny.text_model("gpt2", torch.float32, max_position_embeddings=context), batch()
    given = {name: x[:, 6 : 6 + width] if name in SCORED[:2] else x for name, x in given.items()}
    given["completion_mask"] = given["attention_mask"][:, 2:]
    if positions:
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_right(model, given)


def test_a_model_that_tells_padding_by_its_id_may_find_other_ids_there() -> None:
    """RoBERTa counts positions over ids that are not the padding's, whatever the mask says."""
    model, given = every.build("roberta"), batch()
    given["input_ids"] += 7 * (1 - given["attention_mask"])
    assert_right(model, given, modes=MODES.values())


def test_convolutions_over_sound_are_no_state_of_the_text() -> None:
    """MOSS-Transcribe-Diarize hands positions on to its language model, though its own forward
    names none."""
    model = every.build("moss_transcribe_diarize")
    assert assert_right(model, batch()).metrics["tokens/computed"] < 0.6


def test_a_trial_puts_back_the_modules_that_a_model_replaces() -> None:
    """BigBird turns to full attention for good once it has seen a row that is short for its
    blocks."""
    model = every.build("big_bird")
    assert_right(model, lengthened(batch(), 3))
    assert model.bert.attention_type == "block_sparse"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_passing_lack_of_memory_switches_nothing_off(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward of the first call's trial fails; that call is right, and the next one computes
    parts."""
    model, calls = family("llama"), []
    forward = model.model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == failing + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    _, want = loss_of(model, batch(), **PADDED)
    monkeypatch.setattr(model.model, "forward", run)
    assert_same(loss_of(model, batch())[1], want)
    out, got = loss_of(model, batch())
    assert_same(got, want)
    assert out.metrics["tokens/computed"] < 1


def test_values_that_were_not_computed_do_not_look_like_numbers() -> None:
    model, given = reader(), {name: batch()[name] for name in SCORED}
    want = model(given["input_ids"], given["attention_mask"])
    for _ in range(2):  # the first call checks the head, too
        output = completion_logprobs(model, **given, return_output=True)[1]
        pairs = (output.values, want.values), (output.hidden_states[0], want.hidden_states[0])
        for value, theirs in pairs:
            skipped = value.isnan().reshape(*value.shape[:2], -1).any(-1)
            real = given["attention_mask"].bool() & ~skipped
            assert real.any()
            torch.testing.assert_close(value[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_hidden_states_that_the_config_of_a_decoder_asks_for_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    model, given = tiny.gemma3_vl()[0].eval(), {name: batch()[name] for name in SCORED}
    model.config.get_text_config().output_hidden_states = True
    for _ in range(2):  # the first call checks the head, too
        output = completion_logprobs(model, **given, return_output=True)[1]
        assert {x.shape[:2] for x in output.hidden_states} == {given["input_ids"].shape}


@pytest.mark.parametrize("zero_advantage", ["score", "train", "skip"])
def test_a_loss_of_the_models_own_is_that_of_the_whole_batch(zero_advantage: Any) -> None:
    model, given = reader(), batch()
    policy, of_policy = loss_of(model, given, **PADDED)
    model.adds_loss = True
    output = model(given["input_ids"], given["attention_mask"])
    parameters = dict(model.named_parameters())
    of_model = torch.autograd.grad(output.aux_loss, parameters.values(), materialize_grads=True)
    want = dict(zip(parameters, of_model, strict=True))
    options = {"zero_advantage": zero_advantage, "router_aux_loss_coef": 1.0}
    out, got = loss_of(model, given, **options)
    torch.testing.assert_close(out.loss - policy.loss, output.aux_loss, rtol=1e-5, atol=1e-5)
    assert_same(got, {name: x + want[name] for name, x in of_policy.items()})

    nested = reader()  # a scalar within another field
    nested.adds_loss = nested.nests_loss = True
    scored = {name: given[name] for name in SCORED}
    found = completion_logprobs(nested, **scored, return_output=True)[1].losses[0]
    torch.testing.assert_close(found, output.aux_loss, rtol=1e-5, atol=1e-5)


def test_equal_weights_have_a_ratio_of_1() -> None:
    """No advantages and a fresh adapter: policy and reference are equal to the bit, since Adam
    would make a step of a rounding."""
    model, given = adapted(), {**batch(), "advantages": torch.zeros(6)}
    with model.disable_adapter():
        given["ref_per_token_logps"] = logps_of(model, given)
    out, got = loss_of(model, given, **KL)
    assert out.loss == 0
    assert not any(x.any() for x in got.values())


def test_noise_on_embeddings_has_the_magnitude_of_the_padded_width() -> None:
    """NEFTune divides its noise by the square root of the forward's cells."""
    model = family("llama").train()
    activate_neftune(model, 1.0)
    said = said_by(lambda: loss_of(model, batch()))
    assert len(said) == 1 and "NEFTune" in said[0]
    assert loss_of(model, batch())[0].metrics["tokens/computed"] == 1
