"""What only CUDA does, acted out on a CPU: 16-bit operands into fp32 results, rows in whole tiles,
groups of chunks.

`torch.mm(..., out_dtype=)` does not exist on a CPU; operands of 16 bits converted to fp32 are its
specification.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import Head, LoRA, Run, linear_logprob
from grpo_kernels.engine import device, gemm, plan, sweep
from tests.support.case_builder import make_case
from tests.support.cases import fixed_cases
from tests.support.centering import candidates, centered_loss
from tests.support.head_cases import head_cases
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines, run
from tests.support.tolerance import assert_matches, bounds_of

pytestmark = pytest.mark.unit

CASES = [c for c in fixed_cases() if c.hidden.dtype.itemsize == 2 and c.group in "ABCDGH"]
ADAPTED = [
    c
    for c in head_cases()
    if c.lora_a is not None and 2 in (c.hidden.dtype.itemsize, c.lora_a.dtype.itemsize)
]
ENGINES = ("auto", "one_pass", "two_pass", "lean", "frozen")
KILOBYTE = 2**10


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> list[plan.Group]:
    """Returns the groups that were planned, as they are."""
    seen: list[plan.Group] = []

    def product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
        assert left.dtype == right.dtype, "operands of one product have one dtype"
        sizes = (left.itemsize, out.itemsize)
        assert sizes[0] == sizes[1] or sizes == (2, 4), (
            "a result is as precise as its operands, or fp32 of 16 bits"
        )
        found = left.to(out.dtype) @ right.to(out.dtype)
        out.copy_(out + found if add else found)

    original = plan.plan_groups

    def plan_groups(*args) -> list[plan.Group]:
        groups = original(*args)
        seen.extend(groups)
        return groups

    tiled = replace(device.CPU, fewest_rows=4, row_multiple=4, mixed_products=True)
    monkeypatch.setitem(device._KINDS, "cpu", tiled)
    monkeypatch.setattr(gemm, "_product", product)
    monkeypatch.setattr(sweep, "plan_groups", plan_groups)
    monkeypatch.setattr(plan, "LARGE_CHUNK_ROWS", 8)
    monkeypatch.setattr(plan, "LEAST_CHUNK_ROWS", 4)
    return seen


@pytest.mark.parametrize("part", range(4))
def test_equals_the_reference(like_cuda: list[plan.Group], part: int) -> None:
    """Every case, of an adapter too, with groups of several chunks, and with another budget, in
    turn."""
    assert len(CASES) >= 60 and len(ADAPTED) >= 10
    for index, case in enumerate((CASES + ADAPTED)[part::4]):
        reference = reference_loss(case)
        bounds = bounds_of(reference, case)
        for budget in (4 * KILOBYTE, (1, 16 * KILOBYTE, 2**29)[index % 3]):
            for engine in ENGINES:
                if engine == "auto" or engine in allowed_engines(case):
                    assert_matches(
                        *run(case.but(workspace_bytes=budget), engine), reference, case, bounds
                    )
    assert any(len(group.chunks) > 1 for group in like_cuda)


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**14])
def test_fp16_gradients_do_not_underflow_whatever_the_loss_scale(
    like_cuda: list[plan.Group], scale: float, engine: str
) -> None:
    """Advantages for which d logits in fp16 would be 0 without the factor they carry, and for which
    it is below 1."""
    case = make_case("fp16 range", b=4, t=9, h=24, v=90, dtype=torch.float16, loss_type="grpo")
    # products in fp16 by autocast; the weight's gradient is not rounded to it, so that its bits can
    # be seen
    case = case.but(advantages=case.advantages * scale, weight=case.weight.float())
    reference = reference_loss(case)
    with torch.autocast("cpu", torch.float16):
        _, grads = run(case.but(workspace_bytes=8 * KILOBYTE), engine)
    got, want = grads["weight"].double(), reference.d_weight
    assert float((got - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**18])
def test_fp16_gradients_of_more_ids_stay_in_range(
    like_cuda: list[plan.Group], scale: float
) -> None:
    """Of their log-probabilities alone, which the factor is then chosen by."""
    hidden, weight = torch.randn(18, 24).half(), torch.randn(90, 24).requires_grad_()
    ids, run = torch.randint(90, (18, 6)), Run(workspace_bytes=8 * KILOBYTE)
    with torch.autocast("cpu", torch.float16):
        found = linear_logprob(hidden, weight, ids[:, 0], topk_ids=ids, run=run)
    logits = hidden.double() @ weight.half().double().t()
    exact = logits.detach().requires_grad_()
    logps = exact.log_softmax(-1).gather(1, ids)
    (d_logits,) = torch.autograd.grad(scale * logps.sum(), exact)
    (got,) = torch.autograd.grad(scale * found.topk_logps.sum(), weight)
    want = d_logits.t() @ hidden.double()
    assert float((got.double() - want).norm() / want.norm()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_candidates_of_a_sampler(like_cuda: list[plan.Group], dtype: torch.dtype) -> None:
    case = make_case("fp16 candidates", b=4, t=9, h=24, v=90, dtype=dtype, old=False)
    case = candidates(case, 8).but(weight=case.weight.float(), workspace_bytes=8 * KILOBYTE)
    _, want = centered_loss(case)
    for engine in ("one_pass", "two_pass", "lean"):
        with torch.autocast("cpu", dtype):
            _, grads = run(case, engine)
        got = grads["weight"]
        assert got is not None
        error = float((got.double() - want["weight"]).norm() / want["weight"].norm())
        assert error < 16 * torch.finfo(dtype).eps


def test_an_adapter_beside_a_float64_head(like_cuda: list[plan.Group]) -> None:
    """fp32 does not go into fp64 results, nor do 16 bits."""
    hidden, weight, a, b = (torch.randn(shape) for shape in ((5, 8), (30, 8), (2, 8), (30, 2)))
    weight, ids = weight.double(), torch.arange(5)
    for dtype in (torch.float32, torch.bfloat16):
        x, *pair = (t.to(dtype) for t in (hidden, a, b))
        leaves = [t.requires_grad_() for t in pair]
        logps = linear_logprob(hidden, Head(weight, lora=LoRA(*leaves, input=x)), ids).logps
        logits = hidden.double() @ weight.T + (x @ leaves[0].T).double() @ leaves[1].double().T
        want = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logps, want)
        for found, exact in zip(
            *(torch.autograd.grad(y.sum(), leaves) for y in (logps, want)), strict=True
        ):
            torch.testing.assert_close(found, exact)
