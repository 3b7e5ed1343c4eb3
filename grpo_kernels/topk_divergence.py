"""Divergences from a teacher that gives K log-probabilities per position, straight from hidden states.

Inference servers return a teacher's K most likely ids and their log-probabilities, not its hidden states. With q_k the
teacher's probabilities of these ids, p_k the student's, both over the whole vocabulary, and q_r = 1 - sum_k q_k and
p_r = 1 - sum_k p_k what is left for the other ids, the tail::

    forward_kl               D = sum_k q_k log(q_k / p_k)
    forward_kl with a tail   D = sum_k q_k log(q_k / p_k) + q_r log(q_r / p_r)
    reverse_kl with a tail   D = sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

With a tail D is a divergence of two distributions over K + 1 outcomes: never negative, and 0 only where they agree.
Without one the forward KL has no such bound. The logits of a chunk of rows are in memory once, and the gradient of D is
computed on them. Products: 6NVH with a head that trains, 4 with a frozen one, 2 without gradients, whatever K is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.base.choices import BackendName, EngineName, LogitsDtype, TopKDivergenceName, TopKOutput
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.plan import plan_call
from grpo_kernels.call.top_k import TopKInputs
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.lora import LoRA

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import TopKKeywords


def topk_divergence(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    teacher_ids: Tensor,  # (..., K)
    teacher_logps: Tensor,  # (..., K)
    *,
    bias: Tensor | None = None,  # (V,)
    **options: Unpack[TopKKeywords],
) -> Tensor:
    """The divergence of each position, (...): the result ``"divergence"`` of `topk_divergence_with`.

    Args:
        hidden, weight, bias: (..., H), (V, H) and (V,), the student's.
        teacher_ids, teacher_logps: (..., K), as in `topk_divergence_with`.
        options: the other arguments of `topk_divergence_with` but `outputs`: mask, divergence, tail, temperature, ...

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.
    """
    if "outputs" in options:
        raise TypeError("topk_divergence() got an unexpected keyword argument 'outputs'; topk_divergence_with has it")
    return topk_divergence_with(hidden, weight, teacher_ids, teacher_logps, bias=bias, **options)["divergence"]


def topk_divergence_with(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    teacher_ids: Tensor,  # (..., K)
    teacher_logps: Tensor,  # (..., K)
    *,
    mask: Tensor | None = None,  # (...)
    divergence: TopKDivergenceName = "forward_kl",
    tail: bool | None = None,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,  # (V,)
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[TopKOutput, ...] = (),
    expected: Tensor | None = None,  # (...)
    logits_dtype: LogitsDtype = "float32",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
    gather: Gather | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> dict[str, Tensor]:
    """The divergence of each position from the teacher's K ids there, differentiable once, and the `outputs`.

    The student's logits are ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``. Gradients go to hidden
    states, weight, bias and adapter. Values at masked positions are never read.

    Args:
        hidden, weight, bias, mask: (..., H), (V, H), (V,) and (...), the student's, as in `linear_logprob`.
        temperature, final_logit_softcapping, logit_scale, logits_dtype: as in `linear_logprob_with`.
        workspace_bytes, gather, lora, process_group, vocab_size: likewise.
        teacher_ids: (..., K) signed integers, padded with -1, in any order. A repeated id counts once, with its first
            log-probability.
        teacher_logps: (..., K), natural logarithms, of a softmax over the whole vocabulary at the teacher's own
            temperature: they are used as they come. An entry of -inf is padding.
        divergence: ``"forward_kl"``, KL(teacher || student), or ``"reverse_kl"``, KL(student || teacher).
        tail: True: the other ids count as one more outcome. None: True for ``"reverse_kl"``, which needs it, else
            False. The tail's probability is clamped to at least eps of the dtype of `teacher_logps` or of the result,
            whichever is coarser: nothing smaller is known.
        log_prob_min_clamp: lower bound to which both log-probabilities are clamped; an id whose student log-probability
            is below it gives no gradient. Only for the forward KL without a tail.
        loss_max_clamp: bound to which |D| is clamped; a position where it is reached gives no gradient.
        outputs: ``"student_mass"``, sum_k p_k, without gradient.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same for all. Where it is
            right, it saves the recomputation; the gradient is exact in any case.
        engine: one of `grpo_kernels.typing.EngineName` but ``"score_dot"``.
        backend: one of `grpo_kernels.typing.BackendName`.

    Returns:
        ``"divergence"`` and `outputs`, each (...), fp32 (fp64 for fp64 inputs), 0 where masked.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done. On a CPU that
            includes an id that is neither -1 nor in [0, V); on other devices that position's results are NaN.

    Under torch.compile the graph breaks here.
    """
    inputs = TopKInputs(
        mask,
        outputs,
        teacher_ids,
        teacher_logps,
        expected,
        divergence,
        tail,
        log_prob_min_clamp,
        loss_max_clamp,
    )
    head = LMHead(hidden, weight, bias, lora, process_group, vocab_size)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale, logits_dtype)
    execution = Execution(engine, backend, workspace_bytes, gather)
    if torch.compiler.is_compiling():
        from grpo_kernels.call import compiled  # not at import: it loads the compiler

        return compiled.eagerly(_diverge, inputs, head, execution, options)
    return _diverge(inputs, head, execution, options)


def _diverge(inputs: TopKInputs, head: LMHead, execution: Execution, options: HeadOptions) -> dict[str, Tensor]:
    """Plan the call, run one forward, and return the results in the shape of the positions."""
    head, request = plan_call(inputs, head, execution, options)
    operands = head.operands(request.rows.positions)
    _, _, divergences, *extras = LinearLogprob.apply(request, operands.teacher, *operands)
    found = {"divergence": divergences, **dict(zip(request.extras, extras, strict=True))}
    shape = head.hidden.shape[:-1]
    return {name: found[name].view(shape) for name in ("divergence", *inputs.outputs)}
