"""Fixed and random cases, every engine and backend on the device, against float64, strictly; and
gradients on several GPUs by NCCL, with the cases of the gloo tests (on a CPU two gloo processes
compare two losses). It has not been run on GPUs yet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import Run, linear_logps
from tests.support import parallel_cases as cases
from tests.support.case_builder import Case
from tests.support.cases import fixed_cases, random_case
from tests.support.on_device import move, report, run_on
from tests.support.ranks import run_ranks
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines, run
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
    every = (*fixed_cases(), *map(random_case, range(450)))
    chosen = every[part::PARTS]
    if device.type == "cpu":  # a few, in the first part
        chosen = every[::CPU_PART] if part == 0 else ()
    for case in chosen:
        over_sets = case.kept_ids is not None  # whose rows torch does
        if backend == "triton" and computed_in(case) == torch.float64 and not over_sets:
            with pytest.raises(ValueError, match="backend"):
                run_on(case, device, "auto", backend)
            continue
        tried += check(case, device, backend, failures)
    assert tried or device.type == "cpu"
    report(failures, tried)


def test_ids_out_of_range_make_their_rows_nan(gpu: torch.device, backend: str) -> None:
    """Where looking at the ids would cost a wait, the rows say it; the others are as they were."""
    hidden, weight = torch.randn(6, 16, device=gpu), torch.randn(40, 16, device=gpu)
    ids = torch.tensor([3, -1, 39, 40, 7, 2**40], device=gpu)
    bad = torch.tensor([False, True, False, True, False, True], device=gpu)
    right = linear_logps(hidden, weight, torch.where(bad, 0, ids))
    with torch.no_grad():
        found = linear_logps(hidden, weight, ids, run=Run(backend=backend))
    assert torch.equal(torch.isnan(found.logps), bad)
    torch.testing.assert_close(found.logps[~bad], right.logps[~bad], rtol=1e-5, atol=1e-5)


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # error over the largest entry of a gradient


def compare(rank: int, world_size: int, device_type: str) -> dict:
    """The error of every case, by how the model is divided, the loss and the dtype."""
    on_gpus = device_type == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    device, found = torch.device(device_type, rank if on_gpus else 0), {}
    for dtype in (torch.float64, torch.float32) if on_gpus else (torch.float32,):
        for name in cases.LOSSES if on_gpus else ("off-policy", "sequence ratio"):
            loss = cases.LOSSES[name]
            want = cases.truth(loss, world_size, accumulate=2)
            for setup, divided in cases.SETUPS.items():
                got = cases.Run(divided, loss, device, dtype, None).gradients(accumulate=2)
                found[setup, name, dtype] = max(cases.relative_error(got, want).values())
            error = sharded_head(rank, world_size, loss, device, dtype)
            found["head sharded by rows", name, dtype] = error
    return found


def sharded_head(rank, world_size, loss, device: torch.device, dtype: torch.dtype) -> float:
    """The head divided over all ranks, the batch the same: gradients of rows and hidden states."""
    batch = cases.make_batch(0, world_size, dtype, last_empty=False)
    model = cases.make_model(torch.float64, loss)
    hidden, weight = model(batch.tokens).detach().to(dtype), model.lm_head.weight.detach().to(dtype)
    given = cases.arguments(loss, batch, float(batch.completion_mask.sum()))
    frozen = frozenset({"weight"} if loss.frozen_head else ())
    case = Case("", hidden, weight, config=loss.config, frozen=frozen, **given)
    own = torch.arange(len(weight)).tensor_split(world_size)[rank].tolist()
    options = {"rows": slice(own[0], own[-1] + 1), "process_group": dist.group.WORLD}
    _, grads = run(move(case, lambda x: x.to(device)), loss.engine, **options)
    want = reference_loss(case)
    expected = {"hidden": want.d_hidden, "weight": want.d_weight[options["rows"]]}
    expected = {name: x for name, x in expected.items() if name not in frozen}
    got = {name: x.cpu() for name, x in grads.items() if x is not None}
    return max(cases.relative_error(got, expected).values())


def test_gradients_are_those_of_one_process(device: torch.device) -> None:
    world_size = torch.cuda.device_count() if device.type == "cuda" else 2
    if world_size < 2:
        pytest.skip("needs two GPUs")
    backend = "nccl" if device.type == "cuda" else "gloo"
    for found in run_ranks(compare, world_size, device.type, backend=backend, seconds=600):
        # nor is NaN within it
        wrong = {case: error for case, error in found.items() if not error <= BOUNDS[case[2]]}
        assert not wrong
