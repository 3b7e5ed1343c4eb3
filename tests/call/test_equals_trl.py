"""The library against TRL's own loss.

On one backend: `test_differential` holds every one of them against the float64 reference, with all engines, and
`test_reference` holds that against TRL.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.cases import fixed_cases
from tests.support.reference import reference_loss
from tests.support.run_case import run
from tests.support.tolerance import Bounds, assert_matches, bounds_of
from tests.support.trl_oracle import in_domain, trl_loss


@pytest.mark.parametrize("part", range(8))
def test_equals_trl(part: int) -> None:
    """TRL's loss, gradients and logged metrics, within the bounds that the reference gives."""
    cases = [case for case in fixed_cases() if in_domain(case)]
    assert len(cases) >= 100
    for case in cases[part::8]:
        trl, reference = trl_loss(case), reference_loss(case)
        bounds = bounds_of(reference, case)
        assert not bounds.ambiguous
        wanted = {name: getattr(trl, name) for name in ("loss", "d_hidden", "d_weight", "d_bias")}
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in trl.metrics.items()}
        loosened = {name: bounds.metrics[name] + 1e-7 for name in metrics}  # TRL logs its 0 / 1 shares in float32
        as_reference = SimpleNamespace(
            **wanted, metrics=metrics, logps=reference.logps, entropies=reference.entropies, head=reference.head
        )
        limits = Bounds(**{**vars(bounds), "metrics": loosened})
        assert_matches(*run(case), as_reference, case, limits)
