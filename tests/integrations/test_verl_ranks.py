"""The plug-in for verl on two ranks, FSDP's and Megatron's fused forward, and Megatron's recipes.

The ranks compare, in float64 where a missing part of a gradient could hide behind rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.support import verl_engine, verl_peer
from tests.support.ranks import Ranks
from tests.support.verl_engine import (
    HIDDEN,
    OURS,
    SCORE,
    VOCAB,
    batch,
    config,
    gap,
    metrics_of,
    ppo_loss,
    run,
)
from tests.support.verl_peer import TEMPERATURE, draw, relative

pytestmark = [verl_peer.needs_verl, pytest.mark.slow]

RANKS = 2


def loss_of(model: nn.Module, rows: slice) -> Tensor:
    ids, a, b = draw((4, 9))
    inputs: dict[str, Any] = {"input_ids": ids[rows], "attention_mask": torch.ones_like(ids[rows])}
    if hasattr(model.config, "vision_config"):
        inputs["position_ids"] = torch.arange(9).expand(4, len(ids[rows]), 9)
    else:
        inputs["return_dict"] = True
    output = model(**inputs, temperature=TEMPERATURE, use_cache=False)
    return (output.log_probs * a[rows] + output.entropy * b[rows]).sum()


def patched(kind: str, **fields: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and the gradients of one process, a mean over ranks, that each should have."""
    module = verl_peer.monkey_patch()
    torch.manual_seed(0)
    made: Any = verl_peer.vision_model if kind.endswith("_vl") else verl_peer.text_model
    model = made(kind, **fields).double()
    module.patch_forward_with_backends(model, True, "grpo_kernels")
    whole = copy.deepcopy(model)
    (loss_of(whole, slice(0, 4)) / RANKS).backward()
    return model, {n: x.grad for n, x in whole.named_parameters() if x.grad is not None}


def on_fsdp2(rank: int, ranks: int, kind: str, fields: dict[str, Any]) -> None:
    """The head is a unit of its own if it is not tied; two micro-batches that accumulate."""
    model, want = patched(kind, **fields)
    verl_engine.wrap(model, "fsdp2")
    assert isinstance(model.lm_head, FSDPModule) == (not fields.get("tie_word_embeddings"))
    for row in (2 * rank, 2 * rank + 1):
        loss_of(model, slice(row, row + 1)).backward()
    got = {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}
    assert got.keys() == want.keys()
    assert len(want) >= 10
    assert max(relative(got[name], want[name]) for name in want) < 1e-12


def on_fsdp1(rank: int, ranks: int) -> None:
    """verl's strategy ``fsdp``: the head is in the root's flat parameter. By a step of SGD, since
    `use_orig_params` is False as in verl."""
    model, want = patched("Qwen3")
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    wrapped = verl_engine.wrap(model, "fsdp", use_orig_params=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    loss_of(wrapped, slice(2 * rank, 2 * rank + 2)).backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for name, x in wrapped.named_parameters():
            name = name.replace(f"{verl_engine.WRAPPED}.", "")
            assert relative(before[name] - x.detach(), want[name]) < 1e-12, name


def trees(rank: int, ranks: int, strategy: str, more: dict[str, Any]) -> None:
    """One rank's responses share two prompts, and the other's none. Ranks have equally many
    micro-batches; FSDP1's units run one forward each, of all tokens."""
    data, loss = batch(8, seed=rank, group=(4, 1)[rank], dead=(6, 3)[rank]), ppo_loss(config())
    flags: dict[str, Any] = {"strategy": strategy, "layers": 2, **more}
    unfused = run(None, data, loss, **flags)
    for options in (OURS, SCORE):
        step = run(options, data, loss, tried=True, **flags)
        assert max(gap(step, unfused), abs(step.loss - unfused.loss)) < 3e-6
        assert metrics_of(step) == pytest.approx(metrics_of(unfused), abs=3e-6)
        tokens = step.products.tokens / unfused.products.tokens
        assert tokens < (0.95, 1.0)[rank] if strategy == "fsdp2" else tokens == 1, tokens


def on_ulysses(rank: int, ranks: int, options: dict[str, Any], nvh: float) -> None:
    """Without layers, since verl's attention under Ulysses is for GPUs: embedding, norm, head."""
    data, loss = batch(), ppo_loss(config(loss_agg_mode="seq-mean-token-mean", **options))
    flags: dict[str, Any] = {"layers": 0, "strategy": None, "calculate_entropy": bool(options)}
    want = run(None, data, loss, **flags)
    flags |= {"prepare": verl_engine.divided_by_ulysses, "global_batch_size": len(data)}
    got = run(OURS, data, loss, **flags)
    verl_peer.verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(None)
    for x in got.gradients.values():
        dist.all_reduce(x)
        x /= ranks  # as FSDP does
    assert gap(got, want) < 1e-6
    operations = torch.tensor(got.products.head)
    dist.all_reduce(operations)
    done = int(operations) / (int(data["response_mask"].sum()) * VOCAB * HIDDEN)
    assert nvh <= done < nvh + 0.15  # on each rank, fewer than 16 rows are padded to 16


def on_megatron(rank, ranks, context, divided, tied, options, row, live):
    """Divided by context, or else by the vocabulary; products are 2NVH for `row` and `live`."""
    from tests.support import megatron_peer  # takes seconds, and only the ranks need it

    megatron_peer.start(tensor=ranks // context, context=context)
    step = megatron_peer.step(divided, tied, **options)
    nvh, share = step.pop("nvh"), step.pop("share")
    assert len(step) == (4 if tied else 5)
    assert max(step.values()) < 1e-12, step
    if context == ranks:
        assert nvh == pytest.approx(row + live * share)


def recipe_of_megatron_core(rank: int, ranks: int, tensor: int) -> None:
    """docs/start/other-trainers.md, with the vocabulary divided over `tensor` ranks."""
    from tests.support import megatron_peer

    found = megatron_peer.differences(tensor)
    assert len(found) == 4 * tensor
    for case, difference in found.items():
        assert difference < (1e-6 if case.startswith("loss") else 1e-11), case


DYNAMIC, ENTROPY = {"use_dynamic_bsz": True}, {"entropy_coeff": 0.01}
FEW = {"max_token_len_per_gpu": 64, **DYNAMIC}  # a sequence or two
TASKS: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    on_fsdp2: [("Qwen3", {}), ("Qwen3", {"tie_word_embeddings": True}), ("qwen3_vl", {})],
    on_fsdp1: [()],
    trees: [("fsdp2", {"micro": 4}), ("fsdp2", DYNAMIC), ("fsdp2", FEW), ("fsdp", FEW)],
    on_ulysses: [({}, 3.99), (ENTROPY, 6)],
    on_megatron: [
        *((1, divided, tied, ENTROPY, 6, 0) for divided in (False, True) for tied in (False, True)),
        *((1, False, False, options, 2, 4) for options in ({}, {"mode": "gspo"})),
        (RANKS, False, False, {}, 2, 4),
        (RANKS, False, False, {"mode": "gspo"}, 2, 6),
        (RANKS, False, False, ENTROPY, 6, 0),
    ],
    recipe_of_megatron_core: [(1,), (RANKS,)],
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Kept: importing verl and Megatron takes them longer than all the rest."""
    with Ranks(RANKS) as found:
        yield found


@pytest.mark.parametrize(
    ("task", "given"),
    [pytest.param(task, x, id=f"{task.__name__}{x}") for task, xs in TASKS.items() for x in xs],
)
def test_on_two_ranks(ranks: Ranks, task: Callable[..., None], given: tuple[Any, ...]) -> None:
    ranks.run(task, *given)
