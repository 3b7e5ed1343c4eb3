"""The torch backend's divergences from a teacher."""

from __future__ import annotations

import torch

from grpo_kernels.backends.torch_rows import TorchRows
from tests.support.divergence_suite import DivergenceSuite


class TestFloat(DivergenceSuite):
    kernels = TorchRows()
    device = "cpu"


class TestDouble(TestFloat):
    dtype = torch.float64
