"""verl's engine, told which rows count and which gradient to expect: operations counted, against
verl's own head.

N is the number of response tokens that count, V the vocabulary, H the width; 2NVH is one product of
those rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("verl")

from grpo_kernels.verl import rows
from tests.support import verl_engine
from tests.support.verl_engine import (
    AS_GIVEN,
    HIDDEN,
    OURS,
    SCORE,
    VOCAB,
    Step,
    config,
    gap,
    ppo_loss,
    run,
)
from tests.support.verl_peer import verl_module

pytestmark = pytest.mark.unit

BYPASS = {"rollout_is": "token", "rollout_is_threshold": 1.1, "loss_type": "reinforce"}
CLIPPED = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}
SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
ENTROPY = {"calculate_entropy": True}
PADDED = {"use_remove_padding": False}


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
    want, got = (
        {name: float(x) for name, x in reduce(dict(step.metrics)).items()} for step in steps
    )
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    return unfused, ours


def padded_rows(engine: Any) -> None:
    """verl's `pad_to_length` pads the packed row, and what is padded does not count."""
    engine.pad_to_length, engine.pad_to_length_bucket = True, 64


@dataclass(frozen=True)
class Scene:
    """One step of verl's engine, and how many products of V H it takes where a share s of the
    tokens is live."""

    config: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    products: str = "2 + 4s"
    jagged: bool = False  # responses without padding
    padded: bool = False  # what verl projects


SCENES = {
    "vanilla": Scene(),
    "seq-mean-token-mean": Scene(SEQ_MEAN),
    "dr_grpo": Scene({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}),
    "tools": Scene(batch={"tools": True}),
    "rollout_is": Scene(batch={"weights": True}),
    "bypass": Scene({"mode": "bypass_mode", "correction": BYPASS}),
    "bypass, clipped": Scene({"mode": "bypass_mode", "correction": CLIPPED}),
    **{mode: Scene({"mode": mode}) for mode in ("cispo", "dppo_tv", "dppo_kl", "sapo", "gpg")},
    "entropy, as a metric": Scene(flags=ENTROPY),
    # rows without advantage have a gradient
    "dro": Scene({"mode": "dro"}, products="6"),
    "kl": Scene({"use_kl_loss": True, "kl_loss_coef": 0.01}, products="6"),
    "entropy, seq-mean": Scene({"entropy_coeff": 0.01, **SEQ_MEAN}, {}, ENTROPY, "6"),
    "all tokens live": Scene(batch={"dead": 0}, products="6"),
    # losses that read all tokens first: the rows that count, and those with a gradient again in the
    # backward
    "gspo": Scene(
        {"mode": "gspo", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04, **SEQ_MEAN},
        products="2 + 6s",
    ),
    **{
        mode: Scene({"mode": mode}, products="2 + 6s")
        for mode in ("geo_mean", "clip_cov", "kl_cov")
    },
    **{
        f"bypass, {name} {value}": Scene(
            {"mode": "bypass_mode", "correction": {**BYPASS, name: value}}, products="2 + 6s"
        )
        for name, value in (("rollout_is", "sequence"), ("rollout_is_batch_normalize", True))
    },
    # layouts: micro-batches, dynamic ones, padded inputs of the model
    "micro-batches, jagged": Scene(flags={"micro": 4}, jagged=True),
    "dynamic": Scene(flags={"use_dynamic_bsz": True}),
    "padded inputs": Scene(flags=PADDED, padded=True),
    "padded inputs, micro-batches, jagged": Scene(
        flags={**PADDED, "micro": 2}, padded=True, jagged=True
    ),
    "padded rows": Scene(flags={"prepare": padded_rows}, padded=True),
}


@pytest.mark.parametrize("name", SCENES)
def test_the_gradient_is_foreseen(name: str) -> None:
    """verl's own way takes 6 products of all tokens, prompts too, and of padding."""
    scene = SCENES[name]
    data = batch(**scene.batch)
    given = verl_engine.nested(data) if scene.jagged else data
    unfused, ours = both(given, ppo_loss(config(**scene.config)), **scene.flags)
    s, tokens = share(data), data["input_ids"].values().numel() / int(data["response_mask"].sum())
    theirs = nvh(unfused, data)
    assert theirs > 6 * tokens if scene.padded else theirs == pytest.approx(6 * tokens)
    done, exact = nvh(ours, data), {"6": 6, "2 + 4s": 2 + 4 * s}
    if scene.products in exact:
        assert done == pytest.approx(exact[scene.products])
    else:
        assert 2 + 4 * s < done <= 2 + 6 * s + 1e-9


def test_bf16_autocast() -> None:
    """As verl trains: the same products, and a gradient nearer to that of fp32, since the logits
    are not rounded."""

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


@pytest.mark.parametrize("tools", [False, True])
def test_compute_log_prob(tools: bool) -> None:
    """verl's log-probabilities of old and reference policy: one product of the rows that count."""
    data = batch(tools=tools).exclude("old_log_probs", "advantages")
    unfused, ours = (
        run(options, data, None, forward_only=True, **ENTROPY) for options in (None, OURS)
    )
    assert nvh(ours, data) == 2 < nvh(unfused, data)
    mask = data["response_mask"] != 0
    padded = verl_module("workers.utils.padding").no_padding_2_padding
    for name, x in ours.model_output.items():
        got, want = padded(x, data), padded(unfused.model_output[name], data)
        torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=2e-6)
        assert not got[~mask].any()


def test_sft() -> None:
    """verl's supervised loss has a mask over whole sequences, and no advantages."""
    data = batch().select("input_ids", "position_ids")
    ids = data["input_ids"]
    mask = (torch.arange(ids.values().numel()) % 3 == 0).long()
    data["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask, ids.offsets())
    loss = functools.partial(verl_module("workers.utils.losses").sft_loss, config=None)
    unfused, ours = run(None, data, loss), run(OURS, data, loss)
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert gap(ours, unfused) < 2e-6
    assert ours.products.head == 6 * VOCAB * HIDDEN * int(mask.sum())


def test_what_another_may_read_is_computed() -> None:
    """An unknown loss, and a caller that wants the log-probabilities back (verl's Tinker worker),
    get all of them."""
    data, theirs = batch(), ppo_loss(config())

    def prompts_too(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = theirs(model_output=model_output, data=data, dp_group=dp_group)
        return loss + 0.1 * model_output["log_probs"].values().mean(), metrics

    tokens = data["input_ids"].values().numel() / int(data["response_mask"].sum())
    assert nvh(both(data, functools.partial(prompts_too))[1], data) == pytest.approx(8 * tokens)
    got, want = (
        step.model_output["log_probs"].values()
        for step in both(data, theirs, return_model_output=True)
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_a_wrong_expectation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs time alone; with `zero_advantage=score` the guard says so."""
    # but it has a gradient without an advantage
    monkeypatch.setitem(rows.MODES, "dro", rows.MODES["vanilla"])
    data, loss = batch(), ppo_loss(config("dro"))
    unfused, ours = both(data, loss, micro=2)
    assert nvh(ours, data) > 6
    with pytest.warns(
        RuntimeWarning, match="zero_advantage: expected no gradient where all advantages are 0"
    ):
        score = run(SCORE, data, loss, micro=2)
    assert gap(score, unfused) < 2e-6


def test_verls_own_heads_are_left_alone() -> None:
    data = batch()
    steps = [
        run(options, data, ppo_loss(config()), strategy=None)
        for options in (None, {"impl_backend": "torch"})
    ]
    assert gap(steps[1], steps[0]) < 2e-6
    assert nvh(steps[1], data) > nvh(steps[0], data)


@pytest.mark.parametrize(
    ("options", "flags", "reason"),
    [
        ({"use_kl_loss": True}, {}, "with a KL or entropy term"),
        ({"entropy_coeff": 0.01}, ENTROPY, "with a KL or entropy term"),
        ({"mode": "dro"}, {}, "with loss_mode=dro"),
        ({"mode": "kl_cov"}, {}, "with loss_mode=kl_cov"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, {}, "without loss_scale_factor"),
        ({}, {"return_model_output": True}, "with return_model_output"),
        (None, {}, "with another loss than ppo_loss"),
    ],
    ids=str,
)
def test_zero_advantage_is_refused(
    options: dict[str, Any] | None, flags: dict[str, Any], reason: str
) -> None:
    loss = (lambda **_: None) if options is None else ppo_loss(config(**options))
    with pytest.raises(
        ValueError, match=rf"zero_advantage: expected 'train' .*{reason}.*, got 'score'"
    ):
        run(SCORE, batch(), loss, **flags)


def test_names_and_values_of_zero_advantage() -> None:
    data, loss = batch(), ppo_loss(config())
    with pytest.raises(
        ValueError, match="zero_advantage: expected one of 'train', 'score', got 'skip'"
    ):
        run(OURS | {"zero_advantage": "skip"}, data, loss)
    with pytest.raises(
        ValueError, match="zero_advantage, layout and old_logprobs, got zero_advantages"
    ):
        run(OURS | {"zero_advantages": "score"}, data, loss)
    with pytest.raises(ValueError, match="layout: expected one of 'tree', 'trim', 'padded', got"):
        run(OURS | {"layout": "packed"}, data, loss)
    train = run(OURS | {"zero_advantage": "train"}, data, loss, micro=2)
    assert train.products.all == run(OURS, data, loss, micro=2).products.all
    assert run(SCORE, data, None, forward_only=True).model_output["log_probs"].values().any()


@pytest.mark.parametrize(
    ("dead", "mode"), [("half", "gspo"), ("half", "cispo"), ("all", "gspo"), ("none", "cispo")]
)
def test_the_gradient_stays_with_zero_advantage(dead: str, mode: str) -> None:
    """Also where no sequence has a gradient, or all have: then nothing is saved but what the head
    saves."""
    silent: Any = {"half": torch.arange(8) % 2 == 0, "all": 8, "none": 0}[dead]
    data, loss = verl_engine.batch(dead=silent), ppo_loss(config(mode, **SEQ_MEAN))
    unfused, ours, score = (
        run(options, data, loss, micro=2, layers=2)
        for options in (None, OURS | AS_GIVEN, SCORE | AS_GIVEN)
    )
    assert score.loss == pytest.approx(unfused.loss, abs=1e-6)  # of up to 5, in fp32
    if dead != "all":
        assert gap(score, unfused) < 2e-6
    else:
        assert score.gradients.keys() == unfused.gradients.keys()
        assert not any(x.any() for x in score.gradients.values())
    tokens, graph = data["input_ids"].values().numel(), verl_engine.tokens_with_graph(data, 2)
    assert graph == tokens if dead == "none" else graph < tokens
    got, usual = (x.products.all - x.products.head for x in (score, ours))
    assert got / usual == pytest.approx((tokens + 2 * graph) / (3 * tokens))


def test_weights_of_0_count_as_no_advantage() -> None:
    data = batch(dead=0).clone()
    data["rollout_is_weights"] = (
        (torch.arange(8) % 2).float()[:, None].expand(8, verl_engine.RESPONSE).contiguous()
    )
    unfused, ours, score = (
        run(x, data, ppo_loss(config()), micro=2, layers=2)
        for x in (None, OURS | AS_GIVEN, SCORE | AS_GIVEN)
    )
    assert gap(score, unfused) < 2e-6
    assert score.products.all < 0.75 * ours.products.all
