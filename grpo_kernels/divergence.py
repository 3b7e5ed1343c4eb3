"""Divergences of a student's distributions from a teacher's over the whole vocabulary, straight from hidden states.

On-policy distillation (https://arxiv.org/abs/2306.13649) moves a student towards a teacher on the student's samples::

    reverse_kl    D = KL(p || q) = sum_v p_v log(p_v / q_v)             p the student's, q the teacher's probabilities
    forward_kl    D = KL(q || p)
    jsd           D = (1 - beta) KL(p || m) + beta KL(q || m)           m = (1 - beta) p + beta q

Both heads' logits of a chunk of rows are in memory once. The gradient of D, which is linear in the upstream gradient,
is computed on them for the expected one, and scaled in the backward. Products: 8NVH with a head that trains (TRL's
kernel: 12, and 16 for "jsd" with 0 < beta < 1), 6 with a frozen one, 4 without gradients. How the sums are written so
that nothing cancels where p and q nearly agree: `grpo_kernels.backends.divergence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.base.choices import BackendName, DivergenceName, DivergenceOutput, EngineName, LogitsDtype
from grpo_kernels.call.divergence import DivergenceInputs, beta_of
from grpo_kernels.call.expected import Expectation
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.plan import plan_call
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.lora import LoRA
from grpo_kernels.head.reference import ReferenceHead

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import DivergenceKeywords


def linear_divergence(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (..., H')
    teacher_weight: Tensor,  # (V', H')
    *,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V',)
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """The divergence of each position, (...): the result ``"divergence"`` of `linear_divergence_with`.

    Args:
        hidden, weight, bias: (..., H), (V, H) and (V,), the student's.
        teacher_hidden, teacher_weight, teacher_bias: (..., H'), (V', H') and (V',), the teacher's.
        options: the other arguments of `linear_divergence_with` but `outputs` and `ids`: mask, divergence, beta,
            temperature, final_logit_softcapping, ...

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.
    """
    for name in ("outputs", "ids"):
        if name in options:
            raise TypeError(
                f"linear_divergence() got an unexpected keyword argument {name!r}; linear_divergence_with has it"
            )
    found = linear_divergence_with(
        hidden, weight, teacher_hidden, teacher_weight, bias=bias, teacher_bias=teacher_bias, **options
    )
    return found["divergence"]


def linear_divergence_with(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (..., H')
    teacher_weight: Tensor,  # (V', H')
    *,
    mask: Tensor | None = None,  # (...)
    divergence: DivergenceName = "reverse_kl",
    beta: float | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V',)
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    outputs: tuple[DivergenceOutput, ...] = (),
    ids: Tensor | None = None,  # (...)
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None = None,  # (...)
    logits_dtype: LogitsDtype = "float32",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
    gather: Gather | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> dict[str, Tensor]:
    """The divergence of each position, and the student's `outputs` from the same pass, all differentiable once.

    The logits of each head are ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, with its own scale
    and soft-cap and the same temperature. Gradients go to the student's hidden states, weight, bias and adapter; the
    teacher's tensors are constants. Values at masked positions are never read.

    Args:
        hidden, weight, bias, mask: (..., H), (V, H), (V,) and (...), the student's, as in `linear_logprob`.
        lora, logits_dtype, workspace_bytes, gather: as in `linear_logprob_with`.
        teacher_hidden, teacher_weight, teacher_bias: (..., H'), (V', H') and (V',), the teacher's, at the same
            positions. H' may differ from H, and V' from V: both distributions are then over the ids that both heads
            have, the first min(V, V'), alone.
        divergence: ``"reverse_kl"``, ``"forward_kl"`` or ``"jsd"``.
        beta: for ``"jsd"``: TRL's beta, in [0, 1], by default 0.5; 0 is the forward and 1 the reverse KL.
        temperature: a number, or one per position.
        final_logit_softcapping, logit_scale: of the student's logits.
        teacher_final_logit_softcapping, teacher_logit_scale: of the teacher's.
        outputs: ``"entropy"``, that of the student's distribution, and ``"logps"``, its log-probabilities of `ids`.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same for all, as from a
            sum or a mean. Where it is right, it saves the recomputation; the gradient is exact in any case. With
            ``"logps"`` among the outputs it may be a pair, of the divergences and of the log-probabilities. It may also
            be an `Expectation`, which has the entropies too.
        engine: one of `grpo_kernels.typing.EngineName` but ``"score_dot"``.
        backend: one of `grpo_kernels.typing.BackendName`.
        process_group: as in `linear_logprob`; it divides both heads, into the same ids on each rank.
        vocab_size: number of ids; the rows of both heads from there on are padding. None: the ids that both heads have;
            with a process group, whose ranks do not see whole heads, both heads must have the same number.

    Returns:
        ``"divergence"`` and `outputs`, each (...), fp32 (fp64 for fp64 inputs), 0 where masked. A divergence is inf
        only where it must be: the reverse KL where the teacher rules out an id that the student does not.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.

    Under torch.compile the graph breaks here. A CUDA graph can be captured without a mask; there a head that trains
    takes two passes.
    """
    reference = ReferenceHead(
        teacher_hidden, teacher_weight, teacher_bias, teacher_final_logit_softcapping, teacher_logit_scale, "teacher_"
    )
    if vocab_size is None and process_group is None:
        vocab_size = _common_ids(weight, teacher_weight)
    inputs = DivergenceInputs(mask, outputs, ids, expected, beta_of(divergence, beta))
    head = LMHead(hidden, weight, bias, lora, process_group, vocab_size, reference)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale, logits_dtype)
    execution = Execution(engine, backend, workspace_bytes, gather)
    if torch.compiler.is_compiling():
        from grpo_kernels.call import compiled  # not at import: it loads the compiler

        return compiled.eagerly(_diverge, inputs, head, execution, options)
    return _diverge(inputs, head, execution, options)


def _common_ids(weight: Any, teacher_weight: Any) -> int | None:
    """Return the number of ids that both heads have; None if the heads are equally long, or either is no matrix."""
    heads = (weight, teacher_weight)
    plain = all(isinstance(x, Tensor) and not is_dtensor(x) and x.dim() == 2 for x in heads)
    if not plain or weight.shape[0] == teacher_weight.shape[0]:
        return None
    return int(min(weight.shape[0], teacher_weight.shape[0]))


def _diverge(inputs: DivergenceInputs, head: LMHead, execution: Execution, options: HeadOptions) -> dict[str, Tensor]:
    """Plan the call, run one forward, and return the results in the shape of the positions."""
    head, request = plan_call(inputs, head, execution, options)
    operands = head.operands(request.rows.positions)
    logps, entropies, divergences, *_ = LinearLogprob.apply(request, operands.teacher, *operands)
    found = {"divergence": divergences, "entropy": entropies, "logps": logps}
    shape = head.hidden.shape[:-1]
    return {name: found[name].view(shape) for name in ("divergence", *inputs.outputs)}
