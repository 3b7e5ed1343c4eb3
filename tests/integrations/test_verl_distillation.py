"""verl's distillation from a teacher's top-k log-probabilities: our loss against verl's own functions."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")

from grpo_kernels import topk_divergence_with
from grpo_kernels.integrations.verl import distillation, patch_verl, unpatch_verl
from tests.support import verl_peer
from tests.support.verl_peer import TEMPERATURE, verl_module

LENGTHS, VOCAB, K = (5, 8), 97, 6


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x.split(LENGTHS)], layout=torch.jagged)


def teacher(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities (N, K) of the packed tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(sum(LENGTHS), VOCAB, generator=g).topk(K, -1).indices
    return ids, (3 * torch.randn(sum(LENGTHS), VOCAB, generator=g)).log_softmax(-1).gather(-1, ids)


def verls(logits: Tensor, ids: Tensor, logps: Tensor, least: float | None) -> dict[str, Tensor]:
    """verl's own, of logits (1, N, V)."""
    loss = SimpleNamespace(log_prob_min_clamp=least, use_chunked_topk=False)
    config = SimpleNamespace(distillation_loss=loss)
    theirs = verl_module("trainer.distillation.fsdp.losses").compute_forward_kl_topk
    found: dict[str, Tensor] = theirs(logits, nested(logps), nested(ids), config, "thd")
    return found


@pytest.mark.parametrize("least", [None, -5.0])
def test_the_function_is_verls(least: float | None) -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(sum(LENGTHS), 8, generator=g), torch.randn(VOCAB, 8, generator=g)
    up, (ids, logps) = torch.randn(sum(LENGTHS), generator=g), teacher()
    mine, yours = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
    want = verls((yours[0] @ yours[1].t())[None], ids, logps, least)
    want["distillation_losses"][0].backward(up)
    got = topk_divergence_with(*mine, ids, logps, log_prob_min_clamp=least, outputs=("student_mass",))
    got["divergence"].backward(up)
    assert_close(got["divergence"], want["distillation_losses"][0], rtol=1e-5, atol=1e-6)
    assert_close(got["student_mass"], want["student_mass"][0], rtol=1e-5, atol=1e-7)
    for x, y in zip(mine, yours, strict=True):
        assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A model with our forward; everything is as before afterwards."""
    module = verl_peer.monkey_patch()
    attention = importlib.import_module("transformers.integrations.flash_attention")
    name = "_flash_attention_forward"  # verl replaces it for good
    monkeypatch.setattr(attention, name, getattr(attention, name))
    unpatch_verl()
    patch_verl()
    torch.manual_seed(0)
    made = verl_peer.text_model("Qwen2", vocab_size=VOCAB)
    module.patch_forward_with_backends(made, True, "grpo_kernels")
    yield made
    unpatch_verl()


@pytest.mark.parametrize("alone", [True, False])
def test_the_forward_gives_what_verls_engine_reads(model: nn.Module, alone: bool) -> None:
    ids, logps = teacher()
    tokens = torch.randint(VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": tokens, "attention_mask": None, "position_ids": torch.arange(sum(LENGTHS))[None]}
    given = distillation.TeacherLogprobs(ids[None], logps[None], -6.0, alone=alone)
    out = model(**inputs, temperature=TEMPERATURE, grpo_kernels_teacher=given, use_cache=False, return_dict=True)
    assert (out.log_probs is None) == (out.entropy is None) == alone
    aux = out.fused_linear_aux
    aux.distillation_losses.sum().backward()
    got = {name: x.grad for name, x in model.named_parameters()}
    model.zero_grad()
    logits = type(model).__mro__[1].forward(model, **inputs, use_cache=False).logits / TEMPERATURE
    want = verls(logits, ids, logps, -6.0)
    want["distillation_losses"].sum().backward()
    for name in ("distillation_losses", "student_mass", "teacher_mass"):
        assert_close(getattr(aux, name), want[name], rtol=1e-4, atol=1e-5)
    for name, x in model.named_parameters():
        assert_close(got[name], x.grad, rtol=1e-3, atol=1e-5)


def test_a_forward_without_a_teacher_returns_verls_class(model: nn.Module) -> None:
    out = model(input_ids=torch.tensor([[3, 4, 5]]), temperature=1.0, use_cache=False, return_dict=True)
    assert not hasattr(out, "fused_linear_aux")
    ids, logps = (x[None] for x in teacher())
    given = distillation.TeacherLogprobs(ids, logps, None, alone=True)
    with pytest.raises(ValueError, match=r"teacher_ids: expected \(1, 3, 'K'\), K a position, got \(1, 13, 6\)"):
        model(input_ids=torch.tensor([[3, 4, 5]]), grpo_kernels_teacher=given, use_cache=False, return_dict=True)


class Engine:
    """The part of verl's FSDP engine that is patched."""

    use_ulysses_sp = False

    def __init__(self, backend: str = "grpo_kernels") -> None:
        self.model_config = SimpleNamespace(fused_kernel_options={"impl_backend": backend})

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        return {"input_ids": micro_batch["input_ids"]}, {"pad_size": 0}

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: Any) -> Any:
        return self.prepare_model_inputs(micro_batch)[0]


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    patched = type("Engine", (Engine,), dict(vars(Engine)))
    for owner, name, function in distillation.engine_changes(SimpleNamespace(FSDPEngineWithLMHead=patched)):
        setattr(owner, name, function)
    flags = SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default))
    monkeypatch.setitem(sys.modules, "verl.utils.tensordict_utils", flags)
    return patched


def micro_batch(**flags: bool) -> dict[str, Any]:
    ids, logps = teacher()
    tensors = {"input_ids": torch.zeros(1), "teacher_ids": nested(ids), "teacher_logprobs": nested(logps)}
    return {**tensors, "use_fused_kernels": True, "distillation_use_topk": True, **flags}


def loss_function(mode: str = "forward_kl_topk") -> Any:
    loss = SimpleNamespace(loss_mode=mode, log_prob_min_clamp=-9.0)
    return functools.partial(print, distillation_config=SimpleNamespace(distillation_loss=loss))


@pytest.mark.parametrize(
    ("only", "entropy", "alone"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_engine_hands_the_teacher_on(engine_class: type[Engine], only: bool, entropy: bool, alone: bool) -> None:
    given = micro_batch(distillation_only=only, calculate_entropy=entropy)
    found = engine_class().forward_step(given, loss_function(), False)["grpo_kernels_teacher"]
    ids, logps = teacher()
    assert torch.equal(found.ids, ids[None])
    assert torch.equal(found.logps, logps[None])
    assert (found.log_prob_min_clamp, found.alone) == (-9.0, alone)


def test_what_is_not_asked_for_is_left_alone(engine_class: type[Engine]) -> None:
    for engine, given in (
        (engine_class("torch"), micro_batch()),
        (engine_class(), micro_batch(use_fused_kernels=False)),
        (engine_class(), micro_batch(distillation_use_topk=False)),
    ):
        assert [*engine.forward_step(given, loss_function(), False)] == ["input_ids"]


def test_what_verls_fused_heads_do_not_serve_is_refused(engine_class: type[Engine]) -> None:
    for loss, got in ((loss_function("another"), "'another'"), (print, "None")):
        with pytest.raises(ValueError, match=f"loss_mode: expected 'forward_kl_topk', got {got}"):
            engine_class().forward_step(micro_batch(), loss, False)
    with pytest.raises(ValueError, match="use_remove_padding: expected True"):
        engine_class().forward_step(micro_batch(use_remove_padding=False), loss_function(), False)


def test_an_unknown_engine_is_left_alone() -> None:
    with pytest.raises(LookupError, match="FSDPEngineWithLMHead"):
        list(distillation.engine_changes(ModuleType("verl.some_module")))
    other = type("Other", (), {"prepare_model_inputs": lambda self, batch: None})
    with pytest.raises(LookupError, match="prepare_model_inputs: expected the parameters"):
        list(distillation.engine_changes(SimpleNamespace(FSDPEngineWithLMHead=other)))
