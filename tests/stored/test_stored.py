"""The results of commit eb864c1 are today's; and the comparison sees a fault."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.stored.__main__ import FILES, check, compare, difference, read


@pytest.mark.slow
def test_every_case_has_its_stored_results() -> None:
    found, off = check()
    assert not off, "\n".join([*off[:20], *found])


def test_one_bit_is_seen() -> None:
    _, stored = read(FILES["plain"])
    case = "loss/0"
    results = {name: x if isinstance(x, str) else x.clone() for name, x in stored[case].items()}
    results["d_hidden"].view(-1).view(torch.int32)[0] ^= 1
    counts, off = compare({case: stored[case]}, {case: results})
    assert counts == Counter(off=1)
    assert off[0].startswith("loss/0: d_hidden is ")
    assert not compare({case: stored[case]}, {case: stored[case]})[1]


def test_what_differs_in_kind_is_off() -> None:
    x = torch.tensor([1.0, torch.nan, 0.0])
    assert difference(x, x.clone()) == 0
    assert 0 < difference(x, torch.tensor([1.0, torch.nan, -0.0])) < 1
    assert difference(x, torch.tensor([1 + 2**-22, torch.nan, 0.0])) == 2
    for other in (x.double(), x[:2], torch.tensor([1.0, torch.inf, 0.0]), "text"):
        assert difference(x, other) == torch.inf
