"""Unsloth's fused head, `unsloth_zoo.fused_losses.fused_linear.fused_linear_logprobs`. Tested with
2026.10.9.

What its GRPO trainer calls, with entropies only where it chooses tokens by them, and without their
gradient. 8 NVH; a frozen head 4, the gradient of the hidden states being made in the forward.
Masked positions are left out by its own `mask`, as its preference trainers pass it; its GRPO
trainer does not. On a GPU cuBLAS and Triton, logits in fp32; on a CPU torch. Its products are out
of sight of a dispatch mode, inside custom operators. The package's ``__init__`` wants the whole of
Unsloth, which the head does not. AGPL: called, never copied.
"""

from __future__ import annotations

import importlib

from benchmarks.cases import Inputs
from benchmarks.providers import Forward, Scored, from_logps, without_init


def unsloth(inputs: Inputs) -> Forward:
    """The head with its own choice of chunks."""
    without_init("unsloth_zoo", "unsloth_zoo.fused_losses")
    module = importlib.import_module("unsloth_zoo.fused_losses.fused_linear")
    case = inputs.case
    options = {
        "mask": inputs.mask.bool() if case.padding else None,
        "logit_softcapping": case.softcap or 0.0,
        "return_entropy": case.wants_entropy,
        "entropy_requires_grad": False,
    }

    def logps() -> Scored:
        found = module.fused_linear_logprobs(inputs.hidden, inputs.weight, inputs.ids, **options)
        return found if isinstance(found, tuple) else (found, None)

    note = "Triton" if module._use_triton(inputs.hidden.device) else "torch"
    return from_logps(inputs, logps, note if case.wants_entropy else f"{note}, no entropy")
