"""The stored results are today's; and the comparison sees a fault."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.stored.__main__ import FILES, check, compare, read
from tests.stored.cases import turn
from tests.support.on_device import same_bits
from tests.support.sampler import MODES


@pytest.mark.slow
def test_every_case_has_its_stored_results() -> None:
    equal, found, off = check()
    assert not off, "\n".join([*off[:20], *found])
    if not equal:
        pytest.skip("; ".join(found))


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


def test_engines_do_not_go_in_step_with_other_choices() -> None:
    """Each meets every backend, width, vocabulary and, of the sampler's ratio, mode."""
    met: defaultdict[tuple[str, str], set[Any]] = defaultdict(set)
    for name, results in read(FILES["plain"])[1].items():
        group, _, number = name.partition("/")
        if group in ("loss", "packed", "scores", "sampler"):
            mode = turn(MODES, int(number)) if group == "sampler" else None
            of = {"d_hidden": -1, "d_weight": 0}  # which dimension counts
            sizes = {results[x].shape[i] for x, i in of.items() if x in results}
            met[group, results["engine"]] |= {mode, results["backend"], *sizes}
    sizes, backends = {3, 5, 8, 7, 19, 33}, {"torch", "cpp"}
    for group, engines in {
        "loss": "lean one_pass two_pass", "packed": "lean one_pass two_pass",
        "scores": "auto lean one_pass two_pass", "sampler": "lean two_pass",
    }.items():  # fmt: skip
        wanted = sizes | backends | ({*MODES} if group == "sampler" else set())
        for engine in engines.split():
            assert met[group, engine] >= wanted, (group, engine)
    assert met["loss", "frozen"] >= {3, 5, 8} | backends
