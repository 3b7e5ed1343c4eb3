"""docs/start/other-trainers.md: recipes that rewrite a trainer's forward give what it gave.

Names and arguments of all blocks: tests/test_docs.py; Megatron's recipes: test_verl_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.support import tiny_architectures as tiny
from tests.support import trainer_stand_ins as theirs
from tests.support.model_checks import text_batch
from tests.support.trainer_stand_ins import assert_same, module


@pytest.fixture
def batch() -> SimpleNamespace:
    model = tiny.text_model("qwen3", torch.float64)
    ids, attention_mask = text_batch()
    return SimpleNamespace(
        model=model, parameters=[*model.parameters()], ids=ids, attention_mask=attention_mask,
        count=4, mask=attention_mask[:, -4:].double(),
    )  # fmt: skip


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def of_theirs(*names: str) -> dict[str, Any]:
    return {name: getattr(theirs, name) for name in names}


@pytest.mark.parametrize("packing", [False, True])
def test_openrlhfs_actor_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, batch: SimpleNamespace, packing: bool
) -> None:
    actor_class = type("Actor", (theirs.Actor,), {})
    module(monkeypatch, "openrlhf.models.actor", Actor=actor_class)
    packed = of_theirs("unpad_and_slice_tensor", "gather_and_pad_tensor")
    module(monkeypatch, "openrlhf.models.ring_attn_utils", **packed)
    model = tiny.text_model("qwen3_moe", torch.float64)
    model.config.output_router_logits, model.config.use_cache = True, False  # as OpenRLHF sets them
    actor = actor_class(model, 0.7, packing_samples=packing)
    options = {"ring_attn_group": None, "packed_seq_lens": None}
    options |= {"return_output": True, "return_entropy": True}

    def compute() -> tuple[Tensor, ...]:
        logps, output = actor(batch.ids, batch.mask, attention_mask=batch.attention_mask, **options)
        return logps, output.entropy[:, -batch.count :] * batch.mask, output.aux_loss

    # its norms and router compute in float32
    assert_same(compute, [*model.parameters()], "OpenRLHF", bound=1e-5)
    with pytest.raises(NotImplementedError, match="pixel_values"):
        actor(batch.ids, batch.mask, batch.attention_mask, pixel_values=batch.mask)


@pytest.mark.parametrize("way", ["kept sets", "log-probabilities of kept ids", "supervised"])
def test_prime_rls_head_returns_what_it_did(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    contents = of_theirs("FusedOutputLinear", "sampling_replay_mask")
    name = "prime_rl.trainer.models.layers.lm_head"
    heads = module(monkeypatch, name, PrimeLmOutput=dict, **contents)
    weight, hidden = parameters((33, 8), (2, 6, 8))
    labels, temperature = torch.randint(33, (2, 6)), torch.rand(2, 6, dtype=torch.float64) + 0.5
    others = (labels + 1) % 33, (labels + 5) % 33, torch.full_like(labels, -1)
    kept = torch.stack([labels, *others], -1).int()
    kept[0, 1] = -1  # no set: the whole vocabulary
    kept[0, 2, 0] = -1  # a set without the label: the whole vocabulary, too
    kept[1, 3, 1:] = -1  # the label alone: its log-probability is 0

    def compute() -> tuple[Tensor, ...]:
        head = heads.FusedOutputLinear(8, 33, chunk_size=4)
        head.weight = weight
        head.return_mask_logprobs = way == "log-probabilities of kept ids"
        t, mask = (None, None) if way == "supervised" else (temperature, kept)
        return tuple(head(hidden, labels, temperature=t, sampling_mask=mask).values())

    assert_same(compute, [weight, hidden], "prime-rl")
    if way != "supervised":
        monkeypatch.setattr(theirs.FusedOutputLinear, "forward", None)
        compute()  # without it
