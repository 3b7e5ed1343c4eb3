"""verl's `zero_advantage=score`: what is refused, what the guard finds; on two ranks: `test_verl_ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("verl")

from grpo_kernels.integrations.verl import losses
from tests.support import verl_engine
from tests.support.verl_engine import config, gap, ppo_loss, run

OURS = {"impl_backend": "grpo_kernels"}
SCORE = OURS | {"zero_advantage": "score"}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


@pytest.mark.parametrize(
    ("options", "flags", "reason"),
    [
        ({"use_kl_loss": True}, {}, "with a KL or entropy term"),
        ({"entropy_coeff": 0.01}, {"calculate_entropy": True}, "with a KL or entropy term"),
        ({"mode": "dro"}, {}, "with loss_mode=dro"),
        ({"mode": "kl_cov"}, {}, "with loss_mode=kl_cov"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, {}, "without loss_scale_factor"),
        ({}, {"return_model_output": True}, "with return_model_output"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"zero_advantage: expected 'train' .*{reason}.*, got 'score'"):
        run(SCORE, verl_engine.batch(), ppo_loss(config(**options)), **flags)


def test_another_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="with another loss than ppo_loss"):
        run(SCORE, verl_engine.batch(), lambda **_: None)


def test_names_and_values() -> None:
    data, loss = verl_engine.batch(), ppo_loss(config())
    with pytest.raises(ValueError, match="zero_advantage: expected one of 'train', 'score', got 'skip'"):
        run(OURS | {"zero_advantage": "skip"}, data, loss)
    with pytest.raises(ValueError, match="expected impl_backend and zero_advantage, got zero_advantages"):
        run(OURS | {"zero_advantages": "score"}, data, loss)
    train = run(OURS | {"zero_advantage": "train"}, data, loss, micro=2)
    assert train.products.all == run(OURS, data, loss, micro=2).products.all
    assert run(SCORE, data, None, forward_only=True).model_output["log_probs"].values().any()


@pytest.mark.parametrize("mode", ["gspo", "cispo"])
@pytest.mark.parametrize("dead", ["half", "all", "none"])
def test_the_gradient_stays(mode: str, dead: str) -> None:
    """Also where no sequence has a gradient, or all have: then nothing is saved but what the head saves."""
    silent = {"half": torch.arange(8) % 2 == 0, "all": torch.arange(8) >= 0, "none": torch.arange(8) < 0}[dead]
    data, loss = verl_engine.batch(dead=silent), ppo_loss(config(mode, loss_agg_mode="seq-mean-token-mean"))
    unfused, score = (run(options, data, loss, micro=2, layers=2) for options in (None, SCORE))
    assert score.loss == pytest.approx(unfused.loss, abs=1e-6)  # of up to 5, in fp32
    if dead != "all":
        assert gap(score, unfused) < 2e-6
    else:
        assert score.gradients.keys() == unfused.gradients.keys()
        assert not any(x.any() for x in score.gradients.values())
    tokens = data["input_ids"].values().numel()
    ours = run(OURS, data, loss, micro=2, layers=2)
    got, usual = (x.products.all - x.products.head for x in (score, ours))
    graph = verl_engine.tokens_with_graph(data, 2)
    assert graph == tokens if dead == "none" else graph < tokens
    assert got / usual == pytest.approx((tokens + 2 * graph) / (3 * tokens))


def test_weights_of_0_count_as_no_advantage() -> None:
    data = verl_engine.batch(dead=torch.zeros(8, dtype=torch.bool))
    data["rollout_is_weights"] = (torch.arange(8) % 2).float()[:, None].expand(8, verl_engine.RESPONSE).contiguous()
    loss = ppo_loss(config())
    unfused, ours, score = (run(options, data, loss, micro=2, layers=2) for options in (None, OURS, SCORE))
    assert gap(score, unfused) < 2e-6
    assert score.products.all < 0.75 * ours.products.all


def test_a_gradient_that_was_not_foreseen_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.MODES, "dro", losses.MODES["vanilla"])  # but it has a gradient without an advantage
    data, loss = verl_engine.batch(), ppo_loss(config("dro"))
    unfused = run(None, data, loss, micro=2)
    with pytest.warns(RuntimeWarning, match="zero_advantage: expected no gradient where all advantages are 0"):
        score = run(SCORE, data, loss, micro=2)
    assert gap(score, unfused) < 2e-6
