"""The surrogates and KL estimators compiled by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.formulas import times

pytest.importorskip("triton")

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.mathfn import ESTIMATORS, SURROGATES
from tests.support.row_cases import DEVICE
from tests.support.surrogate_suite import Constants, SurrogateSuite, grid

pytestmark = pytest.mark.unit


@triton.jit
def surrogate_kernel(
    log_ratio_ptr, advantage_ptr, logp_ptr, out_ptr, n, constants, SURROGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    loss, d_log_ratio, d_logp = SURROGATE(
        tl.load(log_ratio_ptr + i, mask=i < n, other=0.0),
        tl.load(advantage_ptr + i, mask=i < n, other=0.0),
        tl.load(logp_ptr + i, mask=i < n, other=0.0), *constants,
    )  # fmt: skip
    tl.store(out_ptr + i, loss, mask=i < n)
    tl.store(out_ptr + n + i, d_log_ratio, mask=i < n)
    tl.store(out_ptr + 2 * n + i, d_logp, mask=i < n)


@triton.jit
def estimator_kernel(logp_ptr, ref_ptr, out_ptr, n, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    kl, d_kl, d_corrected = ESTIMATOR(
        tl.load(logp_ptr + i, mask=i < n, other=0.0), tl.load(ref_ptr + i, mask=i < n, other=0.0)
    )
    tl.store(out_ptr + i, kl, mask=i < n)
    tl.store(out_ptr + n + i, d_kl, mask=i < n)
    tl.store(out_ptr + 2 * n + i, d_corrected, mask=i < n)


class TestTriton(SurrogateSuite):
    slack = 16

    def run(self, name: str, constants: Constants, *inputs: Tensor) -> tuple[Tensor, Sequence]:
        n = inputs[0].numel()
        out, block = torch.empty(3, n, device=DEVICE), triton.next_power_of_2(n)
        surrogate_kernel[(1,)](*inputs, out, n, constants, SURROGATE=SURROGATES[name], BLOCK=block)
        return out, inputs

    def estimate(self, name: str, corrects: bool, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        logps, d, log_ratio = inputs
        ref, out = d + logps, torch.empty(3, d.numel(), device=DEVICE)
        estimator_kernel[(1,)](logps, ref, out, d.numel(), ESTIMATOR=ESTIMATORS[name], BLOCK=256)
        return out[[0, 0, 2 if corrects else 1]], [logps, ref, log_ratio]

    def test_known_losses(self) -> None:
        """On-policy: the derivative is given, the loss that times logp, or left out."""
        log_ratio, d_logps, logps = grid(DEVICE, special=True)
        for name, loss in (
            ("constant", torch.zeros_like(logps)),
            ("linear", times(logps, d_logps)),
        ):
            out, _ = self.run(name, (), log_ratio, d_logps, logps)
            assert torch.equal(out, torch.stack([loss, torch.zeros_like(loss), d_logps]))
