"""Properties that all advantage estimators have, or all of a kind: the table is tests/support/estimators.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import advantages as adv
from tests.support.estimators import ESTIMATORS, FLOAT, batch, part
from tests.support.ranks import run_ranks

NAN = float("nan")
each = pytest.mark.parametrize("name", ESTIMATORS)


def those(**wanted: bool) -> Any:
    """The estimators with these properties."""
    chosen = [
        name
        for name, x in ESTIMATORS.items()
        if all(getattr(x, key) == value for key, value in wanted.items())
    ]
    return pytest.mark.parametrize("name", chosen)


def estimate(name: str, data: SimpleNamespace, process_group: Any = None) -> Tensor:
    return ESTIMATORS[name].call(data, process_group)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_every_estimator_is_there() -> None:
    assert {name.split(",")[0] for name in ESTIMATORS} == {*adv.__all__}


@those(unscored=True)
def test_unscored_rows_change_nothing_for_the_others(name: str) -> None:
    data = batch(4, holes=True)
    unscored = torch.zeros(len(data.ids), dtype=torch.bool)
    unscored[[2, 5, 6]] = True
    kept = part(data, ~unscored)
    data.rewards[unscored] = NAN
    data.token_rewards[2, data.mask[2].nonzero()[0]] = NAN  # one reward that counts
    data.token_rewards[5:7] = NAN
    found = estimate(name, data)
    close(found[~unscored], estimate(name, kept))
    assert not found[unscored].any()
    data.rewards[:], data.token_rewards[:] = NAN, NAN
    assert not estimate(name, data).any()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
@those(centred=True)
def test_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    """Whatever their size; the other group differs, so that a std over the batch is not 0."""
    for value in (0.1, 1e8, -3.3e7, 1e-30, 0.0):
        for size in (1, 3, 7, 11):
            data = batch(5, rows=size + 4)
            data.rewards = torch.tensor([value] * size + [NAN, 1.0, 2.0, 4.0], dtype=dtype)[
                :, None
            ].repeat(1, 2)
            data.ids = torch.tensor([0] * (size + 1) + [1] * 3)
            found = estimate(name, data)
            assert not found[: size + 1].any()
            assert found[size + 1 :].isfinite().all() and found[size + 1 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
@pytest.mark.parametrize("name", [name for name, x in ESTIMATORS.items() if x.centred or x.shifts])
def test_equal_rewards_in_the_whole_batch(name: str, dtype: torch.dtype) -> None:
    data = batch(5, rows=11)
    for value in (0.1, 1e8, -3.3e7, 1e-30, 0.0):
        data.rewards = torch.full((11, 2), value, dtype=dtype)
        assert not estimate(name, data).any()


@those(shifts=True)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    """Small differences of large rewards are not lost."""
    data = batch(6)
    data.rewards = (torch.arange(26.0).view(13, 2) * 5 % 7).mul(8)
    small = estimate(name, data)
    data.rewards = data.rewards + 1e8
    assert torch.equal(estimate(name, data), small)
    assert small.any()


@pytest.mark.parametrize("name", [name for name, x in ESTIMATORS.items() if x.degree is not None])
def test_rewards_of_another_scale(name: str) -> None:
    data, larger = batch(2), batch(2)
    larger.rewards, larger.token_rewards = data.rewards * 1024, data.token_rewards * 1024
    small = estimate(name, data)
    close(estimate(name, larger), small * 1024.0 ** ESTIMATORS[name].degree)
    assert small.any()


@each
def test_what_is_masked_is_never_read(name: str) -> None:
    data = batch(7, holes=True)
    expected = estimate(name, data)
    for junk in (NAN, math.inf, -1e300):
        for field in ("token_rewards", "logps", "squares", "ratio"):
            setattr(data, field, getattr(data, field).masked_fill(~data.mask, junk))
        assert torch.equal(estimate(name, data), expected)
    if expected.dim() == 2 and "length" not in name:
        assert not expected[~data.mask].any()


@each
def test_rows_in_any_order(name: str) -> None:
    data = batch(3, holes=True)
    order = torch.randperm(len(data.ids))
    close(estimate(name, part(data, order)), estimate(name, data)[order])


@each
def test_dtypes_gradients_and_inputs(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, FLOAT):
        data = batch(0)
        for field, x in vars(data).items():
            if x.is_floating_point():
                setattr(data, field, x.to(dtype).requires_grad_())
        before = {field: x.detach().clone() for field, x in vars(data).items()}
        found = estimate(name, data)
        assert found.dtype == dtype and not found.requires_grad
        assert all(torch.equal(x.detach(), before[field]) for field, x in vars(data).items())
    for dtype in (torch.int64, torch.bool):
        data = batch(0)
        for field, x in vars(data).items():
            if x.is_floating_point():
                setattr(data, field, x.float())
        data.rewards = (data.rewards > 0).to(dtype)
        assert estimate(name, data).dtype == torch.float32


@each
def test_empty_batches(name: str) -> None:
    data = batch(0)
    whole = estimate(name, data)
    assert estimate(name, part(data, slice(0, 0))).shape == (0, *whole.shape[1:])
    if not name.startswith("process"):  # whose steps end at tokens
        assert estimate(name, part(data, slice(None), 0)).shape == (13, *[0] * (whole.dim() - 1))


# groups that span ranks: rows of the first of two, in a batch with an unscored row and in one that the second pads less
SPLITS = {"about equal": 6, "unequal": 5, "nothing for the second": 13, "padded less": 6}
CALLS = {name: x.call for name, x in ESTIMATORS.items()}
CALLS["group_advantages, across ranks"] = lambda d, pg: adv.group_advantages(
    d.rewards, 13, process_group=pg
)


def of_ranks(split: str) -> SimpleNamespace:
    """Holes and an unscored row; or rows that from the sixth on count nothing from column 4 on."""
    data = batch(8 if split == "padded less" else 7, holes=split != "padded less")
    if split == "padded less":
        data.mask[6:, 4:] = False
    else:
        data.rewards[3] = NAN
    return data


def rank_task(rank: int, world_size: int) -> dict[str, Any]:
    group, results = torch.distributed.group.WORLD, {}
    for split, first in SPLITS.items():
        rows, columns = (
            (slice(0, first), None)
            if rank == 0
            else (slice(first, 13), 4 if "less" in split else None)
        )
        results[split] = [
            call(part(of_ranks(split), rows, columns), group) for call in CALLS.values()
        ]
    # no communication, though initialised
    results["alone"] = [call(of_ranks("unequal"), None) for call in CALLS.values()]
    try:
        adv.opo_advantages(
            torch.tensor([1.0, math.inf if rank else 2.0]), torch.ones(2, 3), 4, process_group=group
        )
    except ValueError as error:
        results["message"] = str(error)
    return results


def test_groups_that_span_ranks() -> None:
    first, second = run_ranks(rank_task, 2)
    for split in SPLITS:
        for call, own, other in zip(CALLS.values(), first[split], second[split], strict=True):
            x = call(of_ranks(split), None)
            padding = x.shape[-1] - other.shape[-1] if x.dim() == 2 else 0
            close(torch.cat([own, torch.nn.functional.pad(other, (0, padding))]), x, 1e-10)
    for own, call in zip(first["alone"], CALLS.values(), strict=True):
        assert torch.equal(own, call(of_ranks("unequal"), None))
    # Both ranks raise, the one whose rewards are fine too, and neither waits for the other.
    assert "process_group: rank 1 refuses" in first["message"]
    assert "got inf at (1, 0)" in second["message"]
