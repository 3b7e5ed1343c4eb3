"""`causal_lm_loss` with a trunk that computes what is needed: families, guard, fallbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers.integrations.neftune import activate_neftune
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks import tiny_models
from grpo_kernels import GRPOLoss
from grpo_kernels.body import trial
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss
from tests.support import all_architectures as every
from tests.support import tiny_architectures as tiny
from tests.support.training_step import (
    FAMILIES,
    MODES,
    PADDED,
    SCORED,
    assert_right,
    assert_same,
    batch,
    family,
    lengthened,
    loss_of,
    positions_left_to_the_model,
    reader,
    said_by,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("forget_warnings")]


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind: str, forget_warnings: Callable[[], None]) -> None:
    """In fp32 and bf16; whatever is asked, loss and gradients are the padded ones."""
    model, given, narrow = family(kind), batch(), family(kind, torch.bfloat16)
    first = [*MODES].index(FAMILIES[kind])
    for i, (mode, options) in enumerate(MODES.items()):
        exact = i >= first
        forget_warnings()
        said = said_by(lambda options=options: loss_of(narrow, given, **options))
        assert (not said) == exact
        forget_warnings()
        out = assert_right(model, given, *[""][: int(not exact)], modes=[options], quiet=exact)
        is_cut = "padded" not in (mode, FAMILIES[kind])
        assert (out.metrics["tokens/computed"] < 1) == is_cut
        assert out.metrics["sequences/gradient"] == 0.5
    with positions_left_to_the_model(model):
        assert_right(model, given)


def test_equal_tokens_at_other_positions_are_not_shared() -> None:
    """Where positions are columns: the second row is the first one, a column later."""
    model, given = family("gpt2"), batch(3)
    for name in ("input_ids", "attention_mask"):
        given[name][1] = given[name][0].roll(-1)
    given["completion_mask"] = given["attention_mask"][:, 8:]
    given["advantages"] = torch.tensor([1.0, 2.0, -0.5])
    assert_right(model, {**given, "position_ids": torch.arange(18).expand(3, 18)}, quiet=True)
    with positions_left_to_the_model(model):
        assert_right(model, given, quiet=True)


def test_holes_in_a_sequence_are_left_out() -> None:
    """In a tree no token sees them; a sliding window counts them."""
    given = batch()
    given["attention_mask"] = given["attention_mask"].clone()
    given["attention_mask"][0, 9] = given["attention_mask"][2, 6] = 0
    given["completion_mask"] = given["attention_mask"][:, 8:].clone()
    given["completion_mask"][0, 2] = 0  # nothing predicts it
    for kind, said in (("qwen3", False), ("mistral", True)):
        model = tiny.text_model(kind, torch.float32)
        assert_right(model, given, *["padding inside"][: int(said)], quiet=not said)


def test_turns_and_whole_batches_without_attention_mask() -> None:
    """Completions anywhere in the sequence; what follows the last counted token is not computed."""
    model, given = family("llama"), batch()
    mask = given["attention_mask"].clone()
    mask[:, :6] = mask[:, 9:12] = mask[:, 14:] = 0
    given["completion_mask"] = mask
    for attention in (given["attention_mask"], None):
        case = {**given, "attention_mask": attention}
        out = assert_right(model, case, modes=reversed(MODES.values()))
        assert out.metrics["tokens/computed"] < 0.75


def test_padding_is_never_read() -> None:
    """Garbage ids in padding change nothing, to the bit."""
    model, given = family("qwen3"), batch()
    noisy = {**given, "input_ids": given["input_ids"].where(given["attention_mask"] != 0, 77)}
    for options in MODES.values():
        clean, got = loss_of(model, given, **options)
        other, again = loss_of(model, noisy, **options)
        assert torch.equal(clean.loss, other.loss)
        if options["layout"] != "padded":
            assert all(torch.equal(got[name], x) for name, x in again.items())


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_the_guard(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor([True, False, False, False, False, True])
    monkeypatch.setattr("grpo_kernels.transformers.causal_lm._live", lambda *_: wrong)
    message = r"no gradient for the sequences \[2\], .*; pass zero_advantage='train'"
    with pytest.raises(RuntimeError, match=message):
        loss_of(family("qwen3"), batch(), **options)


def test_the_guard_sees_columns_that_were_cut() -> None:
    """A hook that reads hidden states of padding gets an error, not zeros."""
    model, kept = family("qwen3"), list[Tensor]()
    model.model.register_forward_hook(lambda *_: kept.append(_[2].last_hidden_state))
    out = causal_lm_loss(model, GRPOLoss(), **batch())
    with pytest.raises(RuntimeError, match=r"layout: the loss also uses .*layout='padded'"):
        (out.loss + kept[-1][0, 0].sum()).backward()


def test_skipped_sequences() -> None:
    model, given = family("llama"), batch()
    out = assert_right(model, given, modes=[{"zero_advantage": "skip"}])
    live = given["advantages"] != 0
    alone, _ = loss_of(model, {name: x[live] for name, x in given.items()})
    torch.testing.assert_close(out.metrics["entropy"], alone.metrics["entropy"])
    assert not out.logps[~live].any()
    for fields, message in (
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({}, "num_items_in_batch=completion_mask.sum"),
    ):
        with pytest.raises(ValueError, match=f"^zero_advantage: .*{message}"):
            causal_lm_loss(model, GRPOLoss(**fields), **given, zero_advantage="skip")


def test_what_cannot_be_known_trains() -> None:
    """A loss of the user's own, a KL term, an entropy bonus: every sequence has a graph."""
    model, given = family("llama"), batch()
    losses = (
        (GRPOLoss(objective=lambda tokens: -tokens.logps * tokens.advantages), {}),
        (GRPOLoss(beta=0.1), {"ref_per_token_logps": torch.full((6, 10), -4.0)}),
        (GRPOLoss(entropy_coef=0.01), {}),
    )
    for loss_fn, inputs in losses:
        out = causal_lm_loss(model, loss_fn, **given, **inputs)
        assert out.metrics["sequences/gradient"] == 1


def test_what_is_computed_is_counted() -> None:
    """Floating-point operations of the trunk's linear layers, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    model, given = family("llama"), batch()
    weights = sum(x.weight.numel() for x in model.model.modules() if isinstance(x, torch.nn.Linear))
    for options in (*MODES.values(), {"zero_advantage": "skip"}, PADDED):
        loss_of(model, given, **options)  # the modes are tried
        with FlopCounterMode(display=False) as counter:
            out, _ = loss_of(model, given, **options)
        names = "tokens/computed", "tokens/gradient"
        computed, gradient = (out.metrics[name].item() * 6 * 18 for name in names)
        assert 0 < gradient <= computed <= 6 * 18
        counts = counter.get_flop_counts()["LlamaForCausalLM.model"]
        products = torch.ops.aten.mm, torch.ops.aten.addmm  # in torch 2.15 there is attention too
        counted = sum(n for op, n in counts.items() if op in products)
        assert counted == round(2 * weights * (computed + 2 * gradient)), options


@pytest.mark.parametrize(("kind", "model_type"), [("dynamic", "llama"), ("longrope", "phi3")])
def test_frequencies_that_depend_on_the_length_keep_the_padding(kind: str, model_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    rope |= {"original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if kind == "longrope" else {}
    model, given = family(model_type, rope_parameters=rope), batch()
    assert_right(model, given, f"RoPE of the kind '{kind}'")
    assert not said_by(lambda: loss_of(model, given)), "said once"
    out = assert_right(model, given)
    assert out.metrics["tokens/computed"] == 1
    assert out.metrics["tokens/gradient"] == 0.5


def test_inputs_of_other_kinds_run_padded() -> None:
    model, given = family("llama"), {**batch(), "inputs_embeds": None}
    for name in ("use_cache", "output_hidden_states"):
        assert_right(model, {**given, name: True}, name)
    given = {**batch(), "output_router_logits": True}
    assert_right(family("qwen3_moe"), given, "output_router_logits")


def test_context_parallel_runs_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the attention function; all ranks must run the columns they were given."""
    model, given = family("llama"), batch()
    attention = torch.nn.functional.scaled_dot_product_attention
    name, ours = "scaled_dot_product_attention", lambda *args, **k: attention(*args, **k)
    monkeypatch.setattr(torch.nn.functional, name, ours)
    assert_right(model, given, "context parallel")
    assert loss_of(model, given)[0].metrics["tokens/gradient"] == 1


def test_images_and_text_of_vision_language_models() -> None:
    """With images the padded forward runs; text alone is trimmed."""
    model, ids, inputs = tiny.qwen2_vl()
    completion = torch.ones(2, 5, dtype=torch.long)
    given: dict[str, Any] = {"input_ids": ids, "completion_mask": completion}
    given["advantages"] = torch.tensor([1.0, 0.0])
    assert_right(model, {**given, **inputs}, "pixel_values")
    text = {**given, "input_ids": ids.clamp(max=80), "attention_mask": torch.ones_like(ids)}
    text["attention_mask"][0, :3] = text["attention_mask"][1, :2] = 0
    out = assert_right(model, text, modes=reversed(MODES.values()))
    assert out.metrics["tokens/computed"] < 1


def test_a_trunk_that_is_called_on_halves_of_the_batch_runs_as_given() -> None:
    plain, given = family("llama"), batch()

    class Halves(type(plain)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
            halves = zip(input_ids.split(3), attention_mask.split(3), strict=True)
            parts = [self.model(x, attention_mask=y, **kwargs).last_hidden_state for x, y in halves]
            return CausalLMOutputWithPast(logits=self.lm_head(torch.cat(parts)))

    plain.__class__ = Halves
    out = assert_right(plain, given, "with a part of the batch", modes=[{}, {"layout": "trim"}])
    assert out.metrics["tokens/computed"] == out.metrics["sequences/gradient"] == 1


def test_a_tree_that_rounding_allows_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding is measured by another forward, which counts no layers of the tree."""
    model = family("llama")
    # of the layout, and of the rounding
    monkeypatch.setattr(trial, "_distance", lambda *_: torch.tensor(1e-3))
    assert not said_by(lambda: loss_of(model, batch()))
    assert loss_of(model, batch())[0].metrics["tokens/computed"] < 0.6


@pytest.mark.slow
def test_compiled_layers_take_any_shape() -> None:
    """A stream of any lengths compiles each layer once for each kind of call."""
    model = tiny_models.model("qwen3", num_hidden_layers=1).train()
    compiled: list[int] = []

    def counted(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend=counted, dynamic=True)
    for i in range(4):
        mask = (torch.arange(90) < torch.randint(8, 64, (4, 1))).long()
        given = {"input_ids": torch.randint(3, 90, (4, 90)), "attention_mask": mask}
        given |= {"completion_mask": mask[:, 4:], "advantages": torch.tensor([1.0, 0.0, -1.0, 0.0])}
        loss_of(model, given)
        if i == 1:
            seen = len(compiled)
    assert len(compiled) == seen, "no shape that is compiled anew after the first batches"
    torch._dynamo.reset()


def test_an_invoked_adapter_is_seen_at_the_first_call_and_after_one_without_adapters() -> None:
    """It acts after tokens that each prompt has. The reference of a run with a KL term is scored
    first, with adapters off."""
    peft = pytest.importorskip("peft")
    fields = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    fields |= {"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    lora, given = peft.LoraConfig(alora_invocation_tokens=[91, 92], **fields), batch()
    given["input_ids"][:, 6:8] = torch.tensor([91, 92])
    first, second = (peft.get_peft_model(family("llama"), lora).float().eval() for _ in range(2))
    assert_right(first, given, "aLoRA begins at columns of the padded batch")
    with second.disable_adapter(), torch.no_grad():
        scores = causal_lm_logps(second, **{name: given[name] for name in SCORED})
    given["ref_per_token_logps"] = scores.logps
    got, want = (loss_of(second, given, beta=0.04, **options)[1] for options in ({}, PADDED))
    assert_same(got, want)


@pytest.mark.parametrize(
    ("context", "width", "positions"), [(12, 12, False), (12, 8, True), (6, 6, False)]
)
def test_a_context_may_be_short(context: int, width: int, positions: bool) -> None:
    """Whatever rows its modes are tried on."""
    model, given = tiny.text_model("gpt2", torch.float32, max_position_embeddings=context), batch()
    given = {name: x[:, 6 : 6 + width] if name in SCORED[:2] else x for name, x in given.items()}
    given["completion_mask"] = given["attention_mask"][:, 2:]
    if positions:
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_right(model, given)


def test_a_model_that_tells_padding_by_its_id_may_find_other_ids_there() -> None:
    """RoBERTa counts positions over ids that are not the padding's, whatever the mask says."""
    model, given = every.build("roberta"), batch()
    assert_right(model, given, modes=MODES.values())
    given["input_ids"] += 7 * (1 - given["attention_mask"])
    assert_right(model, given, modes=MODES.values())


def test_a_trial_puts_back_the_modules_that_a_model_replaces() -> None:
    """BigBird turns to full attention for good after a row that is short for its blocks."""
    model = every.build("big_bird")
    assert_right(model, lengthened(batch(), 3))
    assert model.bert.attention_type == "block_sparse"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_passing_lack_of_memory_switches_nothing_off(failing, monkeypatch):
    """In the first call's trial; that call is right, and the next one computes parts."""
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
    assert out.metrics["tokens/computed"] < 0.6


def test_values_that_were_not_computed_do_not_look_like_numbers() -> None:
    model, given = reader(), {name: batch()[name] for name in SCORED}
    want = model(given["input_ids"], given["attention_mask"])
    for _ in range(2):  # the first call checks the head, too
        output = causal_lm_logps(model, **given, return_output=True)[1]
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
        output = causal_lm_logps(model, **given, return_output=True)[1]
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
    found = causal_lm_logps(nested, **scored, return_output=True)[1].losses[0]
    torch.testing.assert_close(found, output.aux_loss, rtol=1e-5, atol=1e-5)


def test_noise_on_embeddings_has_the_magnitude_of_the_padded_width() -> None:
    """NEFTune divides its noise by the square root of the forward's cells."""
    model = family("llama").train()
    activate_neftune(model, 1.0)
    said = said_by(lambda: loss_of(model, batch()))
    assert len(said) == 1 and "NEFTune" in said[0]
    assert loss_of(model, batch())[0].metrics["tokens/computed"] == 1
