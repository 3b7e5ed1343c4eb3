"""Divergences of a student's distributions from a teacher's over the whole vocabulary, straight from hidden states.

On-policy distillation (https://arxiv.org/abs/2306.13649) moves a student towards a teacher on the student's samples::

    reverse_kl    D = KL(p || q) = sum_v p_v log(p_v / q_v)             p the student's, q the teacher's probabilities
    forward_kl    D = KL(q || p)
    jsd           D = (1 - beta) KL(p || m) + beta KL(q || m)           m = (1 - beta) p + beta q

Both heads' logits of a chunk of rows are computed once. The gradient of D, which is linear in the upstream gradient, is
computed from them for the expected one, and scaled in the backward. So each row takes two products for the logits, and
one each for d hidden and d weight. `grpo_kernels.backends.divergence` says how the sums are written so that nothing
cancels where p and q nearly agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.base.choices import DivergenceName
from grpo_kernels.call.divergence import DivergenceCall, beta_of
from grpo_kernels.call.expected import Expectation
from grpo_kernels.call.module_head import takes_heads, whole_reference
from grpo_kernels.call.output import Scores
from grpo_kernels.call.run import Execution, Run
from grpo_kernels.call.scores import score
from grpo_kernels.head.head import Head, HeadLike
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.other_head import OtherHead


@takes_heads
def linear_divergence(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    teacher_hidden: Tensor,  # (..., H')
    teacher_head: HeadLike,
    *,
    mask: Tensor | None = None,  # (...)
    divergence: DivergenceName = "reverse_kl",
    beta: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    ids: Tensor | None = None,  # (...)
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None = None,  # (...)
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """The divergence of each position, and more of the student from the same pass, all differentiable once.

    Each head has logits of its own (`Head`); both are divided by the same temperature. Gradients go to the student's
    hidden states, weight, bias and adapter; the teacher's tensors are constants. Values at masked positions are never
    read.

    Args:
        hidden, head, mask: (..., H), the student's head and (...), as in `linear_logprob`.
        teacher_hidden: (..., H'), the teacher's hidden states at the same positions. H' may differ from H.
        teacher_head: the teacher's head: a weight (V', H'), a `Head` without adapter, or a module without active
            adapters, which is gathered for this call if FSDP2 or ZeRO-3 has divided it: all ranks that share it must
            then make the call. V' may differ from V, and the heads' ``vocab_size``: both distributions are then over
            the ids that both heads have, the first ones, alone. A process group divides both heads, into the same ids
            on each rank; its ranks do not see whole heads, so that both must have the same number of ids, or the same
            ``vocab_size``.
        divergence: ``"reverse_kl"``, ``"forward_kl"`` or ``"jsd"``.
        beta: for ``"jsd"``: TRL's beta, in [0, 1], by default 0.5; 0 is the forward and 1 the reverse KL.
        temperature: a number, or one per position.
        entropy: True to compute the entropy of the student's distribution.
        ids: (...) tokens whose log-probabilities under the student to compute; None: none.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same for all, as from a
            sum or a mean. Where it is right, it saves the recomputation; the gradient is exact in any case. With `ids`
            it may be a pair, of the divergences and of the log-probabilities. It may also be an `Expectation`, which
            has the entropies too.
        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `divergence`, and `entropies` and `logps` if they are asked for. A divergence is inf only where it
        must be: the reverse KL where the teacher rules out an id that the student does not.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.

    A CUDA graph can be captured without a mask; there a head that trains
    takes two passes.
    """
    outputs = ("entropy",) if entropy else ()
    call = DivergenceCall(mask, temperature, outputs, ids, expected, beta_of(divergence, beta))
    student = LMHead.of_call(
        hidden, Head.of(head), OtherHead(teacher_hidden, teacher_head, "teacher_")
    )
    return _diverge(call, student, Execution.of(run))


def _diverge(call: DivergenceCall, head: LMHead, execution: Execution) -> Scores:
    """Compute the divergence over the ids that both heads have."""
    with whole_reference(head) as whole:
        return score(
            call, whole if whole.process_group is not None else _over_common_ids(whole), execution
        )


def _over_common_ids(head: LMHead) -> LMHead:
    """Return both heads with the `vocab_size` of the shorter one, if they differ and are valid."""
    other = head.reference
    assert other is not None
    teacher = Head.of(other.head)
    sizes: set[Any] = {x.vocab_size for x in (head, teacher)} - {None}
    weights = (head.weight, teacher.weight)
    if all(isinstance(x, Tensor) and not is_dtensor(x) and x.dim() == 2 for x in weights):
        rows = {x.shape[0] for x in weights}
        sizes |= rows if len(rows) > 1 else set()
    if not sizes or not all(isinstance(x, int) for x in sizes):
        return head
    if isinstance(other.head, Head):
        other = replace(other, head=replace(teacher, vocab_size=None))
    return replace(head, vocab_size=min(sizes), reference=other)
