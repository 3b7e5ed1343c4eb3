"""A low-rank adapter on the head, in its low-rank form, against the merged head ``W + scaling * B @ A`` in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import Head, LoRA, Run, grpo_loss, linear_logprob
from grpo_kernels.engine.device import device_of
from tests.support.adapter_case import RANK, SCALING, check_adapter, factors
from tests.support.cases import LOSSES, fixed_cases
from tests.support.flat import flat
from tests.support.ranks import run_ranks
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.run_case import allowed_engines, arguments, config_of

BY_NAME = {case.name: case for case in fixed_cases()}
NAMES = [f"A/{x}-{level[0]}/off-policy/f32" for x, level in LOSSES] + [
    "A/dapo-t/on-policy/f32", "A/grpo-s/on-policy/f32", "B/head/f32", "B/bias/f32", "B/entropy/grpo-s",
]  # fmt: skip


def check(name: str, dtype: torch.dtype, tolerance: float, frozen: frozenset[str] = frozenset()) -> None:
    """Every engine that serves the merged head, but frozen, which an adapter that trains does not allow."""
    case = BY_NAME[name]
    a, b = (x.to(dtype).double() for x in factors(*case.weight.shape))
    case = case.but(
        hidden=case.hidden.to(dtype),
        weight=case.weight.to(dtype),
        bias=None if case.bias is None else case.bias.to(dtype),
        frozen=frozen,
    )
    merged = case.but(weight=case.weight.double() + SCALING * b @ a, hidden=case.hidden.double(), frozen=frozenset())
    want = reference_loss(merged)
    for engine in sorted(allowed_engines(case) - {"frozen", "score"}):
        given = arguments(case)
        lora = LoRA(*(x.to(dtype).clone().requires_grad_() for x in (a, b)), SCALING)
        options = {"engine": engine, "workspace_bytes": case.workspace_bytes}
        out = flat(grpo_loss)(**given, config=config_of(case), **options, lora=lora)
        assert out.engine == engine
        out.loss.backward()
        compare(out, given, lora, want, (a, b), tolerance, frozen)


def compare(
    out,
    given,
    lora: LoRA,
    want: ReferenceResult,
    pair: tuple[Tensor, Tensor],
    tolerance: float,
    frozen: frozenset[str],
) -> None:
    a, b = pair
    expected = {
        "hidden": want.d_hidden,
        "weight": want.d_weight,
        "bias": want.d_bias,
        "a": SCALING * b.T @ want.d_weight,
        "b": SCALING * want.d_weight @ a.T,
    }
    found = {"hidden": given["hidden"].grad, "a": lora.a.grad, "b": lora.b.grad}
    for name in ("weight", "bias"):
        found[name] = None if given[name] is None else given[name].grad
    torch.testing.assert_close(out.per_token_logps.double(), want.logps.detach(), rtol=0, atol=tolerance)
    torch.testing.assert_close(out.entropies.double(), want.entropies.detach(), rtol=0, atol=tolerance)
    torch.testing.assert_close(out.loss.detach().double(), want.loss.detach(), rtol=tolerance, atol=tolerance)
    for name, x in found.items():
        if name in frozen or expected[name] is None:
            assert x is None, name
            continue
        size = float(expected[name].detach().abs().amax().clamp(min=1e-6))
        torch.testing.assert_close(
            x.double(), expected[name], rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_and_engine_equals_the_merged_head(name: str, every_backend: str) -> None:
    if every_backend != "triton":  # which has no float64
        check(name, torch.float64, 1e-10)
    check(name, torch.float32, 2e-5, frozenset({"weight", "bias"}))


@pytest.mark.parametrize(
    ("backend", "base", "dtype"),
    [
        ("torch", torch.bfloat16, torch.float32),
        ("cpp", torch.bfloat16, torch.float32),
        ("cpp", torch.bfloat16, torch.bfloat16),
        ("triton", torch.float16, torch.float32),
    ],
)
def test_a_more_precise_adapter_on_a_16_bit_head(backend: str, base: torch.dtype, dtype: torch.dtype) -> None:
    """PEFT keeps adapters in fp32: nothing of them is rounded to the head's dtype in the forward."""
    rounds = dtype.itemsize == 2 or device_of(torch.device("cpu")).mixed_products(base)  # its gradient, or d logits
    check_adapter(base, dtype, backend=backend, gradient=2.0**-7 if rounds else 2.0**-8)


def test_what_dropout_left_is_what_the_adapter_sees() -> None:
    hidden, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 16), (50, 16)))
    dropped = (hidden * (torch.rand(hidden.shape) > 0.5)).requires_grad_()
    hidden.requires_grad_()
    a, b = (x.requires_grad_() for x in factors(50, 16))
    ids = torch.randint(50, (2, 5))
    logps = linear_logprob(hidden, Head(weight, lora=LoRA(a, b, SCALING, input=dropped)), ids).logps
    want = torch.log_softmax(hidden @ weight.T + SCALING * dropped @ a.T @ b.T, -1).gather(2, ids[..., None])[..., 0]
    torch.testing.assert_close(logps, want)
    leaves = (hidden, dropped, a, b)
    for x, y in zip(torch.autograd.grad(logps.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("where", ["hidden", "input"])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean", "linear_logprob"])
def test_what_is_masked_reaches_no_gradient(engine: str, where: str) -> None:
    """NaN there is not read: 0 times it would be NaN in all of the gradient of `a`."""
    ids, mask = torch.randint(50, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    weight = torch.randn(50, 16)
    states = {name: torch.randn(2, 5, 16) for name in ("hidden", "input")}

    def gradients(masked: float) -> list[Tensor]:
        a, b = (x.float().requires_grad_() for x in factors(50, 16))
        filled = {where: torch.where(mask[..., None] != 0, states[where], masked)}
        hidden, seen = (x.clone().requires_grad_() for x in (states | filled).values())
        head = Head(weight, lora=LoRA(a, b, SCALING, input=seen if where == "input" else None))
        if engine == "linear_logprob":
            scores = linear_logprob(hidden, head, ids, mask=mask)
            assert scores.logps is not None and scores.entropies is not None
            loss = scores.logps.sum() + scores.entropies.sum()
        else:
            run = Run(engine=engine)
            loss = grpo_loss(hidden, head, ids, mask, torch.tensor([1.0, -0.5]), run=run).loss
        return list(torch.autograd.grad(loss, (a, b, hidden, seen)[: 4 if where == "input" else 3]))

    for x, y in zip(gradients(torch.nan), gradients(0.0), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("trains_head", "products"), [(False, 4), (True, 6)])
def test_no_product_of_the_two_factors_is_made(trains_head: bool, products: int) -> None:
    """Besides the head's products there are three of the adapter's B and three of its A, each of rank r."""
    n, vocab, width = 24, 90, 20
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=trains_head)
    a, b = (x.float().requires_grad_() for x in factors(vocab, width))
    with FlopCounterMode(display=False) as counter:
        head, ids = Head(weight, lora=LoRA(a, b)), torch.randint(vocab, (n,))
        linear_logprob(hidden, head, ids, entropy=False, expected=torch.ones(n)).logps.sum().backward()
    wanted = products * n * vocab * width + 6 * n * RANK * (vocab + width)
    assert counter.get_total_flops() == wanted


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
    leaf, head = hidden.view(1, 3, 8).requires_grad_(), Head(weight, lora=LoRA(a.requires_grad_(), b))
    with pytest.raises(ValueError, match=r"engine: expected one that gives this gradient, got 'frozen', .* lora"):
        grpo_loss(leaf, head, ids[None], None, torch.ones(1), run=Run(engine="frozen"))


def test_two_kinds_of_16_bits() -> None:
    """Hidden states in bf16 may be larger than any number of an adapter in fp16."""
    hidden, weight = torch.tensor([[1e5, 1.0]], dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.bfloat16)
    a, b = (x.to(torch.float16) for x in (torch.tensor([[1e-4, 0.5]]), torch.tensor([[0.25], [0.5], [-1.0]])))
    logps = linear_logprob(hidden, Head(weight, lora=LoRA(a, b)), torch.tensor([1])).logps
    want = torch.log_softmax(hidden.double() @ a.double().T @ b.double().T, -1)[:, 1]
    torch.testing.assert_close(logps.double(), want, rtol=1e-5, atol=0)


def refused_on_all_ranks(rank: int, world_size: int) -> None:
    hidden, weight, ids = torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3, dtype=torch.long)
    a, b = torch.ones(2, 8), torch.ones(5, 2)
    differs = "^process_group: expected the same call on every rank, got "
    x = hidden.clone().requires_grad_(rank == 1)
    wrong = {
        differs + r"gradients wanted of lora\.a or lora\.input \[0, 1\]": LoRA(a.clone().requires_grad_(rank == 1), b),
        differs + r"gradients wanted of lora\.b \[0, 1\]": LoRA(a, b.clone().requires_grad_(rank == 1)),
        differs + r"gradients wanted of lora\.a or .*\[0, 1\]$": LoRA(a, b, 1.0, x),
        differs + r"lora\.a = torch\.float32 \([12], 8\) on rank [01], another": LoRA(a[rank:], b[:, rank:]),
        differs + r"lora\.a = (None|torch\.float32 \(2, 8\)) on rank": None if rank else LoRA(a, b),
        r"^lora: expected a LoRA, got tuple": (a, b),
        r"^lora\.a: expected a tensor, got NoneType": LoRA(None, b),  # type: ignore[arg-type]
    }
    for says, lora in wrong.items():
        head = Head(weight, lora=lora, process_group=dist.group.WORLD)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=says):
            linear_logprob(hidden, head, ids)


def test_ranks_that_disagree_on_the_adapter_do_not_wait_for_each_other() -> None:
    run_ranks(refused_on_all_ranks, 2)
