"""Faults planted in a compiled kernel are noticed: one kernel of those that `make faults` tries."""

from __future__ import annotations

import pytest

from tests.emulator.launch import Emulation
from tests.emulator.planted import Outcome, Stage, faults
from tests.emulator.scenes import SCENES


@pytest.mark.quick
def test_each_is_noticed_or_has_no_effect(emulation: Emulation) -> None:
    scene = next(scene for scene in SCENES if scene.kernel == "grad_kernel")
    stage = Stage(scene, emulation.arch)
    found = [stage.outcome(planted) for planted in faults(stage.kernels[scene.kernel])]
    assert [x for x in found if not x.noticed and not x.reason] == []

    def noticed(kind: str) -> list[Outcome]:
        return [x for x in found if kind in x.fault and x.noticed]

    assert len(noticed("taken out")) == sum("taken out" in x.fault for x in found) > 0
    assert any("race" in x.noticed for x in noticed("taken out"))
    assert any("outside of" in x.noticed for x in noticed("moved by +1"))
    assert any("outside of" in x.noticed for x in noticed("cut to 32 bits"))
