"""The stored results are today's; and the comparison sees a fault."""

from __future__ import annotations

import pytest
import torch

from tests.stored.__main__ import FILES, check, compare, read
from tests.support.on_device import same_bits


@pytest.mark.slow
def test_every_case_has_its_stored_results() -> None:
    found, off = check()
    assert not off, "\n".join([*off[:20], *found])


def test_one_bit_is_seen() -> None:
    _, stored = read(FILES["triton"])
    single = (x for x in stored if "d_hidden" in stored[x])
    case = next(x for x in single if stored[x]["d_hidden"].dtype == torch.float32)
    results = {name: x if isinstance(x, str) else x.clone() for name, x in stored[case].items()}
    results["d_hidden"].view(-1).view(torch.int32)[0] ^= 1
    said = f"{case}: d_hidden; raises nothing"
    assert compare({case: stored[case]}, {case: results}) == (0, [said])
    assert compare({case: stored[case]}, {case: stored[case]}) == (1, [])


def test_what_differs_in_kind_is_off() -> None:
    x = torch.tensor([1.0, torch.nan, 0.0])
    assert same_bits((x, None, "text"), (x.clone(), None, "text"))
    minus_zero, infinite = torch.tensor([1.0, torch.nan, -0.0]), torch.tensor([1.0, torch.inf, 0.0])
    for other in (minus_zero, x.double(), x[:2], infinite, "text", None):
        assert not same_bits(x, other) and not same_bits(other, x)
