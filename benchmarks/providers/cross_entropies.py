"""Per-token cross-entropies, -logp: torch's, Apple's, QuACK's. None gives an entropy; masked tokens are `IGNORE`.

torch: `torch.nn.functional.linear_cross_entropy`, new in torch 2.13. In chunks (``options=``) its backward recomputes
the logits: 8 NVH, 6 with a frozen head; without, it is all logits at once: 6 and 4. Its documentation says that chunks
pay from as many tokens as the head's H: they are of some NH/V rows, and each touches the whole gradient of the weight.
Masked tokens are computed. Log-probabilities come in the dtype of the operands. In chunks its products are out of sight
of a dispatch mode, inside a custom operator. Tested with torch 2.13.0.

Apple: cut cross-entropy, `cut_cross_entropy.linear_cross_entropy`. Written for 25.1.1, the latest on PyPI, an older
tree than the repository's 25.9: gradients are summed in the dtype of the operands. Masked tokens are left out. The
logits never leave the chip: 8 NVH, less the tiles that its gradient filter drops, by default those whose probabilities
are all below eps / 32 of the dtype, whatever the advantage. It chooses its Triton kernels everywhere but on macOS,
where it compiles all logits at once, as `compiled` does; on a CPU that was tested, the kernels have not been run.
Apple's licence: called, never copied.

QuACK: `linear_cross_entropy_func`, CuTe DSL kernels for H100 and later. Written for 0.6.5, not yet run. All logits at
once by torch's library, rounded to the dtype of the operands, and one row kernel: 6 NVH, 4 with a frozen head. Its fast
form, `quack/chunked`, gives the mean of a cross-entropy, with no weight a token: no policy loss can be had from it, and
nothing of it is compared; timed all the same, for what 6 NVH can take. Masked tokens are computed.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from benchmarks.cases import Absence, Inputs
from benchmarks.providers import IGNORE, Forward, Outcome, from_nll, without_masked

HOPPER = (9, 0)


def linear_ce(inputs: Inputs) -> Forward:
    """In chunks where its documentation recommends them, else without."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise Absence(f"torch {torch.__version__} has no F.linear_cross_entropy")
    in_chunks = inputs.case.n >= inputs.case.h
    options = torch.nn.LinearCrossEntropyOptions() if in_chunks else None

    def nll(hidden: Tensor, ids: Tensor) -> Tensor:
        found = function(
            hidden, inputs.weight, ids, reduction="none", ignore_index=IGNORE, options=options
        )
        return found.float()

    return from_nll(
        inputs, nll, "in chunks, LinearCrossEntropyOptions()" if in_chunks else "options=None"
    )


def cce(inputs: Inputs) -> Forward:
    """By its own choice of implementation and gradient filter."""
    import cut_cross_entropy as package
    from cut_cross_entropy.linear_cross_entropy import LCE_IMPL_DEFAULT as CHOSEN

    if package.LinearCrossEntropyImpl.CCE == CHOSEN and not inputs.hidden.is_cuda:
        raise Absence("the Triton kernels it chooses serve GPUs only")
    options = {
        "ignore_index": IGNORE,
        "softcap": inputs.case.softcap,
        "reduction": "none",
        "impl": CHOSEN,
    }

    def nll(hidden: Tensor, ids: Tensor) -> Tensor:
        return package.linear_cross_entropy(hidden, inputs.weight, ids, **options)

    return from_nll(inputs, nll, f"{package.__version__}, impl={CHOSEN.name.lower()}")


def quack(inputs: Inputs) -> Forward:
    """The function that its `LinearCrossEntropy` calls for ``reduction="none"``."""
    _check_hopper(inputs)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    def nll(hidden: Tensor, ids: Tensor) -> Tensor:
        return linear_cross_entropy_func(
            hidden, inputs.weight, None, ids, ignore_index=IGNORE, reduction="none"
        )

    return from_nll(inputs, nll, "all logits at once")


def quack_chunked(inputs: Inputs) -> Forward:
    """`chunked_linear_cross_entropy` by its own choice of pipeline: scaled-exp on an H100 where V % 128 == 0."""
    _check_hopper(inputs)
    from quack import linear_cross_entropy as package

    ids, function = without_masked(inputs), package.chunked_linear_cross_entropy
    chunk = inspect.signature(function).parameters["chunk_size"].default
    scaled = package.scaled_exp_lce_supported(inputs.hidden, inputs.weight, chunk, "mean")
    note = f"mean cross-entropy, no policy loss: not compared; {'scaled-exp' if scaled else 'chunked'}, no entropy"

    def forward() -> Outcome:
        loss = function(
            inputs.hidden.reshape(-1, inputs.case.h), inputs.weight, ids, ignore_index=IGNORE
        )
        return Outcome(loss if loss.requires_grad else None, note=note)

    return forward


def _check_hopper(inputs: Inputs) -> None:
    device = inputs.hidden.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        raise Absence(
            "its kernels serve GPUs from H100 on; its chunked form gives a mean or a sum, no log-probability a token"
        )
