"""verl's distillation from a teacher's top-k log-probabilities: our loss against verl's own
functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")

from grpo_kernels import topk_divergence
from grpo_kernels.verl import engine
from tests.support import verl_engine, verl_peer
from tests.support.verl_peer import TEMPERATURE, verl_module

pytestmark = pytest.mark.unit

LENGTHS, VOCAB, K = (5, 8), 97, 6


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x.split(LENGTHS)], layout=torch.jagged)


def teacher() -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities (N, K) of the packed tokens."""
    ids = torch.rand(sum(LENGTHS), VOCAB).topk(K, -1).indices
    return ids, (3 * torch.randn(sum(LENGTHS), VOCAB)).log_softmax(-1).gather(-1, ids)


def verls(logits: Tensor, ids: Tensor, logps: Tensor, least: float | None) -> dict[str, Tensor]:
    """verl's own, of logits (1, N, V)."""
    loss = SimpleNamespace(log_prob_min_clamp=least, use_chunked_topk=False)
    config = SimpleNamespace(distillation_loss=loss)
    theirs = verl_module("trainer.distillation.fsdp.losses").compute_forward_kl_topk
    found: dict[str, Tensor] = theirs(logits, nested(logps), nested(ids), config, "thd")
    return found


@pytest.mark.parametrize("least", [None, -5.0])
def test_the_function_is_verls(least: float | None) -> None:
    hidden, weight = torch.randn(sum(LENGTHS), 8), torch.randn(VOCAB, 8)
    up, (ids, logps) = torch.randn(sum(LENGTHS)), teacher()
    mine, yours = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
    want = verls((yours[0] @ yours[1].t())[None], ids, logps, least)
    want["distillation_losses"][0].backward(up)
    got = topk_divergence(*mine, ids, logps, log_prob_min_clamp=least)
    assert got.divergence is not None
    got.divergence.backward(up)
    assert_close(got.divergence, want["distillation_losses"][0], rtol=1e-5, atol=1e-6)
    assert_close(got.student_mass, want["student_mass"][0], rtol=1e-5, atol=1e-7)
    for x, y in zip(mine, yours, strict=True):
        assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model with our forward; everything is as before afterwards."""
    with verl_peer.patched() as module:
        made = verl_peer.text_model("Qwen2", vocab_size=VOCAB)
        module.patch_forward_with_backends(made, True, "grpo_kernels")
        yield made


def forward(model: nn.Module, ids: Tensor, given: Any = None, **inputs: Any) -> Any:
    """As verl's engine calls it, with a teacher."""
    task = {} if given is None else {"grpo_kernels_task": given}
    return model(
        input_ids=ids, temperature=TEMPERATURE, use_cache=False, return_dict=True, **inputs, **task
    )


@pytest.mark.parametrize("alone", [True, False])
def test_the_forward_gives_what_verls_engine_reads(model: nn.Module, alone: bool) -> None:
    ids, logps = teacher()
    tokens = torch.randint(VOCAB, (1, sum(LENGTHS)))
    inputs = {"attention_mask": None, "position_ids": torch.arange(sum(LENGTHS))[None]}
    given = engine.HeadTask()
    given.teacher, given.log_prob_min_clamp = (ids[None], logps[None]), -6.0
    given.only_teacher = alone
    out = forward(model, tokens, given, **inputs)
    assert (out.log_probs is None) == (out.entropy is None) == alone
    aux = out.fused_linear_aux
    got = torch.autograd.grad(aux.distillation_losses.sum(), [*model.parameters()])
    plain = type(model).__mro__[1].forward(model, input_ids=tokens, **inputs, use_cache=False)
    want = verls(plain.logits / TEMPERATURE, ids, logps, -6.0)
    for name in ("distillation_losses", "student_mass", "teacher_mass"):
        assert_close(getattr(aux, name), want[name], rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(want["distillation_losses"].sum(), [*model.parameters()])
    assert_close(got, gradients, rtol=1e-3, atol=1e-5)


def test_a_forward_without_a_teacher_returns_verls_class(model: nn.Module) -> None:
    tokens = torch.tensor([[3, 4, 5]])
    assert not hasattr(forward(model, tokens), "fused_linear_aux")
    given = engine.HeadTask()
    given.teacher = tuple(x[None] for x in teacher())
    with pytest.raises(
        ValueError, match=r"teacher_ids: expected \(1, 3, 'K'\), K a position, got \(1, 13, 6\)"
    ):
        forward(model, tokens, given)


@pytest.fixture
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


def distilling(data: Any, **fields: Any) -> tuple[Any, Any]:
    """The mini-batch with a teacher's top K, and verl's loss for it; `fields` are of the
    configuration of the loss."""
    tokens, offsets = data["input_ids"].values().numel(), data["input_ids"].offsets()
    logps = (3 * torch.randn(tokens, verl_engine.VOCAB)).log_softmax(-1).topk(K, -1)
    data = data.clone()
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(logps.values, offsets)
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(logps.indices, offsets)
    defaults = {
        "loss_mode": "forward_kl_topk",
        "log_prob_min_clamp": -9.0,
        "loss_max_clamp": None,
        "use_chunked_topk": False,
        "use_task_rewards": False,
        "use_policy_gradient": False,
        "distillation_loss_coef": 0.5,
        "topk": K,
    }
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
    unfused, ours = (
        verl_engine.run(options, data, loss, **flags) for options in (None, verl_engine.OURS)
    )
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert verl_engine.gap(ours, unfused) < 5e-6
    assert ours.metrics["distillation/student_mass"] == pytest.approx(
        unfused.metrics["distillation/student_mass"]
    )
    counted = int(data["response_mask"].sum())
    done = ours.products.head / (verl_engine.VOCAB * verl_engine.HIDDEN * counted)
    assert products <= done < products + 2.1


def test_what_verls_fused_heads_do_not_serve_is_refused(group: None) -> None:
    flags = {"distillation_use_topk": True, "distillation_only": True}
    data, loss = distilling(verl_engine.batch(), loss_mode="another")
    with pytest.raises(ValueError, match="loss_mode: expected 'forward_kl_topk', got 'another'"):
        verl_engine.run(verl_engine.OURS, data, loss, **flags)
    with pytest.raises(ValueError, match="loss_mode: expected 'forward_kl_topk', got None"):
        verl_engine.run(verl_engine.OURS, data, verl_engine.ppo_loss(verl_engine.config()), **flags)
    data, loss = distilling(verl_engine.batch())
    with pytest.raises(ValueError, match="use_remove_padding: expected True"):
        verl_engine.run(verl_engine.OURS, data, loss, use_remove_padding=False, **flags)
