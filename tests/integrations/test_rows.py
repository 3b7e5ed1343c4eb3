"""`grpo_kernels.host` and `shares`: facts about the rows of one call, and what is logged of
them."""

from __future__ import annotations

import torch

from grpo_kernels import Expectation
from grpo_kernels.host import KnownRows, Shares

COUNTED = torch.tensor([[1, 0, 1], [0, 1, 1]])
FILL = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
GRADED = COUNTED.bool() & torch.tensor([[True], [False]])


def asked(index: torch.Tensor, logps: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    """Derivatives that tell the position in the batch."""
    return 10.0 * index + logps


def test_rows_of_a_call_are_those_at_its_positions() -> None:
    """In any order, in any shape, and padding among them."""
    positions = torch.tensor([[4, -1, 1], [0, 5, -1]])
    of_batch = Expectation(asked, GRADED, has_entropy_gradient=False)
    of_call = KnownRows(COUNTED, FILL, of_batch, entropy=False).at(positions)
    assert of_call.counted.tolist() == [[True, False, False], [True, True, False]]
    assert not of_call.entropy
    logps = torch.full((2, 3), -1.0)
    assert of_call.filled(logps).tolist() == [[-1.0, 0.0, 2.0], [-1.0, -1.0, 0.0]]
    assert of_call.filled(logps).dtype == logps.dtype
    expected = of_call.expected
    assert expected is not None
    assert expected.graded is not None
    assert expected.graded.tolist() == [[False, False, False], [True, False, False]]
    assert not expected.has_entropy_gradient
    assert expected.coefficients is not None
    index = torch.tensor([0, 4])  # rows of the call, at positions 4 and 5 of the batch
    assert expected.coefficients(index, torch.tensor([1.0, 2.0]), None).tolist() == [41.0, 52.0]


def test_rows_of_which_less_is_known() -> None:
    of_call = KnownRows(COUNTED).at(torch.tensor([2, -1]))
    logps = torch.ones(2)
    assert of_call.filled(logps) is logps
    assert of_call.entropy
    assert of_call.expected is None
    expected = KnownRows(COUNTED, expected=Expectation(None, GRADED)).at(torch.tensor([0])).expected
    assert expected is not None
    assert expected.coefficients is None, "a gradient that is not known row by row"
    with torch.no_grad():
        assert (
            KnownRows(COUNTED, expected=Expectation(asked)).at(torch.tensor([0])).expected is None
        )


def test_shares_are_of_all_calls_since_the_last_log() -> None:
    shares = Shares()
    assert shares.take() == {}
    shares.add("tokens", 1, 4)
    shares.add("tokens", torch.tensor(2), 4)
    shares.add("none of none", 0, 0)
    assert shares.take() == {"tokens": 3 / 8, "none of none": 0.0}
    shares.add("none of none", 0, 0)
    assert shares.take() == {}, "nothing was counted"
