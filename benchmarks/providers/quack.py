"""QuACK's `linear_cross_entropy_func`, CuTe DSL kernels for H100 and later. Written for 0.6.5, not yet run.

Its fast form, `chunked_linear_cross_entropy`, gives the mean or the sum of a cross-entropy, with no weight a token: a
policy loss cannot be had from it. What it has a token is this: all logits at once by torch's library, rounded to the
dtype of the operands, and one row kernel. 6 NVH, 4 with a frozen head. Masked tokens are its `ignore_index`, and are
computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.events import Absence
from benchmarks.providers import Forward, from_logps
from benchmarks.providers.packing import without_masked

IGNORE = -100
HOPPER = (9, 0)


def quack(inputs: Inputs) -> Forward:
    """The function that its `LinearCrossEntropy` calls for ``reduction="none"``."""
    device, case = inputs.hidden.device, inputs.case
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        raise Absence(
            "its kernels serve GPUs from H100 on; its chunked form gives a mean or a sum, no log-probability a token"
        )
    if case.softcap is not None:
        raise Absence("no soft-cap")
    from quack.linear_cross_entropy import linear_cross_entropy_func

    ids = without_masked(inputs, IGNORE).reshape(-1)

    def logps() -> tuple[Tensor, None]:
        hidden = inputs.hidden.reshape(-1, case.h)
        nll = linear_cross_entropy_func(hidden, inputs.weight, None, ids, ignore_index=IGNORE, reduction="none")
        return -nll.view(inputs.ids.shape), None

    return from_logps(inputs, logps, "all logits at once; the chunked form has no loss a token")
