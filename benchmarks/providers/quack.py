"""QuACK's `linear_cross_entropy_func`, CuTe DSL kernels for H100 and later. Written for 0.6.5, not yet run.

What it has a token is `quack`: all logits at once by torch's library, rounded to the dtype of the operands, and one row
kernel. 6 NVH, 4 with a frozen head. Its fast form, `quack/chunked`, gives the mean of a cross-entropy, with no weight a
token: no policy loss can be had from it, and nothing of it is compared; timed all the same, for what 6 NVH can take.
Masked tokens are its `ignore_index`, and are computed. Neither gives an entropy.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from benchmarks.cases import Absence, Inputs
from benchmarks.providers import Forward, Outcome, from_logps, without_masked

IGNORE = -100
HOPPER = (9, 0)


def quack(inputs: Inputs) -> Forward:
    """The function that its `LinearCrossEntropy` calls for ``reduction="none"``."""
    _check(inputs)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    ids = without_masked(inputs, IGNORE).reshape(-1)

    def logps() -> tuple[Tensor, None]:
        hidden = inputs.hidden.reshape(-1, inputs.case.h)
        nll = linear_cross_entropy_func(hidden, inputs.weight, None, ids, ignore_index=IGNORE, reduction="none")
        return -nll.view(inputs.ids.shape), None

    return from_logps(inputs, logps, "all logits at once, no entropy")


def chunked(inputs: Inputs) -> Forward:
    """`chunked_linear_cross_entropy` by its own choice of pipeline: scaled-exp on an H100 where V % 128 == 0."""
    _check(inputs)
    from quack import linear_cross_entropy as package

    ids = without_masked(inputs, IGNORE).reshape(-1)
    function = package.chunked_linear_cross_entropy
    chunk = inspect.signature(function).parameters["chunk_size"].default
    scaled = package.scaled_exp_lce_supported(inputs.hidden, inputs.weight, chunk, "mean")
    note = f"mean cross-entropy, no policy loss: not compared; {'scaled-exp' if scaled else 'chunked'}, no entropy"

    def forward() -> Outcome:
        loss = function(inputs.hidden.reshape(-1, inputs.case.h), inputs.weight, ids, ignore_index=IGNORE)
        return Outcome(loss if loss.requires_grad else None, note=note)

    return forward


def _check(inputs: Inputs) -> None:
    device = inputs.hidden.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        raise Absence(
            "its kernels serve GPUs from H100 on; its chunked form gives a mean or a sum, no log-probability a token"
        )
    if inputs.case.softcap is not None:
        raise Absence("no soft-cap")
