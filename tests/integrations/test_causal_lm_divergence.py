"""Two models: `causal_lm_divergence` and the exact KL term of `causal_lm_loss`, against the
divergence of both models' own logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_divergence, causal_lm_loss
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import last_columns, peft_model, positions_of_generate, text_batch


def models(student: str, teacher: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Two models of different weights; ``"adapter"`` is a LoRA on body and head of the student. The
    ``"shared"`` head of both trains, and the teacher's use of it is a constant."""
    own = tiny.text_model("llama" if student in ("adapter", "shared") else student, dtype)
    if student == "adapter":
        own = peft_model(own, target_modules=["q_proj", "lm_head"]).to(dtype)
    other = tiny.text_model(teacher, dtype)
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.1).add_(0.02 * torch.randn_like(x))
    if student == "shared":
        other.lm_head = own.lm_head
    return own, other


def plain(student: Any, teacher: Any, count: int, divergence: str, **inputs: Tensor) -> Tensor:
    places = positions_of_generate(student, inputs["input_ids"], inputs["attention_mask"])
    of_student = student(**inputs, **places).logits.double()
    with torch.no_grad():
        of_teacher = teacher(**inputs, **places).logits.double()
    p, q = (x[:, -count - 1 : -1].log_softmax(-1) for x in (of_student, of_teacher))
    if divergence == "forward_kl":
        p, q = q, p
    if divergence != "jsd":
        return (p.exp() * (p - q)).sum(-1)
    middle = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    return 0.5 * (q.exp() * (q - middle) + p.exp() * (p - middle)).sum(-1)


@pytest.mark.parametrize(
    ("student", "teacher", "divergence"),
    [
        ("llama", "llama", "reverse_kl"),
        ("qwen3", "gemma3_text", "forward_kl"),  # the teacher has a soft-cap and a scale
        ("granite", "cohere", "jsd"),
        ("adapter", "llama", "reverse_kl"),
        ("shared", "llama", "reverse_kl"),
        ("gpt2", "gpt2", "forward_kl"),
    ],
)
@pytest.mark.parametrize("layout", ["tree", "trim", "padded"])
def test_values_and_gradients(student: str, teacher: str, divergence: Any, layout: Any) -> None:
    own, other = models(student, teacher, torch.float64)
    ids, attention_mask = text_batch()
    ids[2, :6] = ids[1, :6]  # a shared prefix
    mask = last_columns(attention_mask)
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    want = plain(own, other, mask.shape[1], divergence, **inputs)
    parameters = [x for x in own.parameters() if x.requires_grad]
    counts = mask.bool()
    want_grads = torch.autograd.grad(want[counts].sum(), parameters, allow_unused=True)
    for _ in range(2):
        scores = causal_lm_divergence(
            own, other, ids, attention_mask, mask, divergence=divergence, layout=layout
        )
        assert (scores.divergence[~counts] == 0).all()
        near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(scores.divergence[counts].double(), want[counts], **near)
        got = torch.autograd.grad(scores.divergence.sum(), parameters, allow_unused=True)
        torch.testing.assert_close(got, want_grads, rtol=1e-4, atol=1e-5)
        assert scores.logps.shape == mask.shape
        assert scores.given.keys() == {"logps", "divergence"}
    assert all(x.grad is None for x in other.parameters())


@pytest.mark.usefixtures("forget_warnings")
def test_the_exact_kl_term_of_a_loss() -> None:
    """Without advantages, the loss is beta times the mean KL; the reference gets no gradient."""
    own, other = models("llama", "gemma3_text", torch.float64)
    ids, attention_mask = text_batch()
    mask = last_columns(attention_mask)
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    of_token = plain(own, other, mask.shape[1], "reverse_kl", **inputs)
    want, parameters = of_token[mask.bool()].mean(), [*own.parameters()]
    want_grads = torch.autograd.grad(want, parameters)
    given: tuple[Any, ...] = ids, attention_mask, mask, torch.zeros(3)
    for _ in range(2):
        loss_fn = GRPOLoss(beta=0.1, kl_estimator="full")
        out = causal_lm_loss(own, loss_fn, *given, reference=other)
        torch.testing.assert_close(out.loss.double(), 0.1 * want, rtol=1e-5, atol=1e-6)
        got = torch.autograd.grad(out.loss, parameters)
        torch.testing.assert_close(got, tuple(0.1 * x for x in want_grads), rtol=1e-4, atol=1e-6)
    assert all(x.grad is None for x in other.parameters())
    other.register_forward_pre_hook(lambda *_: pytest.fail("the reference ran"))
    with pytest.warns(UserWarning, match="no effect in a loss with beta = 0"):
        out = causal_lm_loss(own, GRPOLoss(kl_estimator="full"), *given, reference=other)
    assert out.loss == 0


def test_a_larger_vocabulary_and_options() -> None:
    """Both distributions are over the ids that both heads have."""
    own, other = models("llama", "llama", torch.float64)
    other.resize_token_embeddings(tiny.VOCAB + 6)
    ids, attention_mask = text_batch()
    mask = last_columns(attention_mask)
    scores = causal_lm_divergence(
        own, other, ids, attention_mask, mask,
        divergence="jsd", beta=0.0, temperature=2.0, entropy=True,
    )  # fmt: skip
    logits = [x(input_ids=ids, attention_mask=attention_mask).logits for x in (own, other)]
    columns = slice(-mask.shape[1] - 1, -1)
    p, q = ((x[:, columns, : tiny.VOCAB].double() / 2).log_softmax(-1) for x in logits)
    counts = mask.bool()
    for got, want in (
        (scores.divergence, (q.exp() * (q - p)).sum(-1)),  # beta 0: the forward KL
        (scores.entropies, -(p.exp() * p).sum(-1)),
        (scores.logps, p.gather(-1, ids[:, -mask.shape[1] :, None])[..., 0]),
    ):
        torch.testing.assert_close(got[counts].double(), want[counts], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("forget_warnings")
def test_a_teacher_with_dropout_is_warned_of_in_train_mode() -> None:
    own, other = models("llama", "llama", torch.float32)
    ids, attention_mask = text_batch()
    inputs = ids, attention_mask, last_columns(attention_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        causal_lm_divergence(own, other.train(), *inputs)
        for layer in other.model.layers:
            layer.self_attn.attention_dropout = 0.1
        causal_lm_divergence(own.train(), other.eval(), *inputs)
    with pytest.warns(UserWarning, match=r"teacher: it is in train mode .* call teacher\.eval"):
        causal_lm_divergence(own, other.train(), *inputs)


def test_mistakes() -> None:
    own, other = models("llama", "llama", torch.float32)
    ids, attention_mask = text_batch()
    inputs: tuple[Any, ...] = (ids, attention_mask, last_columns(attention_mask))
    wrong: Any
    for wrong, kind, message in (
        ({"divergence": "kl"}, ValueError, "divergence: expected one of reverse_kl"),
        ({"temprature": 2.0}, TypeError, "temprature: .*did you mean temperature"),
        ({"kind": "jsd"}, TypeError, r"kind: .* no such argument.*; did you mean divergence\?"),
        ({"loss_fn": GRPOLoss()}, TypeError, "loss_fn: .*; pass temperature=loss_fn.config.temp"),
        ({"beta": 0.5}, ValueError, "beta: expected None with divergence = 'reverse_kl'"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            causal_lm_divergence(own, other, *inputs, **wrong)
    with pytest.raises(TypeError, match=r"^teacher: expected a transformers model"):
        causal_lm_divergence(own, torch.nn.Linear(2, 2), *inputs)
    with pytest.raises(TypeError, match=r"^student: expected a causal language model"):
        causal_lm_divergence(own.model, other, *inputs)
    adapted = peft_model(other, target_modules=["lm_head"]).float()
    adapted.register_forward_pre_hook(lambda *_: pytest.fail("the teacher ran"))
    with pytest.raises(ValueError, match=r"^teacher.*adapter"):
        causal_lm_divergence(own, adapted, *inputs)
