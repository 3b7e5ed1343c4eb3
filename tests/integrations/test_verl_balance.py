"""verl's trainers: responses of a prompt on one rank, in the optimizer steps that verl made."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("verl")

from omegaconf import OmegaConf

from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support import verl_trainer
from tests.support.verl_peer import verl_module

RANKS, GROUP, PROMPTS = 2, 4, 6
UIDS = [f"u_{i}" for i in range(PROMPTS) for _ in range(GROUP)]
PROMPT = 12  # tokens
LENGTHS = torch.randint(17, 52, (len(UIDS),), generator=torch.Generator().manual_seed(0)).tolist()
TRAINERS = ["trainer.ppo.ray_trainer", "trainer.ppo.v1.trainer_base"]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    importlib.import_module("verl")  # which finds the plug-in
    unpatch_verl()
    yield
    unpatch_verl()


class Batch:
    """Stand-in for the newer trainer's batch, whose package is not installed."""

    def __init__(self, lengths: list[int]) -> None:
        self.keys = [f"{uid}_{i % GROUP}_0" for i, uid in enumerate(UIDS)]
        self.tags = [{"seq_len": n, "prompt_len": PROMPT} for n in lengths]

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order: list[int]) -> None:
        self.keys, self.tags = ([x[i] for i in order] for x in (self.keys, self.tags))


def balanced(
    name: str, prompts: int = PROMPTS, lengths: list[int] = LENGTHS, **changed: Any
) -> tuple[list[Any], Any]:
    """(uid and length) of each sequence, those of the first rank first; and what is logged."""
    module = verl_trainer.module_of_trainers(name)
    trainer = module.RayPPOTrainer if name == TRAINERS[0] else module.PPOTrainer
    whole = type("Trainer", (trainer,), dict.fromkeys(getattr(trainer, "__abstractmethods__", ())))
    made, metrics = whole.__new__(whole), dict[str, Any]()
    actor = {"strategy": "fsdp2", "shuffle": False, "ppo_mini_batch_size": prompts}
    actor |= {"policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean"}
    options = {"impl_backend": "grpo_kernels"}
    model = {"use_fused_kernels": True, "fused_kernel_options": options}
    of_actor = {"actor": actor, "model": model, "rollout": {"n": GROUP}}
    made.config = OmegaConf.create({"actor_rollout_ref": of_actor, "trainer": {"critic_warmup": 0}})
    for key, value in changed.items():
        OmegaConf.update(made.config.actor_rollout_ref, key, value, force_add=True)
    made.use_critic, made.use_prefix_grouper, made.global_steps = False, False, 1
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    made._get_dp_size = lambda *_: RANKS
    if name == TRAINERS[1]:
        batch = made._balance_batch(Batch(lengths), metrics)
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


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("prompts", [PROMPTS, 2])
def test_steps_stay_and_prompts_come_together(name: str, prompts: int) -> None:
    stock, _ = balanced(name, prompts)
    patch_verl()
    ours, metrics = balanced(name, prompts)
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


@pytest.mark.parametrize("name", TRAINERS)
def test_what_shares_nothing_or_would_change_or_be_slower_stays(name: str) -> None:
    stock = [balanced(name, **changed) for changed in STAYS]
    patch_verl()
    assert [balanced(name, **changed) for changed in STAYS] == stock
