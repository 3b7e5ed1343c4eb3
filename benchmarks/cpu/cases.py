"""The cases, and their inputs: those of the GPU benchmark, in the case's dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu.cases import BenchCase, Inputs
from benchmarks.gpu.reference import LIMITS

EXACT_LIMITS = dict.fromkeys(LIMITS, 1e-4)


@dataclass(frozen=True)
class CpuCase(BenchCase):
    """N tokens in sequences of T: on-policy dapo, trainable head, every token counts."""

    n: int = 512
    h: int = 1024
    v: int = 151936
    t: int = 64
    dtype: str = "float32"  # of hidden states and weight

    def is_right(self, found: dict[str, float]) -> bool:
        """Whether what `reference.errors` found is within the limits of the dtype; NaN is not. Liger gives no logps."""
        limits = LIMITS if self.dtype == "bfloat16" else EXACT_LIMITS
        return {"loss", "d_hidden", "d_weight"} <= found.keys() and all(
            found[name] <= limit for name, limit in limits.items() if name in found
        )


CASES = (
    CpuCase("trainable"),
    CpuCase("half_zero", zero_share=0.5),
    CpuCase("trainable_bf16", dtype="bfloat16"),
)


def make_inputs(case: CpuCase) -> Inputs:
    """Seeded inputs. Their values are bf16's in every dtype; how long fp32 products take does not depend on that."""
    drawn = gpu_cases.make_inputs(case, torch.device("cpu"))
    hidden, weight = (x.detach().to(getattr(torch, case.dtype)).requires_grad_() for x in drawn.leaves)
    return replace(drawn, hidden=hidden, weight=weight)
