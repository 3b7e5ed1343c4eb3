"""verl's scoring and update at toy size: all heads and both ways find the same gradient."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from benchmarks import verl_step
from tests.support import verl_engine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("packed", [False, True])
def test_every_variant_trains_alike(packed: bool) -> None:
    with verl_engine.on_one_rank():
        found = verl_step.measure(verl_step.TOY_SIZE, verl_step.TOY_SHAPE, 1, 2, packed=packed)
    assert found["status"] == "ok"
    assert [*found["seconds"]] == [
        verl_step.TORCH,
        verl_step.SCORED,
        verl_step.OURS,
        verl_step.TREE,
    ]
    assert all(x > 0 for x in found["seconds"].values())
