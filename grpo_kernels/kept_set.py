"""Log-probabilities renormalised over the ids that a truncating sampler kept (top-k, top-p, min-p).

A sampler that cuts the distribution draws y from softmax over its kept set S. The policy trained on y has the same
support only if its own log-probabilities are taken over S too (https://arxiv.org/abs/2512.02556, keep sampling mask)::

    logp = z_y - log sum_{j in S} exp z_j        d logp / d z_j = 1[j = y] - p_j        j in S

Only the head's rows of S are read: they are gathered for some positions at a time and multiplied with those positions'
hidden states. With N positions of K ids, a product is 2NKH floating point operations: one forward, one for d hidden,
one for d weight; with an adapter of rank r on the head 2NK(H + r). Positions are sorted by falling size of their sets,
so that short sets get little padding. An id that is alone in its set has log-probability 0 whatever its logit is, and
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from grpo_kernels.base.choices import BackendName, EngineName, LogitsDtype, WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.call.expected import Expected
from grpo_kernels.call.kept import KeptInputs, kept_logprob
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.lora import LoRA

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import KeptSetKeywords

__all__ = ["KeptIds", "kept_set_logprob"]


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor | KeptIds,
    *,
    entropy: Literal[True, "full"] = ...,
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor | KeptIds,
    *,
    entropy: Literal[False],
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, None]: ...


@overload
def kept_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    kept_ids: Tensor | KeptIds,
    *,
    entropy: bool | Literal["full"],
    **options: Unpack[KeptSetKeywords],
) -> tuple[Tensor, Tensor | None]: ...


def kept_set_logprob(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (...)
    kept_ids: Tensor | KeptIds,  # (..., K)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    without_set: WithoutSet = "error",
    temperature: float | Tensor = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool | Literal["full"] = True,
    logits_dtype: LogitsDtype = "float32",
    expected: Expected | None = None,
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
    gather: Gather | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z[S])[id]`` and the entropy of ``softmax(z[S])``, S the kept set of each position.

    ``z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature`` as in `linear_logprob`. Both results are
    differentiable, once, in hidden, weight, bias and adapter. Of the vocabulary's size there is only the accumulator
    for the gradient of a weight that trains: V x H in fp32 (fp64), once per backward (and V for the bias).

    Args:
        hidden, weight, ids, bias, mask: (..., H), (V, H), (...), (V,) and (...), as in `linear_logprob`.
        temperature, final_logit_softcapping, logit_scale, logits_dtype: likewise. Operands are used as stored (under
            autocast rounded to its dtype), products are fp32.
        lora, process_group, vocab_size: likewise. With a divided head, ids, sets and hidden states are the same on
            every rank, each of which projects the ids of its own rows; they send each other four numbers a position,
            and sum d hidden.
        kept_ids: the sets: `KeptIds`; or (..., K) signed integers, the ids that the sampler kept, padded with -1. They
            are read only where the mask counts. Their order does not matter, and a repeated id counts once.
        without_set: ``"error"``: each set must hold the sampled id. ``"full"``: a position whose set is empty, or lacks
            the sampled id, is scored over the whole vocabulary, as in prime-rl, and costs as in `linear_logprob`.
        entropy: True: the entropy over the set; ``"full"``: over the whole vocabulary, 2NVH floating point operations
            more; False: none.
        expected, engine, backend: as in `linear_logprob`, for the positions that are scored over the whole vocabulary.
        workspace_bytes: bound on temporary memory, exceeded only if it is too small to sort one position's set (64 K
            bytes). None: 64 MiB for the sets, and for the whole vocabulary as in `linear_logprob`. Besides it, 8 bytes
            for each (position, kept id) stay from forward to backward (12 in fp64).
        gather: makes the context in which a backward reads the weight again, as in `linear_logprob_with`.

    Returns:
        logps (...) and entropies (...), fp32 (fp64 for fp64 inputs), 0 where masked; the second None if not asked for.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done. On a CPU that
            includes a kept id that is neither -1 nor in [0, V), and a sampled id outside its set; on other devices that
            position's results are NaN.

    The host reads the sizes of the sets. Under torch.compile the graph breaks here.
    """
    head = LMHead(hidden, weight, bias, lora, process_group, vocab_size)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale, logits_dtype)
    execution = Execution(engine, backend, workspace_bytes, gather)
    inputs = KeptInputs(mask, (), ids, kept_ids, without_set, entropy, execution, expected)
    return kept_logprob(inputs, head, options)
