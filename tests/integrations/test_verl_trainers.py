"""verl's trainers: they leave the scoring of the old policy to the update, against themselves with
``old_logprobs=score``; responses of a prompt come to one rank, in the optimizer steps of verl."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("verl")
pytest.importorskip("ray")

import numpy as np

from grpo_kernels.verl import patch_verl, trainers, unpatch_verl
from tests.support import verl_engine, verl_peer, verl_trainer
from tests.support.ranks import run_ranks
from tests.support.verl_engine import OURS, SCORE
from tests.support.verl_peer import verl_module
from tests.support.verl_trainer import train

pytestmark = pytest.mark.unit

OLD = "old_log_probs"
SCORED = {"old_logprobs": "score"}
# of a clock, of the machine, or of a scoring that does not run
OTHER = ("timing_", "perf/", "actor/perf/")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    trainers._say.cache_clear()
    unpatch_verl()
    yield
    unpatch_verl()


def logged(step: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in step.items() if not name.startswith(OTHER)}


def check_same(auto: Any, score: Any) -> None:
    assert len(auto.metrics) == len(score.metrics) == 2
    for got, want in zip(auto.metrics, score.metrics, strict=True):
        assert logged(got) == pytest.approx(logged(want), rel=1e-6, abs=1e-6)
    for got, want in zip(auto.batches, score.batches, strict=True):
        pair = ((x.values() if x.is_nested else x) for x in (got[OLD], want[OLD]))
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(auto.weights, score.weights, rtol=0, atol=1e-7)


def reference(trainer: Any) -> None:
    """The policy itself, as its own reference: by the call that also scores the old policy."""
    workers = trainer.actor_rollout_wg
    trainer.use_reference_policy = True
    trainer.ref_policy_wg = SimpleNamespace(compute_ref_log_prob=workers.compute_log_prob)


def actor(**changes: Any) -> dict[str, Any]:
    return {f"actor_rollout_ref__actor__{name}": x for name, x in changes.items()}


SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
DR_GRPO = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 40}
# of the run, and of verl's configuration
SCENES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "gspo": actor(**SEQ_MEAN, policy_loss__loss_mode="gspo"),
    "cispo": actor(policy_loss__loss_mode="cispo"),
    "entropy": actor(entropy_coeff=0.01),
    "entropy, as a metric": actor(calculate_entropy=True),
    "kl": {"change": reference, **actor(use_kl_loss=True, kl_loss_coef=0.1)},
    "dynamic batches": actor(use_dynamic_bsz=True),
    "without a sampler's": {"sampled": False},
    "dr_grpo": actor(**DR_GRPO),
    "zero_advantage": {"options": SCORE},
    "fsdp": {"strategy": "fsdp"},
}
BOTH = [*((name, True) for name in SCENES), ("token-mean", False), ("kl", False), ("fsdp", False)]
# what `make test` runs of them: each trainer, a term besides, other micro-batches
QUICK = [("token-mean", True), ("zero_advantage", True), ("dynamic batches", True), ("kl", False)]


@pytest.mark.parametrize(
    ("name", "v1"),
    [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in BOTH],
)
def test_what_verl_logs_and_learns_is_the_same(name: str, v1: bool) -> None:
    flags = dict(SCENES[name])
    options = flags.pop("options", OURS)
    runs = [train(options | more, v1=v1, **flags) for more in ({}, SCORED)]
    check_same(*runs)
    auto, score = (run.products.all for run in runs)
    assert auto < 0.85 * score
    for step in runs[0].metrics:
        assert step["actor/ppo_kl" if "actor/ppo_kl" in step else "actor/pg_clipfrac"] == 0.0


def with_kl_in_reward(trainer: Any) -> None:
    reference(trainer)
    trainer.config.algorithm.use_kl_in_reward = True
    trainer.kl_ctrl_in_reward = verl_peer.core_algos().FixedKLController(0.1)


def with_own_update(trainer: Any) -> None:
    base = type(trainer)

    def _update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base._update_actor(self, *args, **kwargs)

    trainer.__class__ = type("Mine", (base,), {"_update_actor": _update_actor})


def model_with_dropout() -> Any:
    model = verl_engine.model()
    model.model.layers[0].self_attn.attention_dropout = 1e-9
    return model


# what is said -> the run
SCORING: dict[str, dict[str, Any]] = {
    "a batch is not one step of 4 sequences": actor(ppo_mini_batch_size=1),
    "actor.ppo_epochs=2": actor(ppo_epochs=2),
    "actor.shuffle": actor(shuffle=True),
    "algorithm.rollout_correction": {"algorithm__rollout_correction__rollout_is": "token"},
    "algorithm.use_kl_in_reward": {"change": with_kl_in_reward},
    "Mine._update_actor": {"change": with_own_update},
    "dropout, or noise": {"model": model_with_dropout},
    "": {"trainer__critic_warmup": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", SCORING)
def test_verl_scores_where_it_has_to(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All is as without the option, operations too, and one line says why."""
    flags = dict(SCORING[reason])
    make = flags.pop("model", verl_engine.model)
    runs = [train(OURS | more, v1=True, model=make(), **flags) for more in ({}, SCORED)]
    check_same(*runs)
    assert runs[0].products.all == runs[1].products.all
    line = f"grpo_kernels: verl scores the old policy before each update ({reason})"
    told = [x for x in capsys.readouterr().out.splitlines() if "verl scores the old" in x]
    assert told == ([line] if reason else [])


def test_who_else_scores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="old_logprobs: expected one of 'auto', 'score', got 'no'"):
        train(OURS | {"old_logprobs": "no"})
    step = train({"impl_backend": "torch"}, steps=1, strategy="fsdp").metrics[0]
    assert step["perf/mfu/actor_infer"] > 0
    assert "verl scores" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"mini_batch_size": 4}, {"epochs": 2}], ids=str)
def test_a_second_step_is_refused(more: dict[str, int]) -> None:
    def change(trainer: Any) -> None:
        update = trainer.actor_rollout_wg.update_actor

        def update_actor(data: Any) -> Any:
            verl_module("utils.tensordict_utils").assign_non_tensor(data, **more)
            return update(data)

        trainer.actor_rollout_wg.update_actor = update_actor

    with pytest.raises(RuntimeError, match="expected one optimizer step for the 8 sequences"):
        train(OURS, change=change)


def on_ranks(rank: int, ranks: int) -> None:
    for strategy, v1 in (("fsdp2", True), ("fsdp", False)):
        auto, score = (
            train(SCORE | more, v1=v1, strategy=strategy, model=verl_engine.model(layers=2))
            for more in ({}, SCORED)
        )
        check_same(auto, score)
        assert auto.products.all < 0.8 * score.products.all


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(on_ranks, 2)


# Responses of a prompt on one rank, in the optimizer steps that verl made

RANKS, GROUP, PROMPTS = 2, 4, 6
UIDS = [f"u_{i}" for i in range(PROMPTS) for _ in range(GROUP)]
PROMPT = 12  # tokens
LENGTHS = torch.randint(17, 52, (len(UIDS),), generator=torch.Generator().manual_seed(0)).tolist()
OF_BOTH = pytest.mark.parametrize("v1", [False, True], ids=["ray", "v1"])


def balanced(v1, prompts=PROMPTS, lengths=LENGTHS, **changed):
    """(uid and length) of each sequence, those of the first rank first; and what is logged."""
    options = {"impl_backend": "grpo_kernels"}
    given = {"model.fused_kernel_options": options, "actor.ppo_mini_batch_size": prompts, **changed}
    settings = {f"actor_rollout_ref.{name}": x for name, x in given.items()}
    workers, metrics = SimpleNamespace(_dispatch_info={"actor": [0, 1]}), dict[str, Any]()
    made = verl_trainer.bare_trainer(verl_trainer.config(**settings), workers, v1=v1)
    made.tokenizer, made._get_dp_size = SimpleNamespace(eos_token_id=0), lambda *_: RANKS
    if v1:
        keys = [f"{uid}_{i % GROUP}_0" for i, uid in enumerate(UIDS)]
        tags = [{"seq_len": n, "prompt_len": PROMPT} for n in lengths]
        batch = made._balance_batch(verl_trainer.Meta(keys, tags), metrics)
        uids = [key.rsplit("_", 2)[0] for key in batch.keys]
        return [*zip(uids, (x["seq_len"] for x in batch.tags), strict=True)], metrics
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = verl_module("protocol").DataProto.from_dict(
        {"attention_mask": mask, "prompts": mask[:, :PROMPT]},
        non_tensors={"uid": np.array(UIDS, dtype=object)},
    )
    assert made._balance_batch(batch, metrics, "global_seqlen", False) is None  # as verl's takes it
    found = batch.batch["attention_mask"].sum(1).tolist()
    return [*zip(batch.non_tensor_batch["uid"], found, strict=True)], metrics


def steps(found: list[Any], prompts: int) -> list[list[list[Any]]]:
    """The sequences of each rank in each optimizer step."""
    own, size = len(found) // RANKS, prompts * GROUP // RANKS
    ranks = [found[rank * own :][:own] for rank in range(RANKS)]
    return [[rank[i : i + size] for rank in ranks] for i in range(0, own, size)]


@OF_BOTH
@pytest.mark.parametrize("prompts", [PROMPTS, 2])
def test_steps_stay_and_prompts_come_together(v1: bool, prompts: int) -> None:
    stock, _ = balanced(v1, prompts)
    patch_verl()
    ours, metrics = balanced(v1, prompts)
    apart = [0, 0]
    for want, got in zip(steps(stock, prompts), steps(ours, prompts), strict=True):
        assert sorted(x for rank in want for x in rank) == sorted(x for rank in got for x in rank)
        assert len({len(rank) for rank in got}) == 1
        for i, ranks in enumerate((want, got)):
            apart[i] += sum(len({uid for uid, _ in rank}) for rank in ranks)
    assert apart[1] < 0.85 * apart[0]
    if prompts == PROMPTS:  # whole groups
        assert apart[1] == PROMPTS
    own = len(ours) // RANKS
    tokens = [sum(n for _, n in ours[i * own :][:own]) for i in range(RANKS)]
    assert metrics["global_seqlen/balanced_max"] == max(tokens) < 1.2 * min(tokens)


LONG = [PROMPT + (400 if i < GROUP else 4) for i in range(len(UIDS))]
STAYS: list[dict[str, Any]] = [
    {"model.use_fused_kernels": False},
    {"model.fused_kernel_options.layout": "padded"},
    {"actor.strategy": "fsdp"},
    {"actor.shuffle": True},
    {"actor.policy_loss.loss_mode": "kl_cov"},
    {"lengths": LONG},  # one group has most of the tokens: verl divides it
]


@OF_BOTH
def test_what_shares_nothing_or_would_change_or_be_slower_stays(v1: bool) -> None:
    stock = [balanced(v1, **changed) for changed in STAYS]
    patch_verl()
    assert [balanced(v1, **changed) for changed in STAYS] == stock


@pytest.mark.usefixtures("forget_warnings")
def test_an_engine_with_a_head_of_its_own_is_told() -> None:
    patch_verl()
    with pytest.warns(UserWarning, match=r"no effect with actor\.strategy=veomni"):
        balanced(v1=True, **{"actor.strategy": "veomni"})
