"""The one source of surrogates and KL estimators, and the C++ that is made of it."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

from grpo_kernels import LossConfig
from grpo_kernels.objective.losses import LOSSES
from grpo_kernels.token_loss import formulas

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
generated = runpy.run_path(str(ROOT / "csrc" / "generate.py"))["header"]


def test_the_header_is_that_of_the_formulas() -> None:
    """`python csrc/generate.py` writes it."""
    assert (ROOT / "csrc" / "formulas.h").read_text() == generated(inspect.getsource(formulas))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_a_loss_has_the_constants_that_its_surrogate_takes(loss) -> None:
    takes = list(inspect.signature(formulas.SURROGATES[loss.surrogate]).parameters)[3:]
    assert len(loss.constants(LossConfig())) == len(takes)


def test_a_number_that_is_no_float_is_refused() -> None:
    """It would be an int in C++, and divide like one."""
    with pytest.raises(AssertionError, match="expected floats only, got 2"):
        generated(inspect.getsource(formulas).replace("d * d / 2.0", "d * d / 2"))
