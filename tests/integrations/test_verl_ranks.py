"""The plug-in for verl on two ranks, FSDP's and Megatron's fused forward, and the recipes for a
Megatron model.

Everything in float64, against one process, so that what is missing from a gradient cannot hide
behind rounding."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.support import verl_engine, verl_peer
from tests.support.ranks import run_ranks
from tests.support.verl_peer import TEMPERATURE, draw, relative

pytestmark = [verl_peer.needs_verl, pytest.mark.slow]

RANKS = 2
Gradients = dict[str, Tensor]


def loss_of(model: nn.Module, rows: slice, sees: bool) -> Tensor:
    ids, a, b = draw((4, 9))
    inputs: dict[str, Any] = {"input_ids": ids[rows], "attention_mask": torch.ones_like(ids[rows])}
    if sees:
        inputs["position_ids"] = torch.arange(9).expand(4, len(ids[rows]), 9)
    else:
        inputs["return_dict"] = True
    output = model(**inputs, temperature=TEMPERATURE, use_cache=False)
    return (output.log_probs * a[rows] + output.entropy * b[rows]).sum()


def patched(backend: str, kind: str = "Qwen3", **fields: Any) -> nn.Module:
    module = verl_peer.monkey_patch()
    torch.manual_seed(0)
    sees = kind.endswith("_vl")
    model = (
        verl_peer.vision_model(kind) if sees else verl_peer.text_model(kind, **fields)
    ).double()
    module.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    return model


def in_one_process(model: nn.Module, sees: bool = False) -> Gradients:
    """The gradients that every rank should have: FSDP takes the mean over the ranks."""
    model = copy.deepcopy(model)
    (loss_of(model, slice(0, 4), sees) / RANKS).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def on_fsdp2(backend: str, kind: str = "Qwen3", **fields: Any) -> dict[str, float]:
    """Wrapped by verl, the head as a unit of its own if it is not tied; two micro-batches that
    accumulate."""
    model, sees = patched(backend, kind, **fields), kind.endswith("_vl")
    want = in_one_process(model, sees)
    verl_engine.wrap(model, "fsdp2")
    assert isinstance(model.lm_head, FSDPModule) == (not fields.get("tie_word_embeddings"))
    for row in (2 * dist.get_rank(), 2 * dist.get_rank() + 1):
        loss_of(model, slice(row, row + 1), sees).backward()
    got = {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}
    assert got.keys() == want.keys()
    return {name: relative(got[name], want[name]) for name in want}


def on_fsdp1(use_orig_params: bool) -> dict[str, float]:
    """verl's strategy ``fsdp``: layers and the root, whose flat parameter the head is in. By a step
    of SGD."""
    model = patched("grpo_kernels")
    want = in_one_process(model)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    wrapped = verl_engine.wrap(model, "fsdp", use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    loss_of(wrapped, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2), sees=False).backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        named = (
            (x.replace(f"{verl_engine.WRAPPED}.", ""), y) for x, y in wrapped.named_parameters()
        )
        after = {name: x.detach() for name, x in named}
        return {name: relative(before[name] - after[name], want[name]) for name in want}


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """In one set of processes: importing verl and Megatron takes them longer than all the rest."""
    found: dict[str, Any] = {
        "fsdp2": on_fsdp2("grpo_kernels"),
        "fsdp2 tied": on_fsdp2("grpo_kernels", tie_word_embeddings=True),
        "fsdp2 vision": on_fsdp2("grpo_kernels", "qwen3_vl"),
        "verl vision": on_fsdp2("torch", "qwen3_vl"),
        "fsdp1": on_fsdp1(use_orig_params=False),
        "fsdp1 orig": on_fsdp1(use_orig_params=True),
    }
    try:
        on_fsdp2("torch")
    except RuntimeError as error:
        found["verl text"] = str(error)
    # not above: it takes seconds, and only the ranks need it
    from tests.support import megatron_peer, megatron_recipes

    found["steps"], found["ulysses"] = verl_engine.on_two_ranks(rank), verl_engine.on_ulysses()
    found["trees"] = verl_engine.trees_on_two_ranks(rank)
    for context in (1, 2):
        megatron_peer.start(tensor=world_size // context, context=context)
        losses = {"vanilla": {}, "gspo": {"mode": "gspo"}, "entropy": {"entropy_coeff": 0.01}}
        for name, options in losses.items():
            found[f"megatron rows {context} {name}"] = megatron_peer.rows(**options)
    megatron_peer.start(tensor=world_size)
    for divided, tied in itertools.product((False, True), repeat=2):
        found[f"megatron {divided} {tied}"] = megatron_peer.errors(divided, tied)
    found["recipes"] = {tensor: megatron_recipes.differences(tensor) for tensor in (1, world_size)}
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    ranks = run_ranks(everything, RANKS)
    return {**ranks[0], **{name: [x[name] for x in ranks] for name in ("steps", "trees")}}


def test_gradients_are_those_of_one_process(found: dict[str, Any]) -> None:
    for how in ("fsdp2", "fsdp2 tied", "fsdp2 vision", "fsdp1", "fsdp1 orig"):
        assert len(found[how]) >= 10
        assert max(found[how].values()) < 1e-12, (how, found[how])


def test_what_verl_makes_of_a_head_of_its_own(found: dict[str, Any]) -> None:
    """With FSDP2 and an untied head: the text models' forward cannot run, and the others lose the
    head's gradient."""
    assert "mixed torch.Tensor and DTensor" in found["verl text"]
    assert found["verl vision"].pop("lm_head.weight") > 0.5
    # the other parameters'; its softmax is in float32
    assert max(found["verl vision"].values()) < 1e-5


def test_megatron(found: dict[str, Any]) -> None:
    for divided, tied in itertools.product((False, True), repeat=2):
        errors = found[f"megatron {divided} {tied}"]
        assert len(errors) == (5 if tied else 6)
        assert max(errors.values()) < 1e-12, (divided, tied, errors)


def test_sequences_without_gradient_run_without_a_graph(found: dict[str, Any]) -> None:
    """On ranks with unequal numbers of them; what is left of the trunk's products is counted
    exactly."""
    for steps in found["steps"]:
        for name, step in steps.items():
            assert max(step["gaps"]) < 2e-6, name  # of the last, micro-batches are dynamic
            assert max(step["losses"]) < 1e-7, name
            # fewer than 16 rows are padded to 16
            assert step["head"] == pytest.approx([1, 1], abs=0.01), name
            assert step["trunk"] == pytest.approx(step["expected trunk"]), name
            assert step["trunk"] < 0.7, name


def test_trees(found: dict[str, Any]) -> None:
    """Ranks have equally many micro-batches; FSDP1's units run one forward each, of all tokens."""
    for rank, steps in enumerate(found["trees"]):
        assert len(steps) == 8
        for name, step in steps.items():
            assert max(step["gap"], step["loss"], step["metrics"]) < 3e-6, (name, step)
            if name.startswith("fsdp2"):
                assert step["tokens"] < (0.95, 1.0)[rank], (name, step)
            else:
                assert step["tokens"] == 1, (name, step)


def test_ulysses(found: dict[str, Any]) -> None:
    for name, nvh in (("vanilla", 3.99), ("entropy", 6)):
        assert found["ulysses"][name]["gap"] < 1e-6
        assert nvh <= found["ulysses"][name]["nvh"] < nvh + 0.15  # as above, on each rank


@pytest.mark.parametrize("context", [1, 2])
def test_rows_of_megatron(found: dict[str, Any], context: int) -> None:
    """Divided by context, the rows lie where verl's own preprocessing puts them; else the
    vocabulary is divided."""
    for name, row, live in (("vanilla", 2, 4), ("gspo", 2, 6), ("entropy", 6, 0)):
        step = dict(found[f"megatron rows {context} {name}"])
        nvh, share = step.pop("nvh"), step.pop("share")
        assert max(step.values()) < 1e-7, (name, step)  # verl rounds the temperature to float32
        if context == RANKS:
            assert nvh == pytest.approx(row + live * share), name


@pytest.mark.parametrize("tensor", [1, RANKS])
def test_recipes_of_megatron_core_and_slime(found: dict[str, Any], tensor: int) -> None:
    """docs/start/other-trainers.md, with the vocabulary divided over `tensor` ranks."""
    assert len(found["recipes"][tensor]) == 6 * tensor
    for case, difference in found["recipes"][tensor].items():
        assert difference < (1e-6 if case.startswith("loss") else 1e-11), case
