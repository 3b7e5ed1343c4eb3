"""Apple's cut cross-entropy, `cut_cross_entropy.linear_cross_entropy`. Written for 25.1.1, the latest on PyPI.

That release is an older tree than the repository's 25.9: gradients are summed in the dtype of the operands.
``reduction="none"`` gives -logp a token; masked tokens are its `ignore_index`, and left out. The logits never leave the
chip: 8 NVH, less the tiles that its gradient filter drops, by default those whose probabilities are all below eps / 32
of the dtype, whatever the advantage. It chooses its Triton kernels everywhere but on macOS, where it compiles all
logits at once, as `compiled` does; on a CPU that was tested, the kernels have not been run. Apple's licence: called,
never copied.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases import Absence, Inputs
from benchmarks.providers import Forward, from_logps, without_masked

IGNORE = -100


def cce(inputs: Inputs) -> Forward:
    """By its own choice of implementation and gradient filter."""
    import cut_cross_entropy as package
    from cut_cross_entropy.linear_cross_entropy import LCE_IMPL_DEFAULT as CHOSEN

    if package.LinearCrossEntropyImpl.CCE == CHOSEN and not inputs.hidden.is_cuda:
        raise Absence("the Triton kernels it chooses serve GPUs only")
    ids = without_masked(inputs, IGNORE)

    def logps() -> tuple[Tensor, None]:
        nll = package.linear_cross_entropy(
            inputs.hidden,
            inputs.weight,
            ids,
            ignore_index=IGNORE,
            softcap=inputs.case.softcap,
            reduction="none",
            impl=CHOSEN,
        )
        return -nll, None

    return from_logps(inputs, logps, f"{package.__version__}, impl={CHOSEN.name.lower()}, no entropy")
