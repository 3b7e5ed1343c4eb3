"""Per-token cross-entropies, -logp: torch's and Apple's. Neither gives an entropy; masked tokens
are `IGNORE`.

torch: `torch.nn.functional.linear_cross_entropy`, new in torch 2.13. In chunks (``options=``) its
backward recomputes the logits: 8 NVH, 6 with a frozen head; without, it is all logits at once: 6
and 4. Its documentation says that chunks pay from as many tokens as the head's H: they are of some
NH/V rows, and each touches the whole gradient of the weight. Masked tokens are computed.
Log-probabilities come in the dtype of the operands. In chunks its products are out of sight of a
dispatch mode, inside a custom operator. Tested with torch 2.13.0.

Apple: cut cross-entropy, `cut_cross_entropy.linear_cross_entropy`. Written for 25.1.1, the latest
on PyPI, an older tree than the repository's 25.9: gradients are summed in the dtype of the
operands. Masked tokens are left out. The logits never leave the chip: 8 NVH, less the tiles that
its gradient filter drops, by default those whose probabilities are all below eps / 32 of the dtype,
whatever the advantage. It chooses its Triton kernels everywhere but on macOS, where it compiles all
logits at once, as `compiled` does; on a CPU that was tested, the kernels have not been run. Apple's
licence: called, never copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Absence, Inputs
from benchmarks.providers import IGNORE, Forward, from_nll


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
