"""Fixed and random cases, every engine and backend on the device, against float64, strictly."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import Run, linear_logprob
from tests.support.adapter_case import check_adapter
from tests.support.case_builder import Case
from tests.support.cases import fixed_cases, random_case
from tests.support.on_device import report, run_on
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines
from tests.support.tolerance import assert_matches, bounds_of, computed_in

PARTS = 24
CPU_PART = 47  # every so many cases on a CPU
TRAINING = ("auto", "one_pass", "two_pass", "lean", "frozen", "score")


def check(case: Case, device: torch.device, backend: str, failures: dict[str, Exception]) -> int:
    """All engines that are exact for the case; failures are collected. Returns the count."""
    reference = reference_loss(case)
    bounds, tried = bounds_of(reference, case), 0
    for engine in TRAINING:
        if engine != "auto" and engine not in allowed_engines(case):
            continue
        tried += 1
        try:
            assert_matches(*run_on(case, device, engine, backend), reference, case, bounds)
        except Exception as error:
            failures[f"{case.name}, {engine}, {backend}"] = error
    return tried


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(device: torch.device, part: int, backend: str) -> None:
    failures: dict[str, Exception] = {}
    tried = 0
    every = (*fixed_cases(), *(random_case(seed, plain=True) for seed in range(450)))
    cases = every[part::PARTS]
    if device.type == "cpu":  # a few, in the first part
        cases = every[::CPU_PART] if part == 0 else ()
    for case in cases:
        if backend == "triton" and computed_in(case) == torch.float64:
            with pytest.raises(ValueError, match="backend"):
                run_on(case, device, "auto", backend)
            continue
        tried += check(case, device, backend, failures)
    assert tried or device.type == "cpu"
    report(failures, tried)


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_adapter_equals_the_merged_head(
    device: torch.device, backend: str, engine: str, dtype: torch.dtype
) -> None:
    on_gpu = device.type == "cuda"
    options = {"n": 300 if on_gpu else 5, "device": str(device), "backend": backend}
    check_adapter(torch.float16, dtype, gradient=2.0**-7, engine=engine, **options)
    if on_gpu and engine == "one_pass":
        dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        check_adapter(torch.bfloat16, dtype, gradient=2.0**-5, **options)


def test_ids_out_of_range_make_their_rows_nan(device: torch.device, backend: str) -> None:
    """Where looking at the ids would cost a wait, the rows say it; the others are as they were."""
    hidden, weight = torch.randn(6, 16, device=device), torch.randn(40, 16, device=device)
    ids = torch.tensor([3, -1, 39, 40, 7, 2**40], device=device)
    bad = torch.tensor([False, True, False, True, False, True], device=device)
    if device.type == "cpu":  # there it costs nothing
        with pytest.raises(ValueError, match="ids"):
            linear_logprob(hidden, weight, ids)
        return
    right = linear_logprob(hidden, weight, torch.where(bad, 0, ids))
    with torch.no_grad():
        found = linear_logprob(hidden, weight, ids, run=Run(backend=backend))
    assert torch.equal(torch.isnan(found.logps), bad)
    torch.testing.assert_close(found.logps[~bad], right.logps[~bad], rtol=1e-5, atol=1e-5)
