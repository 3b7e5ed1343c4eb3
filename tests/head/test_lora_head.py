"""A low-rank adapter on the head beyond the cases of `test_differential`: what it costs and
refuses."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import Head, LoRA, Run, grpo_loss, linear_logprob
from tests.support.adapter_case import check_adapter
from tests.support.measure import count_flops


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_a_16_bit_adapter_rounds_its_own_first_product_alone(backend: str) -> None:
    """With what that product rounds in the truth, too, the log-probabilities are those of fp32."""
    check_adapter(torch.bfloat16, torch.bfloat16, backend=backend, gradient=2.0**-7)


@pytest.mark.parametrize(("trains_head", "products"), [(False, 4), (True, 6)])
def test_no_product_of_the_two_factors_is_made(trains_head: bool, products: int) -> None:
    """Besides the head's there are three products of B and three of A."""
    n, vocab, width, rank = 24, 90, 20, 3
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=trains_head)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((rank, width), (vocab, rank)))
    head, ids = Head(weight, lora=LoRA(a, b)), torch.randint(vocab, (n,))

    def step() -> None:
        linear_logprob(
            hidden, head, ids, entropy=False, expected=torch.ones(n)
        ).logps.sum().backward()

    assert count_flops(step) == products * n * vocab * width + 6 * n * rank * (vocab + width)


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    hidden, weight, ids = torch.randn(3, 8), torch.randn(10, 8), torch.zeros(3, dtype=torch.long)
    a, b = torch.randn(2, 8), torch.randn(10, 2)
    wrong = {
        r"lora: expected a LoRA, got tuple": (a, b),
        r"lora\.a: expected shape \(r, H\) = \(2, 8\)": LoRA(torch.randn(2, 7), b),
        r"lora\.b: expected shape \(V, r\) = \(10, 2\)": LoRA(a, torch.randn(9, 2)),
        r"lora\.scaling: expected a finite number": LoRA(a, b, float("nan")),
        r"lora\.input: expected shape that of hidden": LoRA(a, b, input=torch.randn(2, 8)),
        r"lora\.a: expected shape \(r, H\) with r > 0": LoRA(torch.randn(0, 8), torch.randn(10, 0)),
    }
    for says, lora in wrong.items():
        with pytest.raises((TypeError, ValueError), match=says):
            linear_logprob(hidden, Head(weight, lora=lora), ids)  # type: ignore[arg-type]
    leaf, head = (
        hidden.view(1, 3, 8).requires_grad_(),
        Head(weight, lora=LoRA(a.requires_grad_(), b)),
    )
    with pytest.raises(
        ValueError, match=r"engine: expected one that gives this gradient, got 'frozen', .* lora"
    ):
        grpo_loss(leaf, head, ids[None], None, torch.ones(1), run=Run(engine="frozen"))


def test_two_kinds_of_16_bits() -> None:
    """Hidden states in bf16 may be larger than any number of an adapter in fp16."""
    hidden, weight = (
        torch.tensor([[1e5, 1.0]], dtype=torch.bfloat16),
        torch.zeros(3, 2, dtype=torch.bfloat16),
    )
    a, b = (
        x.to(torch.float16)
        for x in (torch.tensor([[1e-4, 0.5]]), torch.tensor([[0.25], [0.5], [-1.0]]))
    )
    logps = linear_logprob(hidden, Head(weight, lora=LoRA(a, b)), torch.tensor([1])).logps
    want = torch.log_softmax(hidden.double() @ a.double().T @ b.double().T, -1)[:, 1]
    torch.testing.assert_close(logps.double(), want, rtol=1e-5, atol=0)
