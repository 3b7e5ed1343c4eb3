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

from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support import verl_trainer
from tests.support.verl_peer import verl_module

RANKS, GROUP, PROMPTS = 2, 4, 6
UIDS = [f"u_{i}" for i in range(PROMPTS) for _ in range(GROUP)]
PROMPT = 12  # tokens
LENGTHS = torch.randint(17, 52, (len(UIDS),), generator=torch.Generator().manual_seed(0)).tolist()
BOTH = pytest.mark.parametrize("v1", [False, True], ids=["ray", "v1"])


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    importlib.import_module("verl")  # which finds the plug-in
    unpatch_verl()
    yield
    unpatch_verl()


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


@BOTH
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


@BOTH
def test_what_shares_nothing_or_would_change_or_be_slower_stays(v1: bool) -> None:
    stock = [balanced(v1, **changed) for changed in STAYS]
    patch_verl()
    assert [balanced(v1, **changed) for changed in STAYS] == stock


@pytest.mark.usefixtures("forget_warnings")
def test_an_engine_with_a_head_of_its_own_is_told() -> None:
    patch_verl()
    with pytest.warns(UserWarning, match=r"no effect with actor\.strategy=veomni"):
        balanced(v1=True, **{"actor.strategy": "veomni"})
