"""What only a GPU does, acted out on a CPU: 16-bit operands into fp32 results, rows in whole tiles,
groups of chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Head, LoRA, Run, linear_logps
from tests.support import on_device
from tests.support.case_builder import Case, make_case
from tests.support.cases import fixed_cases, random_case
from tests.support.gpu_tape import Tape
from tests.support.pretend_gpu import OnGPU, autocast, here, pretended
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines
from tests.support.tolerance import assert_matches, bounds_of

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*CUDA is not available")]

KILOBYTE = 2**10


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What happens there."""
    tape = Tape()
    with pretended(monkeypatch, tape=tape):
        yield tape


def run_there(case: Case, engine: str) -> tuple[Any, dict[str, Tensor | None]]:
    """`run`, with all tensors on the GPU; its results are here."""
    return on_device.run_there(case, OnGPU, here, engine, "torch")


def check(case: Case, *engines: str) -> None:
    reference = reference_loss(case)
    bounds = bounds_of(reference, case)
    for engine in engines:
        assert_matches(*run_there(case, engine), reference, case, bounds)


def is_mixed(case: Case) -> bool:
    """Whether all operands of a product have 16 bits, and there are no kept sets, which run as on a
    CPU."""
    kinds = {x.dtype.itemsize for x in (case.hidden, case.lora_a) if x is not None}
    return case.kept_ids is None and kinds == {2}


@pytest.mark.parametrize("part", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3))])
def test_equals_the_reference(gpu: Tape, part: int) -> None:
    """Of an adapter too, with small budgets and large ones, and engines in turn."""
    cases = [case for case in (*fixed_cases(), *map(random_case, range(200))) if is_mixed(case)]
    of_two = {"b": 4, "lora": 3, "lora_input": True, "frozen": ("weight",)}
    for kinds in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        kind = dict(zip(("dtype", "lora_dtype"), kinds, strict=True))
        cases.append(make_case(f"adapter of {kinds}", **of_two, **kind))
    for index, case in enumerate(cases[part::4]):
        allowed = sorted(allowed_engines(case) - {"score"})
        engines = {"auto", *allowed[index % max(len(allowed), 1) :][:1]}
        check(case.but(workspace_bytes=(1, 16 * KILOBYTE, 2**29)[index % 3]), *engines)


@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_chunks_of_a_group_share_the_product_of_d_weight(gpu: Tape, engine: str) -> None:
    check(make_case("groups", b=8, t=280, h=24, v=90, mask="full", dtype=torch.bfloat16,
                    workspace=700 * KILOBYTE), engine)  # fmt: skip
    logits = [m for m, n, k in (x.shape for x in gpu.of("product")) if (n, k) == (90, 24)]
    d_weight = [k for m, n, k in (x.shape for x in gpu.of("product")) if (m, n) == (90, 24)]
    assert len(logits) > 3
    assert max(d_weight) > max(logits)


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**14])
def test_fp16_gradients_do_not_underflow_whatever_the_loss_scale(gpu, scale, engine):
    """Advantages for which d logits in fp16 would be 0 without the factor they carry, and for which
    it is below 1."""
    case = make_case("fp16 range", b=4, t=9, h=24, v=90, dtype=torch.float16, loss_type="grpo")
    # the weight's gradient is not rounded to fp16, so that its bits can be seen
    case = case.but(advantages=case.advantages * scale, weight=case.weight.float())
    with autocast(torch.float16):
        _, grads = run_there(case.but(workspace_bytes=8 * KILOBYTE), engine)
    assert on_device.relative(grads["weight"], reference_loss(case).d_weight) < 2e-3


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**18])
def test_fp16_gradients_of_more_ids_stay_in_range(gpu: Tape, scale: float) -> None:
    """Of their log-probabilities alone, which the factor is then chosen by."""
    hidden, weight = torch.randn(18, 24).half(), torch.randn(90, 24)
    ids = torch.randint(90, (18, 6))
    there = OnGPU(weight).requires_grad_()
    with autocast(torch.float16):
        found = linear_logps(
            OnGPU(hidden), there, OnGPU(ids[:, 0]), topk_ids=OnGPU(ids),
            run=Run(backend="torch", workspace_bytes=8 * KILOBYTE),
        )  # fmt: skip
    logits = hidden.double() @ weight.half().double().t()
    exact = logits.requires_grad_()
    logps = exact.log_softmax(-1).gather(1, ids)
    (d_logits,) = torch.autograd.grad(scale * logps.sum(), exact)
    (got,) = torch.autograd.grad(scale * found.topk_logps.sum(), there)
    assert on_device.relative(here(got), d_logits.t() @ hidden.double()) < 2e-3


def test_an_adapter_beside_a_float64_head(gpu: Tape) -> None:
    """fp32 does not go into fp64 results, nor do 16 bits."""
    hidden, weight, a, b = (torch.randn(shape) for shape in ((5, 8), (30, 8), (2, 8), (30, 2)))
    weight, ids = weight.double(), torch.arange(5)
    for dtype in (torch.float32, torch.bfloat16):
        x, *pair = (t.to(dtype) for t in (hidden, a, b))
        there, leaves = ([y.requires_grad_() for y in ys] for ys in (map(OnGPU, pair), pair))
        head = Head(OnGPU(weight), lora=LoRA(*there, input=OnGPU(x)))
        logps = linear_logps(OnGPU(hidden), head, OnGPU(ids), run=Run(backend="torch")).logps
        logits = hidden.double() @ weight.T + (x @ leaves[0].T).double() @ leaves[1].double().T
        want = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(here(logps), want)
        found = torch.autograd.grad(logps.sum(), there)
        for got, exact in zip(found, torch.autograd.grad(want.sum(), leaves), strict=True):
            torch.testing.assert_close(here(got), exact)
