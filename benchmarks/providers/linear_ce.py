"""torch's own `torch.nn.functional.linear_cross_entropy`, new in torch 2.13; tested with 2.13.0.

With ``reduction="none"`` it gives -logp a token. In chunks (``options=``) its backward recomputes the logits: 8 NVH,
6 with a frozen head; without, it is all logits at once: 6 and 4. Its documentation says that chunks pay from as many
tokens as the head's H: they are of some NH/V rows, and each touches the whole gradient of the weight. Masked tokens are
its `ignore_index`: they have no loss, and are computed. Log-probabilities come in the dtype of the operands. In chunks
its products are out of sight of a dispatch mode, inside a custom operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.harness.events import Absence
from benchmarks.providers import Forward, from_logps
from benchmarks.providers.packing import without_masked

IGNORE = -100


def linear_ce(inputs: Inputs) -> Forward:
    """In chunks where its documentation recommends them, else without."""
    case = inputs.case
    return _linear_ce(inputs, in_chunks=case.n >= case.h)


def chunked(inputs: Inputs) -> Forward:
    """In chunks, whatever the shape."""
    return _linear_ce(inputs, in_chunks=True)


def _linear_ce(inputs: Inputs, in_chunks: bool) -> Forward:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise Absence(f"torch {torch.__version__} has no F.linear_cross_entropy")
    case = inputs.case
    if case.softcap is not None:
        raise Absence("no soft-cap")
    options = torch.nn.LinearCrossEntropyOptions() if in_chunks else None
    ids = without_masked(inputs, IGNORE).reshape(-1)

    def logps() -> tuple[Tensor, None]:
        hidden = inputs.hidden.reshape(-1, case.h)
        nll = function(hidden, inputs.weight, ids, reduction="none", ignore_index=IGNORE, options=options)
        return -nll.float().view(inputs.ids.shape), None

    note = "in chunks, LinearCrossEntropyOptions()" if in_chunks else "options=None"
    return from_logps(inputs, logps, f"{note}, no entropy")
