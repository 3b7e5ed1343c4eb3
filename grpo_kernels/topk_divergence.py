"""Divergences from a teacher that gives K log-probabilities per position, straight from hidden states.

Inference servers return a teacher's K most likely ids and their log-probabilities, not its hidden states. With q_k the
teacher's probabilities of these ids, p_k the student's, both over the whole vocabulary, and q_r = 1 - sum_k q_k and
p_r = 1 - sum_k p_k what is left for the other ids, the tail::

    forward_kl               D = sum_k q_k log(q_k / p_k)
    forward_kl with a tail   D = sum_k q_k log(q_k / p_k) + q_r log(q_r / p_r)
    reverse_kl with a tail   D = sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

With a tail D is a divergence of two distributions over K + 1 outcomes: never negative, and 0 only where they agree.
Without one the forward KL has no such bound. The logits of a chunk of rows are computed once, and the gradient of D
from them: the products of one head in one pass, whatever K is.
"""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.base.choices import TopKDivergenceName
from grpo_kernels.call.module_head import takes_heads
from grpo_kernels.call.output import Scores
from grpo_kernels.call.run import Execution, Run
from grpo_kernels.call.scores import score
from grpo_kernels.call.top_k import TopKCall
from grpo_kernels.head.head import Head, HeadLike
from grpo_kernels.head.lm_head import LMHead


@takes_heads
def topk_divergence(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    teacher_ids: Tensor,  # (..., K)
    teacher_logps: Tensor,  # (..., K)
    *,
    mask: Tensor | None = None,  # (...)
    divergence: TopKDivergenceName = "forward_kl",
    tail: bool | None = None,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    temperature: float | Tensor = 1.0,
    expected: Tensor | None = None,  # (...)
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """The divergence of each position from the teacher's K ids there, differentiable once.

    The student's logits are the head's (`Head`) divided by the temperature. Gradients go to hidden states, weight, bias
    and adapter. Values at masked positions are never read.

    Args:
        hidden, head, mask, temperature: (..., H), the student's head, (...) and a number or (...), as in
            `linear_logprob`.
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
        expected: the upstream gradient of each divergence, up to one common factor; None: the same for all. Where it is
            right, it saves the recomputation; the gradient is exact in any case.
        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `divergence`, and without gradient `student_mass`, sum_k p_k.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done. On a CPU that
            includes an id that is neither -1 nor in [0, V); on other devices that position's results are NaN.
    """
    call = TopKCall(
        mask,
        temperature,
        (),
        None,
        expected,
        teacher_ids=teacher_ids,
        teacher_logps=teacher_logps,
        divergence=divergence,
        tail=tail,
        log_prob_min_clamp=log_prob_min_clamp,
        loss_max_clamp=loss_max_clamp,
    )
    return score(call, LMHead.of_call(hidden, Head.of(head)), Execution.of(run))
