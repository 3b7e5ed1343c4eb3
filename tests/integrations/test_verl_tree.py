"""verl's engine with prompts computed once: losses, gradients and metrics against verl's own
forward, and the tokens that are computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers.integrations.flash_attention as flash_integration

pytest.importorskip("verl")

from grpo_kernels.base.checks import warn_once
from tests.support import verl_engine, verl_peer
from tests.support.flash_attention import flash_attention, set_attention
from tests.support.verl_engine import AS_GIVEN, OURS, SCORE, Step, config, gap, ppo_loss, run
from tests.support.verl_peer import verl_module

pytestmark = pytest.mark.unit

SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
ENTROPY = {"calculate_entropy": True}
BYPASS = {"rollout_is": "token", "rollout_is_threshold": 1.1, "loss_type": "reinforce"}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


@functools.cache
def batch(**options: Any) -> Any:
    """Two prompts, four responses of each, scattered."""
    return verl_engine.batch(group=4, **options)


def tree_tokens(data: Any, *parts: list[int]) -> int:
    """Distinct tokens of micro-batches, without the responses' last ones."""
    found = 0
    rows, lengths = data["input_ids"].unbind(), data["response_mask"].sum(1).tolist()
    for part in parts or [[*range(len(data))]]:
        prompts = {tuple(rows[i].tolist()[: len(rows[i]) - lengths[i]]) for i in part}
        found += sum(map(len, prompts)) + sum(lengths[i] - 1 for i in part)
    return found


def metrics_of(step: Step) -> dict[str, float]:
    reduced = verl_module("utils.metric").reduce_metrics(dict(step.metrics))
    return {name: float(x) for name, x in reduced.items()}


def both(data: Any, loss: Any, options: Any = OURS, **flags: Any) -> tuple[Step, Step]:
    steps = []
    for one in (None, options):
        torch.manual_seed(0)  # clip_cov draws
        steps.append(run(one, data, loss, tried=one is not None, **flags))
    unfused, ours = steps
    assert ours.loss == pytest.approx(unfused.loss, abs=1e-6)
    assert gap(ours, unfused) < 3e-6
    assert metrics_of(ours) == pytest.approx(metrics_of(unfused), rel=1e-5, abs=1e-6)
    return unfused, ours


SCENES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla": ({}, {}),
    "dr_grpo": ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}, {}),
    "bypass": ({"mode": "bypass_mode", "correction": BYPASS}, {}),
    **{mode: ({"mode": mode}, {}) for mode in ("cispo", "dppo_tv", "dro", "gpg", "sapo")},
    "gspo": ({"mode": "gspo", **SEQ_MEAN}, {}),
    "kl": ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {}),
    "entropy": ({"entropy_coeff": 0.01, **SEQ_MEAN}, ENTROPY),
    "padded inputs": ({}, {"use_remove_padding": False}),
    **{mode: ({"mode": mode}, {}) for mode in ("geo_mean", "clip_cov", "kl_cov")},
}


@pytest.mark.parametrize("name", SCENES)
def test_one_micro_batch(name: str) -> None:
    """All losses, also those that read it as a whole."""
    options, flags = SCENES[name]
    data = batch()
    unfused, ours = both(data, ppo_loss(config(**options)), **flags)
    assert unfused.products.tokens >= data["input_ids"].values().numel()
    assert ours.products.tokens == tree_tokens(data)


@pytest.mark.parametrize("name", ["vanilla", "bypass", "gspo", "kl", "entropy", "padded inputs"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_responses_of_a_prompt_come_together(name: str, kind: str) -> None:
    """Metrics are of verl's micro-batches."""
    options, flags = SCENES[name]
    data, prompt = batch(), [[0, 2, 4, 6], [1, 3, 5, 7]]
    more = {"micro": 4} if kind == "static" else {"use_dynamic_bsz": True}
    ours = both(data, ppo_loss(config(**options)), **flags, **more)[1]
    assert ours.products.tokens == tree_tokens(data, *prompt)


@pytest.mark.parametrize("dead", ["half", "all"])
@pytest.mark.parametrize("more", [{"micro": 2}, {"use_dynamic_bsz": True}], ids=str)
def test_sequences_without_gradient(dead: str, more: dict[str, Any]) -> None:
    """Groups with equal rewards have micro-batches of their own."""
    data = batch(dead=torch.arange(8) % 2 == 0 if dead == "half" else 8)
    if dead == "all":  # gradients are 0
        score = run(SCORE, data, ppo_loss(config()), tried=True, **more)
        assert not any(x.any() for x in score.gradients.values())
    else:
        score = both(data, ppo_loss(config()), SCORE, **more)[1]
        parts = (
            [[0, 2], [4, 6], [1, 3], [5, 7]] if "micro" in more else [[0, 2, 4, 6], [1, 3, 5, 7]]
        )
        assert score.products.tokens == tree_tokens(data, *parts)


@pytest.mark.parametrize("more", [{"micro": 2}, {"use_dynamic_bsz": True}], ids=str)
def test_log_probabilities_go_back_in_verls_order(more: dict[str, Any]) -> None:
    data = batch().exclude("old_log_probs", "advantages")
    flags = {"forward_only": True, **ENTROPY, **more}
    unfused, ours = run(None, data, None, **flags), run(OURS, data, None, tried=True, **flags)
    assert ours.products.tokens < 0.9 * unfused.products.tokens
    mask = data["response_mask"] != 0
    padded = verl_module("workers.utils.padding").no_padding_2_padding
    for name, x in ours.model_output.items():
        got, want = padded(x, data), padded(unfused.model_output[name], data)
        torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=3e-6)


def test_what_depends_on_its_micro_batch_stays() -> None:
    """The losses that read a micro-batch as a whole, and losses of others."""
    data, theirs = batch(), ppo_loss(config())

    def mine(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return theirs(model_output=model_output, data=data, dp_group=dp_group)

    losses = {
        "kl_cov": ppo_loss(config("kl_cov")),
        "width": ppo_loss(config(loss_agg_mode="seq-mean-token-sum-norm")),
        "mine": functools.partial(mine),
    }
    for name, loss in losses.items():
        ours = both(data, loss, micro=4)[1]
        halves = tree_tokens(data, [0, 1, 2, 3], [4, 5, 6, 7])
        assert ours.products.tokens == halves or (name == "mine" and ours.products.tokens > halves)


def test_padding_of_packed_rows() -> None:
    """verl's `pad_to_length`: what is padded is not computed."""

    def wide(engine: Any) -> None:
        engine.pad_to_length, engine.pad_to_length_bucket = True, 64

    data = batch()
    unfused, ours = both(data, ppo_loss(config()), prepare=wide)
    assert ours.products.tokens == tree_tokens(data) and unfused.products.tokens % 64 == 0


def test_flash_attention_as_verl_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl puts its own function in front of it, for Ulysses, wherever rows are packed."""
    theirs = verl_peer.monkey_patch()._ulysses_flash_attention_forward
    with flash_attention(monkeypatch):
        monkeypatch.setattr(flash_integration, "_flash_attention_forward", theirs)

        def flash(engine: Any) -> None:
            set_attention(engine.module, "flash_attention_2")

        data = batch()
        ours = both(data, ppo_loss(config()), prepare=flash)[1]
        assert ours.products.tokens == tree_tokens(data)


def test_lora_and_layers_that_are_recomputed() -> None:
    pytest.importorskip("peft")

    def recompute(engine: Any) -> None:
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        engine.module.train()

    data = batch()
    _, ours = both(data, ppo_loss(config()), adapter=True, prepare=recompute, strategy=None)
    assert ours.products.tokens == tree_tokens(data)


def test_ulysses_runs_as_given_and_says_so() -> None:
    data = batch()
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="layout=tree: Ulysses divides sequences"):
        ours = run(
            OURS, data, ppo_loss(config()), prepare=verl_engine.divided_by_ulysses, strategy=None
        )
    verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(None)
    assert ours.products.tokens == data["input_ids"].values().numel()


def test_as_given() -> None:
    data = batch()
    unfused, ours = both(data, ppo_loss(config()), OURS | AS_GIVEN, micro=4)
    assert ours.products.tokens == unfused.products.tokens == data["input_ids"].values().numel()
