"""What callers say of a sparse gradient, and what becomes of it in a call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number
from grpo_kernels.base.choices import GradientName, choices
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.engines import LEAN
from grpo_kernels.engine.gradients import NeedsGrad
from grpo_kernels.engine.products import accumulator_of
from grpo_kernels.engine.thinning import Spent, Thinning, seed_of
from grpo_kernels.head.lm_head import LMHead

NAMES = choices(GradientName)


class SparseGradient:
    """A gradient of few entries a row of d logits, on average the exact one (docs/sparse-gradients.md).

    It may be handed to any number of calls, each of which draws anew, and sums up what they cost (`metrics`).

    Args:
        tolerance: the root mean square error of each row of d hidden, as a share of its length. Rows for which that
            would take more entries than a dense row is worth are computed exactly.
        weight: whether d weight is made of the same entries; else it is exact. Not for Adam, which divides the noise of
            rarely seen tokens' rows by its own size.
        seed: of the draws, which depend on it, on how many calls there were, and on a token's place in its call; None:
            each call takes one from torch's generator.

    Raises:
        TypeError, ValueError: a wrong value.
    """

    def __init__(self, tolerance: float = 1e-2, *, weight: bool = False, seed: int | None = None) -> None:
        check_number("tolerance", tolerance, 0.0)
        if not isinstance(weight, bool):
            raise TypeError(f"weight: expected True or False, got {weight!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed: expected an int or None, got {seed!r}")
        self.tolerance, self.weight, self.seed = float(tolerance), weight, seed
        self._calls = 0
        self._spent: Spent | None = None

    def __repr__(self) -> str:
        return f"SparseGradient({self.tolerance}, weight={self.weight}, seed={self.seed})"

    def metrics(self, gather: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Means over all rows whose gradient there was since the last `reset`: the metrics of `LossOutput` by name.

        Waits for the device. Empty if there was no call.

        Args:
            gather: that of accelerate's ``Accelerator``: means over the rows of all ranks, which all make this call.
        """
        if self._spent is None:
            return {}
        pairs = self._spent.pairs()
        sums = torch.stack([x for pair in pairs.values() for x in pair])
        if gather is not None:
            sums = gather(sums[None]).sum(dim=0)
        totals, counts = sums.view(-1, 2).unbind(1)
        return dict(zip(pairs, (totals / counts.clamp(min=1)).tolist(), strict=True))

    def reset(self) -> None:
        """Begin `metrics` again. The draws go on."""
        self._spent = None

    def thinning(self, head: LMHead) -> Thinning:
        """How the next call, of `head`, is thinned out."""
        seed = int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed
        seed = seed_of(seed, self._calls, head.process_group)
        self._calls += 1
        device = head.hidden.device
        if self._spent is None:
            self._spent = Spent(device, torch.float64, of_weight=self.weight)
        of_call = Spent(device, accumulator_of(head.compute_dtype()), of_weight=self.weight)
        return Thinning(self.tolerance, seed, (of_call, self._spent), self.weight)


def sparse_gradient(gradient: Any) -> SparseGradient | None:
    """`gradient` as calls take it; None: the exact one.

    Raises:
        ValueError: it is no such thing.
    """
    if isinstance(gradient, SparseGradient):
        return gradient
    if gradient not in NAMES:
        raise ValueError(f"gradient: expected 'exact', 'sparse' or a SparseGradient, got {gradient!r}")
    return SparseGradient() if gradient == "sparse" else None


def plan_thinning(head: LMHead, gradient: Any, engine: str, needs_grad: NeedsGrad) -> Thinning | None:
    """How the backward products of a call are thinned out; None: they are not, or there is no d hidden.

    Raises:
        ValueError: `gradient` is wrong, or asks for what the call cannot have.
    """
    sparse = sparse_gradient(gradient)
    if sparse is None:
        return None
    if engine == LEAN.name:
        raise ValueError(
            f"gradient: expected 'exact' with engine = 'lean', which has no whole row of d logits, got {gradient!r}"
        )
    if device_of(head.hidden.device).is_capturing():
        raise ValueError(
            f"gradient: expected 'exact' while a CUDA graph is captured: how many entries there are would have to be "
            f"waited for; got {gradient!r}"
        )
    if not needs_grad.hidden:
        if needs_grad.head:
            _warn_of_no_use()
        return None
    return sparse.thinning(head)


@functools.cache
def _warn_of_no_use() -> None:
    warnings.warn(
        "grpo_kernels: a sparse gradient has no use where hidden wants no gradient: that of the head is exact",
        RuntimeWarning,
        stacklevel=3,
    )
