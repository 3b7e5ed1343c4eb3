"""Mistakes that many make once: the error says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grpo_kernels
from grpo_kernels import (
    GRPOLoss,
    Head,
    LoRA,
    LossConfig,
    TokenInputs,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    policy_loss_from_logps,
    token_level,
)
from tests.support.flat import flat
from tests.support.small_batch import small_batch

BATCH = small_batch()
HIDDEN, WEIGHT, IDS = BATCH["hidden"], BATCH["weight"], BATCH["completion_ids"]
LOGITS = HIDDEN @ WEIGHT.T
SHARED = {
    name: x for name, x in BATCH.items() if name not in ("hidden", "weight", "completion_ids")
}
HEAD = nn.Linear(*reversed(WEIGHT.shape), bias=False)

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grpo_loss": lambda hidden, ids: grpo_loss(hidden, WEIGHT, ids, **SHARED),
    "linear_logprob": lambda hidden, ids: linear_logprob(hidden, WEIGHT, ids),
    "kept sets": lambda hidden, ids: linear_logprob(hidden, WEIGHT, ids, kept_ids=ids[..., None]),
    "module": lambda hidden, ids: linear_logprob(hidden, HEAD, ids),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_logits_in_the_place_of_hidden_states(call: Callable[[Tensor, Tensor], Any]) -> None:
    vocab, width = WEIGHT.shape
    message = (
        rf"^hidden: expected hidden states of width H = {width}, .* got \(.*{vocab}\): these look "
        "like logits: pass the"
    )
    with pytest.raises(ValueError, match=message):
        call(LOGITS, IDS)


def test_logits_of_a_teacher_and_a_weight_with_rows_and_columns_swapped() -> None:
    with pytest.raises(
        ValueError,
        match=r"^teacher_hidden: expected hidden states .*: these look like logits: pass",
    ):
        linear_divergence(HIDDEN, WEIGHT, LOGITS, WEIGHT)
    with pytest.raises(
        ValueError, match=r"^weight: expected shape \(V, H\) .*; it looks transposed"
    ):
        linear_logprob(HIDDEN, WEIGHT.T, IDS)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_position_or_one_id_too_many(call: Callable[[Tensor, Tensor], Any]) -> None:
    longer = torch.cat([HIDDEN, HIDDEN[:, :1]], dim=1)
    with pytest.raises(
        ValueError,
        match=r"ids: .*token t is position t - 1: drop the last position, hidden\[\.\.\., :-1, :\]",
    ):
        call(longer, IDS)
    with pytest.raises(
        ValueError, match=r"ids: .*token t is position t - 1: drop the first id, \[\.\.\., 1:\]"
    ):
        call(HIDDEN[:, :-1], IDS)
    call(longer[..., :-1, :], IDS)  # as it says


LOSSES: dict[str, Callable[..., Any]] = {
    "grpo_loss": lambda hidden, **given: grpo_loss(hidden, WEIGHT, **given),
    "GRPOLoss": lambda hidden, **given: GRPOLoss()(hidden, WEIGHT, **given),
    "module": lambda hidden, **given: grpo_loss(hidden, HEAD, **given),
    "policy_loss_from_logps": lambda hidden, completion_ids, **given: policy_loss_from_logps(
        -hidden.square().mean(-1), hidden.square().mean(-1), **given
    ),
}
PACKED = {name: x.reshape(10, *x.shape[2:]) for name, x in BATCH.items() if x.shape[:2] == (2, 5)}
PACKED |= {
    "advantages": BATCH["advantages"],
    "cu_seqlens": torch.tensor([0, 5, 10], dtype=torch.int32),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_loss_takes_the_same_shapes(loss: Callable[..., Any]) -> None:
    unpacked = {name: x for name, x in BATCH.items() if name != "weight"}
    advantages, logps = BATCH["advantages"], -torch.ones(2, 5)
    for given, fine in (
        (unpacked, {}),
        (unpacked, {"advantages": logps}),
        (PACKED, {}),
        (PACKED, {"advantages": logps.view(10)}),
    ):
        assert loss(**{**given, **fine}).loss.isfinite()
    for given, name, wrong, message in (
        (unpacked, "advantages", advantages[:, None],
         r"\(B,\) = \(2,\) or \(B, T\) = \(2, 5\), got \(2, 1\)"),
        (PACKED, "advantages", advantages[:, None],
         r"\(B,\) = \(2,\) or \(N,\) = \(10,\), got \(2, 1\)"),
        (PACKED, "advantages", logps.view(1, 10),
         r"\(B,\) = \(2,\) or \(N,\) = \(10,\), got \(1, 10\)"),
        (PACKED, "completion_mask", logps.view(1, 10), r".* = \(10,\), got \(1, 10\)"),
        (PACKED, "old_per_token_logps", logps.view(1, 10), r"\(N,\) = \(10,\), got \(1, 10\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: expected shape {message}$"):
            loss(**{**given, name: wrong})
    with pytest.raises(
        ValueError, match=r"expected shape \(N,( H)?\) with cu_seqlens, got \(1, 10(, 4)?\)"
    ):
        loss(**{**PACKED, "hidden": PACKED["hidden"][None]})
    for given, name in (
        (unpacked, "advantages"),
        (unpacked, "completion_mask"),
        (unpacked | {"old_per_token_logps": logps}, "old_per_token_logps"),
        (PACKED, "cu_seqlens"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: expected a tensor, got list$"):
            loss(**{**given, name: given[name].tolist()})


def with_kl(tokens: TokenInputs) -> Tensor:
    ratio = 1.0 if tokens.importance_sampling_ratio is None else tokens.importance_sampling_ratio
    gap = tokens.ref_per_token_logps - tokens.logps
    return -ratio * tokens.advantages * tokens.logps + 0.1 * (gap.exp() - gap - 1)


READING: list[tuple[Callable[[TokenInputs], Tensor], str]] = [
    (with_kl, "ref_per_token_logps"),
    (lambda tokens: tokens.sampling_per_token_logps.exp() * tokens.logps,
     "sampling_per_token_logps"),
    (lambda tokens: torch.exp(tokens.importance_sampling_ratio) * tokens.logps,
     "importance_sampling_ratio"),
]  # fmt: skip


@pytest.mark.parametrize("declare", [lambda x: x, token_level], ids=["", "token_level"])
@pytest.mark.parametrize(("objective", "absent"), READING)
def test_an_objective_that_reads_what_was_not_given(
    objective: Callable[[TokenInputs], Tensor], absent: str, declare: Callable[[Any], Any]
) -> None:
    message = f"NoneType.*; the call was given no .*{absent}"
    with pytest.raises((TypeError, AttributeError), match=message):
        flat(grpo_loss)(**BATCH, objective=declare(objective))
    with pytest.raises((TypeError, AttributeError), match=message):
        policy_loss_from_logps(
            -torch.ones(IDS.shape), torch.ones(IDS.shape), **SHARED, objective=declare(objective)
        )
    there = {"ref_per_token_logps": -torch.ones(IDS.shape)}
    assert flat(grpo_loss)(**BATCH, **there, objective=declare(with_kl)).loss.isfinite()


def test_an_objectives_own_mistake_stays_its_own() -> None:
    def wrong(tokens: TokenInputs) -> Any:
        return tokens.logps + None  # type: ignore[operator]

    with pytest.raises(TypeError, match="NoneType"):
        flat(grpo_loss)(**BATCH, objective=wrong)
    with pytest.raises(RuntimeError, match=r"^The size of tensor a"):
        flat(grpo_loss)(**BATCH, objective=lambda tokens: tokens.logps + torch.ones(99))


@pytest.mark.parametrize(
    "name", ["old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"]
)
def test_probabilities_or_likelihoods_in_the_place_of_log_probabilities(name: str) -> None:
    config = LossConfig(beta=0.1, off_policy_mask_threshold=1.0)
    right = torch.linspace(-3.0, -1.0, 10).view(2, 5)
    masked = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    given = {**BATCH, "ref_per_token_logps": right, "completion_mask": masked, "config": config}
    for wrong in (-right, right.exp()):
        with pytest.raises(
            ValueError, match=rf"^{name}: expected log-probabilities, <= 0 .*, got none below 0"
        ):
            flat(grpo_loss)(**{**given, name: wrong})
    garbage = torch.where(masked == 0, 1e9, right)
    rounded = torch.full((2, 5), 1e-6)  # tokens that are nearly certain
    for fine in (right, garbage, rounded, torch.where(masked == 0, torch.nan, right)):
        assert flat(grpo_loss)(**{**given, name: fine}).loss.isfinite()


ALMOST_RIGHT = [
    (lambda: GRPOLoss(old_logps=IDS),
     "old_logps: expected a field of LossConfig, .* mean old_per_token_logps? It is an argument"),
    (lambda: GRPOLoss(num_items_in_batch=3),
     "num_items_in_batch: .*; it is an argument of the module's call"),
    (lambda: GRPOLoss(epsilon_hi=0.3), "epsilon_hi: .*; did you mean epsilon_high?"),
    (lambda: flat(GRPOLoss())(**BATCH, old_logps=IDS),
     "old_logps: .*; did you mean old_per_token_logps?"),
    (lambda: flat(GRPOLoss())(**BATCH, beta=0.1), "beta: .*; it is a field, as in GRPOLoss"),
    (lambda: GRPOLoss("DAPO"),
     "config: expected a LossConfig, got str; grpo_kernels.presets.DAPO is"),
    (lambda: flat(grpo_loss)(**{**BATCH, "weight": WEIGHT.numpy()}),
     "weight: expected a tensor, got ndarray"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, **SHARED, run="lean"), "run: expected a Run, got str"),
    (lambda: grpo_loss(HIDDEN, nn.Embedding(9, 4), IDS, **SHARED),
     "lm_head: expected an nn.Linear .*Embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ALMOST_RIGHT)
def test_names_that_are_almost_right(call: Callable[[], Any], message: str) -> None:
    parts = [re.escape(part) for part in message.split(".*")]
    with pytest.raises(TypeError, match=f"^{'.*'.join(parts)}"):
        call()


def test_a_name_that_never_was() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'grpo_kernels' has no attribute 'linear_loss'$"
    ):
        grpo_kernels.linear_loss  # noqa: B018


@pytest.mark.parametrize("name", ["gspo", "GSPO", "ppo", "dr-grpo", "gsp"])
def test_a_preset_in_the_place_of_a_loss_type(name: str) -> None:
    with pytest.raises(ValueError, match=r"^loss_type: expected one of grpo, ") as raised:
        GRPOLoss(loss_type=name)  # type: ignore[arg-type]
    named = f"; grpo_kernels.presets.{name.upper().replace('-', '_')} is that loss"
    assert (named in str(raised.value)) == (name != "gsp")


def test_a_bias_of_another_head_than_the_weight_that_is_cut() -> None:
    hidden = torch.ones(2, 3, 4)
    weight = torch.ones(20, 4)
    longer = torch.ones(40, 4)
    bias = torch.zeros(20)
    ids = torch.zeros(2, 3, dtype=torch.long)
    adapter = LoRA(torch.ones(2, 4), torch.ones(20, 2))
    for name, shape, call in (
        ("teacher_bias", "(20,)",
         lambda: linear_divergence(hidden, weight, hidden, Head(longer, bias))),
        ("bias", "(20,)", lambda: linear_logprob(hidden, Head(longer, bias, vocab_size=20), ids)),
        ("lora.b", "(20, 2)",
         lambda: linear_logprob(hidden, Head(longer, lora=adapter, vocab_size=20), ids)),
    ):  # fmt: skip
        message = f"{name}: expected a row for each of the 40 of weight, got shape {shape}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()
    linear_logprob(hidden, Head(longer, torch.zeros(40), vocab_size=20), ids)


def test_the_calls_take_fields_as_the_module_does() -> None:
    """Those of a config that is given are replaced."""
    config, logps = LossConfig(loss_type="grpo", beta=0.04), torch.zeros(IDS.shape)
    ref = {"ref_per_token_logps": torch.full(IDS.shape, -2.0)}
    for call in (
        lambda **more: flat(grpo_loss)(**BATCH, **ref, **more),
        lambda **more: grpo_loss(HIDDEN, HEAD, IDS, **SHARED, **ref, **more),
        lambda **more: policy_loss_from_logps(logps, logps, **SHARED, **ref, **more),
    ):
        want = call(config=config).loss
        assert call(loss_type="grpo", beta=0.04).loss == want
        assert call(config=LossConfig(loss_type="dapo", beta=0.04), loss_type="grpo").loss == want
        assert call(loss_type="grpo").loss != want


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("old_logps", "old_per_token_logps"), ("ref_logprobs", "ref_per_token_logps"),
        ("entropy_coeff", "entropy_coef"),
        ("loss_typ", "loss_type"), ("num_items", "num_items_in_batch"), ("cu_seqlen", "cu_seqlens"),
    ],
)  # fmt: skip
def test_misspelt_names_are_answered_with_ours(name: str, meant: str) -> None:
    for call, function in (
        (lambda **more: flat(grpo_loss)(**BATCH, **more), "grpo_loss"),
        (lambda **x: policy_loss_from_logps(torch.zeros(2, 5), torch.zeros(2, 5), **SHARED, **x),
         "policy_loss_from_logps"),
    ):  # fmt: skip
        with pytest.raises(
            TypeError,
            match=rf"^{name}: expected an argument of {function} .* did you mean {meant}\?",
        ):
            call(**{name: 0.1})


def test_results_are_taken_by_name() -> None:
    scores = linear_logprob(HIDDEN, WEIGHT, IDS)
    with pytest.raises(
        TypeError, match=r"expected a result by its name, \.logps, \.entropies, got \[0\]"
    ):
        scores[0]
    with pytest.raises(TypeError, match=r"\.logps"):
        _logps, _ = scores  # type: ignore[misc]
