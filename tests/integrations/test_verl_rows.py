"""verl's engine, told which rows count and which gradient to expect: operations counted, against verl's own head.

N is the number of response tokens that count, V the vocabulary, H the width; 2NVH is one product of those rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("verl")

from grpo_kernels.integrations.verl import losses
from tests.support import verl_engine
from tests.support.verl_engine import HIDDEN, VOCAB, Step, config, gap, ppo_loss, run
from tests.support.verl_peer import verl_module

OURS = {"impl_backend": "grpo_kernels"}
BYPASS = {"rollout_is": "token", "rollout_is_threshold": 1.1, "loss_type": "reinforce"}
CLIPPED = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


@functools.cache
def batch(**options: Any) -> Any:
    return verl_engine.batch(**options)


def share(data: Any) -> float:
    """The share of the counted tokens that have an advantage and a weight."""
    counted = data["response_mask"] != 0
    live = counted & (data["advantages"] != 0)
    if "rollout_is_weights" in data.keys():  # noqa: SIM118
        live &= data["rollout_is_weights"] != 0
    return float(live.sum() / counted.sum())


def nvh(step: Step, data: Any) -> float:
    return step.products.head / (int(data["response_mask"].sum()) * VOCAB * HIDDEN)


def both(data: Any, loss: Any, **flags: Any) -> tuple[Step, Step]:
    """One mini-batch with verl's unfused head, and with ours."""
    steps = []
    for options in (None, OURS):
        torch.manual_seed(0)  # clip_cov draws
        steps.append(run(options, data, loss, **flags))
    unfused, ours = steps
    assert ours.loss == pytest.approx(unfused.loss, abs=3e-7)
    assert gap(ours, unfused) < 2e-6
    reduce = verl_module("utils.metric").reduce_metrics
    want, got = (reduce(dict(x.metrics)) for x in steps)
    assert {name: float(x) for name, x in got.items()} == pytest.approx(
        {name: float(x) for name, x in want.items()}, rel=1e-4, abs=1e-6
    )
    return unfused, ours


ENTROPY = {"calculate_entropy": True}
# name -> (configuration, mini-batch, flags of verl, whether rows without advantage are known to have no gradient)
TOKEN_BY_TOKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]] = {
    "vanilla": ({}, {}, {}, True),
    "seq-mean-token-mean": ({"loss_agg_mode": "seq-mean-token-mean"}, {}, {}, True),
    "dr_grpo": ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}, {}, {}, True),
    "tools": ({}, {"tools": True}, {}, True),
    "rollout_is": ({}, {"weights": True}, {}, True),
    "bypass": ({"mode": "bypass_mode", "correction": BYPASS}, {}, {}, True),
    "bypass, clipped": ({"mode": "bypass_mode", "correction": CLIPPED}, {}, {}, True),
    **{mode: ({"mode": mode}, {}, {}, True) for mode in ("cispo", "dppo_tv", "dppo_kl", "sapo", "gpg")},
    "dro": ({"mode": "dro"}, {}, {}, False),
    "kl": ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {}, {}, False),
    "entropy, seq-mean": ({"entropy_coeff": 0.01, "loss_agg_mode": "seq-mean-token-mean"}, {}, ENTROPY, False),
    "entropy, as a metric": ({}, {}, ENTROPY, True),
}


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_the_gradient_is_foreseen(name: str) -> None:
    """2 + 4s products of V H, where verl's own way takes 6 of all tokens, prompts too."""
    options, made, flags, silent = TOKEN_BY_TOKEN[name]
    data = batch(**made)
    unfused, ours = both(data, ppo_loss(config(**options)), **flags)
    tokens = data["input_ids"].values().numel() / int(data["response_mask"].sum())
    assert nvh(unfused, data) == pytest.approx(6 * tokens)
    assert nvh(ours, data) == pytest.approx(2 + 4 * (share(data) if silent else 1))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
        *({"mode": mode} for mode in ("geo_mean", "clip_cov", "kl_cov")),
        {"mode": "bypass_mode", "correction": {**BYPASS, "rollout_is": "sequence"}},
        {"mode": "bypass_mode", "correction": {**BYPASS, "rollout_is_batch_normalize": True}},
    ],
    ids=lambda options: options["mode"],
)
def test_a_loss_that_reads_all_tokens_first(options: dict[str, Any]) -> None:
    """The rows that count, forward, and those with a gradient again in the backward: at most 2 + 6s."""
    data = batch()
    ours = both(data, ppo_loss(config(**options)))[1]
    assert 2 + 4 * share(data) < nvh(ours, data) <= 2 + 6 * share(data) + 1e-9


def test_all_tokens_live() -> None:
    data = batch(dead=torch.zeros(8, dtype=torch.bool))
    assert nvh(both(data, ppo_loss(config()))[1], data) == pytest.approx(6)


def test_bf16_autocast() -> None:
    """As verl trains: the same products, and a gradient nearer to that of fp32, since the logits are not rounded."""

    def narrow(engine: Any) -> None:
        engine._autocast_dtype = torch.bfloat16

    data, loss = batch(), ppo_loss(config())
    want = run(None, data, loss)
    unfused, ours = (run(options, data, loss, prepare=narrow) for options in (None, OURS))
    assert nvh(ours, data) == pytest.approx(2 + 4 * share(data))
    assert gap(ours, want) < 0.02 < gap(unfused, want)


def test_lora() -> None:
    """The head is frozen: 2 + 2s."""
    pytest.importorskip("peft")
    data = batch()
    unfused, ours = both(data, ppo_loss(config()), adapter=True)
    tokens = data["input_ids"].values().numel() / int(data["response_mask"].sum())
    assert nvh(unfused, data) == pytest.approx(4 * tokens)
    assert nvh(ours, data) == pytest.approx(2 + 2 * share(data))
    assert all("lora" in name for name in ours.gradients)


@pytest.mark.parametrize(
    "flags",
    [{"micro": 4}, {"use_dynamic_bsz": True}, {"use_remove_padding": False}, {"use_remove_padding": False, "micro": 2}],
    ids=str,
)
@pytest.mark.parametrize("jagged", [False, True], ids=["padded", "jagged"])
def test_layouts(flags: dict[str, Any], jagged: bool) -> None:
    """Micro-batches, dynamic ones, padded inputs of the model; and responses with and without padding."""
    data = batch()
    given = verl_engine.nested(data) if jagged else data
    assert nvh(both(given, ppo_loss(config()), **flags)[1], data) == pytest.approx(2 + 4 * share(data))


def test_static_padding() -> None:
    """verl's `pad_to_length` pads the packed row, and what is padded does not count."""

    def padded(engine: Any) -> None:
        engine.pad_to_length, engine.pad_to_length_bucket = True, 64

    data = batch()
    assert data["input_ids"].values().numel() % 64
    ours = both(data, ppo_loss(config()), prepare=padded)[1]
    assert nvh(ours, data) == pytest.approx(2 + 4 * share(data))


@pytest.mark.parametrize("tools", [False, True])
def test_compute_log_prob(tools: bool) -> None:
    """verl's log-probabilities of old and reference policy: one product of the rows that count."""
    data = batch(tools=tools).exclude("old_log_probs", "advantages")
    flags = {"forward_only": True, "calculate_entropy": True}
    unfused, ours = (run(options, data, None, **flags) for options in (None, OURS))
    assert nvh(ours, data) == 2 < nvh(unfused, data)
    mask = data["response_mask"] != 0
    for name, x in ours.model_output.items():
        got, want = (
            verl_module("workers.utils.padding").no_padding_2_padding(y, data) for y in (x, unfused.model_output[name])
        )
        torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=2e-6)
        assert not got[~mask].any()


def test_sft() -> None:
    """verl's supervised loss has a mask over whole sequences, and no advantages."""
    data = batch()
    mask = torch.nested.nested_tensor_from_jagged(
        (torch.arange(data["input_ids"].values().numel()) % 3 == 0).long(), data["input_ids"].offsets()
    )
    given = data.select("input_ids", "position_ids")
    given["loss_mask"] = mask
    loss = functools.partial(verl_module("workers.utils.losses").sft_loss, config=None)
    unfused, ours = run(None, given, loss), run(OURS, given, loss)
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert gap(ours, unfused) < 2e-6
    assert ours.products.head == 6 * VOCAB * HIDDEN * int(mask.values().sum())


def test_what_another_may_read_is_computed() -> None:
    """An unknown loss, and a caller that wants the log-probabilities back (verl's Tinker worker), get all of them."""
    data = batch()
    theirs = ppo_loss(config())

    def prompts_too(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = theirs(model_output=model_output, data=data, dp_group=dp_group)
        return loss + 0.1 * model_output["log_probs"].values().mean(), metrics

    tokens = data["input_ids"].values().numel() / int(data["response_mask"].sum())
    unfused, ours = both(data, functools.partial(prompts_too))
    assert nvh(ours, data) == pytest.approx(8 * tokens)
    unfused, ours = both(data, theirs, return_model_output=True)
    torch.testing.assert_close(
        ours.model_output["log_probs"].values(), unfused.model_output["log_probs"].values(), rtol=1e-5, atol=2e-6
    )


def test_a_wrong_expectation_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.MODES, "dro", losses.MODES["vanilla"])  # but it has a gradient without an advantage
    data = batch()
    assert nvh(both(data, ppo_loss(config("dro")))[1], data) > 6


def test_verls_own_heads_are_left_alone() -> None:
    data = batch()
    steps = [run(options, data, ppo_loss(config()), strategy=None) for options in (None, {"impl_backend": "torch"})]
    assert gap(steps[1], steps[0]) < 2e-6
    assert nvh(steps[1], data) > nvh(steps[0], data)
