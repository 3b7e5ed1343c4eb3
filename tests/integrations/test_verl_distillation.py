"""verl's distillation from a teacher's top-k log-probabilities: our loss within verl's engine, and
its forward, against verl's own functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("transformers")

from grpo_kernels.verl.rows import HeadTask
from tests.support import verl_engine, verl_peer
from tests.support.verl_engine import OURS
from tests.support.verl_peer import TEMPERATURE, verl_module

pytestmark = pytest.mark.unit

LENGTHS, VOCAB, K = (5, 8), 97, 6


def task(clamp: float | None, *, alone: bool) -> HeadTask:
    """A teacher's ids and log-probabilities of the packed tokens."""
    made = HeadTask()
    ids = torch.rand(sum(LENGTHS), VOCAB).topk(K, -1).indices
    logps = (3 * torch.randn(sum(LENGTHS), VOCAB)).log_softmax(-1).gather(-1, ids)
    made.teacher, made.log_prob_min_clamp = (ids[None], logps[None]), clamp
    made.only_teacher = alone
    return made


def verls(logits: Tensor, given: HeadTask) -> dict[str, Tensor]:
    """verl's own, of logits (1, N, V)."""
    loss = SimpleNamespace(log_prob_min_clamp=given.log_prob_min_clamp, use_chunked_topk=False)
    theirs = verl_module("trainer.distillation.fsdp.losses").compute_forward_kl_topk
    assert given.teacher is not None
    ids, logps = (
        torch.nested.nested_tensor([*x[0].split(LENGTHS)], layout=torch.jagged)
        for x in given.teacher
    )
    found: dict[str, Tensor] = theirs(
        logits, logps, ids, SimpleNamespace(distillation_loss=loss), "thd"
    )
    return found


@pytest.mark.parametrize(("alone", "clamp"), [(True, -6.0), (False, None)])
def test_the_forward_gives_what_verls_engine_reads(alone: bool, clamp: float | None) -> None:
    with verl_peer.patched() as patch:
        model = verl_peer.text_model("Qwen2", vocab_size=VOCAB)
        patch.patch_forward_with_backends(model, True, "grpo_kernels")

        def forward(tokens: Tensor, **more: Any) -> Any:
            options = {"temperature": TEMPERATURE, "use_cache": False, "return_dict": True}
            return model(input_ids=tokens, **options, **more)

        tokens, given = torch.randint(VOCAB, (1, sum(LENGTHS))), task(clamp, alone=alone)
        inputs = {"attention_mask": None, "position_ids": torch.arange(sum(LENGTHS))[None]}
        out = forward(tokens, grpo_kernels_task=given, **inputs)
        assert (out.log_probs is None) == (out.entropy is None) == alone
        aux = out.fused_linear_aux
        got = torch.autograd.grad(aux.distillation_losses.sum(), [*model.parameters()])
        plain = type(model).__mro__[1].forward(model, input_ids=tokens, **inputs, use_cache=False)
        want = verls(plain.logits / TEMPERATURE, given)
        for name in ("distillation_losses", "student_mass", "teacher_mass"):
            assert_close(getattr(aux, name), want[name], rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(want["distillation_losses"].sum(), [*model.parameters()])
        assert_close(got, gradients, rtol=1e-3, atol=1e-5)
        assert not hasattr(forward(tokens), "fused_linear_aux")
        message = r"teacher_ids: expected \(1, 3, 'K'\), K per position, got \(1, 13, 6\)"
        with pytest.raises(ValueError, match=message):
            forward(tokens[:, :3], grpo_kernels_task=given)


@pytest.fixture
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


def distilling(data: Any, **fields: Any) -> tuple[Any, Any]:
    """The mini-batch with a teacher's top K, and verl's loss for it; `fields` are of the
    configuration of the loss."""
    offsets = data["input_ids"].offsets()
    tokens = len(data["input_ids"].values())
    logps = (3 * torch.randn(tokens, verl_engine.VOCAB)).log_softmax(-1).topk(K, -1)
    data = data.clone()
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(logps.values, offsets)
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(logps.indices, offsets)
    off = ("use_chunked_topk", "use_task_rewards", "use_policy_gradient")
    defaults = {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -9.0, "loss_max_clamp": None}
    defaults |= {**dict.fromkeys(off, False), "distillation_loss_coef": 0.5, "topk": K}
    config = SimpleNamespace(distillation_loss=SimpleNamespace(**{**defaults, **fields}))
    loss = verl_module("trainer.distillation.losses").distillation_ppo_loss
    return data, functools.partial(loss, config=verl_engine.config(), distillation_config=config)


@pytest.mark.parametrize(
    ("rewards", "products"), [(False, 6), (True, 12)], ids=["alone", "with rewards"]
)
def test_within_verls_engine(group: None, rewards: bool, products: int) -> None:
    """Loss, gradient and metrics are those of verl's unfused path; only rows that count are
    projected."""
    data, loss = distilling(verl_engine.batch(dead=0, tools=True), use_task_rewards=rewards)
    flags = {"distillation_use_topk": True, "distillation_only": not rewards}
    unfused, ours = (verl_engine.run(options, data, loss, **flags) for options in (None, OURS))
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert verl_engine.gap(ours, unfused) < 5e-6
    mass = "distillation/student_mass"
    assert ours.metrics[mass] == pytest.approx(unfused.metrics[mass])
    counted = int(data["response_mask"].sum())
    done = ours.products.head / (verl_engine.VOCAB * verl_engine.HIDDEN * counted)
    assert products <= done < products + 2.1


def test_what_verls_fused_heads_do_not_serve_is_refused(group: None) -> None:
    flags = {"distillation_use_topk": True, "distillation_only": True}
    data, loss = distilling(verl_engine.batch())
    other = distilling(data, loss_mode="another")[1]
    ppo, padded = verl_engine.ppo_loss(verl_engine.config()), {"use_remove_padding": False}
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (other, {}, "loss_mode: expected 'forward_kl_topk', got 'another'"),
        (ppo, {}, "loss_mode: expected 'forward_kl_topk', got None"),
        (loss, padded, "use_remove_padding: expected True"),
    ]
    for function, more, message in refused:
        with pytest.raises(ValueError, match=message):
            verl_engine.run(OURS, data, function, **flags, **more)
