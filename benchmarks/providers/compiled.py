"""torch.compile of the eager step: all logits at once, the row work fused by inductor. Tested with torch 2.13.0.

6 NVH, 4 with a frozen head. Compiled in the first call of a shape, by the C++ compiler on a CPU and by Triton on a GPU.
Masked positions are computed, as eager trainers do. Its operations cannot be counted by a dispatch mode, under which
torch refuses to compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Inputs, capped
from benchmarks.providers import Forward, from_logps
from benchmarks.providers.eager import entropies

GRAPHS = 64  # a shape each; torch gives up past 8


def compiled(inputs: Inputs) -> Forward:
    """One graph for the forward and one for the backward, for these shapes alone."""
    torch._dynamo.config.recompile_limit = GRAPHS
    function = torch.compile(_logps_and_entropies, fullgraph=True, dynamic=False)
    case = inputs.case

    def logps() -> tuple[Tensor, Tensor | None]:
        return function(inputs.hidden, inputs.weight, inputs.ids, case.softcap, case.wants_entropy)

    return from_logps(inputs, logps, "fullgraph, dynamic=False")


def _logps_and_entropies(
    hidden: Tensor,  # (B, T, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (B, T)
    softcap: float | None,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (B, T), and entropies (B, T) without gradient where they are wanted."""
    log_p = torch.log_softmax(capped(torch.nn.functional.linear(hidden, weight), softcap).float(), dim=-1)
    logps = log_p.gather(-1, ids[..., None])[..., 0]
    return logps, entropies(log_p.detach()) if wants_entropy else None
