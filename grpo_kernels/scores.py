"""Numbers per position straight from hidden states, differentiable, for other losses to build on.

With an expected upstream gradient, d hidden and d weight are computed in the forward, from logits
that are there anyway. The backward finds the factor c between the expected and the upstream
gradient, and recomputes only the rows where they do not fit. So the gradient is always exact, and a
right expectation saves the recomputation.

**Kept sets.** A sampler that cuts the distribution (top-k, top-p, min-p) draws y from the softmax
over its kept set S, the ids that it did not cut. The policy trained on y has the same support only
if its own log-probabilities are taken over S too (https://arxiv.org/abs/2512.02556, keep sampling
mask)::

    logp = z_y - log sum_{j in S} exp z_j

Only the head's rows of S are read. They are gathered for some positions at a time and multiplied
with the hidden states of these positions. There are three products: one in the forward, one for d
hidden, one for d weight. With N positions of K ids each takes 2NKH floating point operations; with
an adapter of rank r on the head 2NK(H + r). Positions are sorted by falling size of their sets, so
that short sets get little padding. An id that is alone in its set has log-probability 0 whatever
its logit is, and costs nothing.

**A teacher's distribution.** On-policy distillation (https://arxiv.org/abs/2306.13649) moves a
student towards a teacher on the student's samples::

    reverse_kl    D = KL(p || q) = sum_v p_v log(p_v / q_v)       p the student's, q the teacher's
    forward_kl    D = KL(q || p)
    jsd           D = (1 - beta) KL(p || m) + beta KL(q || m)     m = (1 - beta) p + beta q

Both heads' logits of a chunk of rows are computed once. The gradient of D, which is linear in the
upstream gradient, is computed from them for the expected one, and scaled in the backward. So each
row takes two products for the logits, and one each for d hidden and d weight.
`grpo_kernels.backends.divergence` says how the sums are written so that nothing cancels where p and
q nearly agree.

**A teacher's K ids.** Inference servers return a teacher's K most likely ids and their
log-probabilities, not its hidden states. With q_k the teacher's probabilities of these ids, p_k the
student's, both over the whole vocabulary, and q_r = 1 - sum_k q_k and p_r = 1 - sum_k p_k what is
left for the other ids, the tail::

    forward_kl               D = sum_k q_k log(q_k / p_k)
    forward_kl with a tail   D = sum_k q_k log(q_k / p_k) + q_r log(q_r / p_r)
    reverse_kl with a tail   D = sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

With a tail D is a divergence of two distributions over K + 1 outcomes: never negative, and 0 only
where they agree. Without one the forward KL has no such bound. The logits of a chunk of rows are
computed once, and the gradient of D from them: the products of one head in one pass, whatever K is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.checks import check_ids, is_dtensor
from grpo_kernels.base.choices import DivergenceName, Extra, TopKDivergenceName, WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds, check_without_set
from grpo_kernels.call.doors import takes_heads, whole_reference
from grpo_kernels.call.expected import (
    Expectation,
    Expected,
    ExpectedRows,
    divergence_weights,
    read_expected,
)
from grpo_kernels.call.kept import Kept, score_kept
from grpo_kernels.call.plan import Run, planned
from grpo_kernels.call.results import Scores
from grpo_kernels.call.rows import (
    beta_of,
    check_listed,
    expected_divergence,
    measure_of,
    no_ids,
    read_rows,
    request_of,
    scored,
    with_listed,
    with_topk,
)
from grpo_kernels.engine.top_k import TOPK_LOGPS
from grpo_kernels.head.head import Head, HeadLike
from grpo_kernels.head.lm_head import LMHead, OtherHead
from grpo_kernels.token_loss.record import Coefficients


@takes_heads
def linear_logprob(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    ids: Tensor,  # (...)
    *,
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["full"] = True,
    extras: tuple[Extra, ...] = (),
    expected: Expected | None = None,
    topk_ids: Tensor | None = None,  # (..., K)
    # the sampler
    kept_ids: Tensor | KeptIds | None = None,  # (..., K)
    without_set: WithoutSet = "error",
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """Log-probabilities and entropies, without the (tokens, vocabulary) logits in memory.

    They are ``log softmax(z)[id]`` and the entropy of ``softmax(z)``; z are the head's logits
    (`Head`) divided by the temperature. With `kept_ids` both are over the set of each position.
    Results are differentiable, once, in hidden states, weight, bias and adapter.

    Args:
        hidden: (..., H) hidden states, aligned with `ids`: the library never shifts.
        head: a weight (V, H), a `Head`, or the model's head module.
        ids: (...) integers, the tokens to score; read only where the mask counts. (A loss calls
            them `completion_ids`, and their mask `completion_mask`.)
        mask: (...) bool, int or float; non-zero counts, NaN is refused. None: every position
            counts.
        temperature: a number, or one per position, shaped like `ids`; a constant, without gradient.
        entropy: False to leave out the entropy. With `kept_ids` it is over the set; ``"full"``:
            over the whole vocabulary, for one more product with the head.
        extras: further results of the same pass, without gradient: ``"log_sum_sq_probs"``,
            ``"mean_logits"``, ``"is_top1"``, see `Scores`. Not with `kept_ids`.
        expected: the upstream gradient that will arrive, up to one common factor: a = d loss / d
            logp shaped like `ids`; or (a, b) with b = d loss / d entropy or None; or an
            `Expectation`, or just its function. The gradient is exact whatever is expected. With
            `kept_ids`, for the positions that are scored over the whole vocabulary. Not with
            `topk_ids`.
        topk_ids: (..., K) signed integers, padded with -1, in any order: more ids to score at each
            position, from the same pass, as `topk_logps`: a sampler's candidates
            (https://arxiv.org/abs/2609.20807). Not with `kept_ids`: over a set S the
            log-probabilities are ``topk_logps - topk_logps.logsumexp(-1, keepdim=True)`` where
            `topk_ids` are S.

        The sampler:

        kept_ids: the kept set of each position, that is the ids that a truncating sampler (top-k,
            top-p, min-p) did not cut: `KeptIds`; or (..., K) signed integers padded with -1. They
            are read only where the mask counts. Their order does not matter, and a repeated id
            counts once. Operands are used as stored (under autocast rounded to its dtype), products
            are fp32. Of the vocabulary's size there is only the accumulator for the gradient of a
            weight that trains: V x H in fp32 (fp64), once per backward (and V for the bias).
            Besides the workspace, 8 bytes for each (position, kept id) stay from forward to
            backward (12 in fp64). The host reads the sizes of the sets. With a divided head the
            sets, too, are the same on every rank.
        without_set: treatment of a position without a set. ``"error"``: each set must hold the
            sampled id. ``"full"``: a position whose set is empty, or lacks the sampled id, is
            scored over the whole vocabulary, as in prime-rl, and costs as without sets.

        How it is computed:

        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `logps`, `entropies` unless `entropy` is False, the `extras`, and `topk_logps`
        where there are `topk_ids`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done. On a CPU that includes an id of `kept_ids` or `topk_ids` that is neither -1 nor in
            [0, V), and a sampled id outside its set; on other devices that position's results are
            NaN.
    """
    if kept_ids is None:
        check_without_set(without_set)
        if not isinstance(entropy, bool):
            raise TypeError(f"entropy: expected a bool without kept_ids, got {entropy!r}")
    elif extras:
        raise ValueError(f"extras: expected none with kept_ids, got {extras}")
    if topk_ids is not None:
        for name, x in (("kept_ids", kept_ids), ("expected", expected)):
            if x is not None:
                raise ValueError(f"{name}: expected None with topk_ids, got {type(x).__name__}")
    # what the ranks of a divided head compare, as in the other calls
    given: dict[str, Any] = {"ids": ids, "mask": mask, "temperature": temperature}
    given |= {"entropy": entropy, "extras": extras, "expected": expected}
    given |= {"topk_ids": topk_ids, "kept_ids": kept_ids, "without_set": without_set}
    with planned("linear_logprob", LMHead.of_call(hidden, head), run, given) as call:
        call.head.check()
        check_ids("ids", ids, call.head.hidden)
        if unknown := {*extras} - {*STATISTICS}:
            named = ", ".join(STATISTICS)
            raise ValueError(f"extras: expected some of {named}, got {sorted(unknown)}")
        if topk_ids is not None:
            check_listed("topk_ids", topk_ids, call.head.hidden)
        kept = None
        if kept_ids is not None:
            kept = Kept.of(kept_ids, without_set, ids, entropy=entropy)
        call.make_plan(backend=None if kept is None else "torch")
        call.rows = read_rows(call, ids, mask, temperature)
        # also where few rows, or none, may need it
        gradient = read_expected(
            expected, ids, call.rows.positions, call.plan.accumulator, entropy=bool(entropy)
        )
    if kept is not None:
        return score_kept(call, kept, expected)[0]
    rows = call.check_range("ids", call.rows)
    if topk_ids is not None:
        rows, _ = with_topk(call, rows, "topk_ids", topk_ids)
    names = extras if topk_ids is None else (*extras, TOPK_LOGPS)
    request = request_of(call, rows, gradient, entropy=bool(entropy), extras=names)
    return scored(call, request)


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
    """The divergence of each position, and more of the student from the same pass, all
    differentiable once.

    Each head has logits of its own (`Head`); both are divided by the same temperature. Gradients go
    to the student's hidden states, weight, bias and adapter; the teacher's tensors are constants.
    Values at masked positions are never read.

    Args:
        hidden, head, mask: (..., H), the student's head and (...), as in `linear_logprob`.
        teacher_hidden: (..., H'), the teacher's hidden states at the same positions. H' may differ
            from H.
        teacher_head: the teacher's head: a weight (V', H'), a `Head` without adapter, or a module
            without active adapters, which is gathered for this call if FSDP2 or ZeRO-3 has divided
            it: all ranks that share it must then make the call. V' may differ from V, and the
            heads' ``vocab_size``: both distributions are then over the ids that both heads have,
            the first ones, alone. A process group divides both heads, into the same ids on each
            rank; its ranks do not see whole heads, so that both must have the same number of ids,
            or the same ``vocab_size``.
        divergence: ``"reverse_kl"``, ``"forward_kl"`` or ``"jsd"``.
        beta: for ``"jsd"``: TRL's beta, in [0, 1], by default 0.5; 0 is the forward and 1 the
            reverse KL.
        temperature: a number, or one per position.
        entropy: True to compute the entropy of the student's distribution.
        ids: (...) tokens whose log-probabilities under the student to compute; None: none.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same
            for all, as from a sum or a mean. Where it is right, it saves the recomputation; the
            gradient is exact in any case. With `ids` it may be a pair, of the divergences and of
            the log-probabilities. It may also be an `Expectation`, which has the entropies too.
        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `divergence`, and `entropies` and `logps` if they are asked for. A divergence
        is inf only where it must be: the reverse KL where the teacher rules out an id that the
        student does not.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done.

    A CUDA graph can be captured without a mask; there a head that trains takes two passes.
    """
    jsd_beta = beta_of(divergence, beta)
    teacher = OtherHead(teacher_hidden, teacher_head, "teacher_")
    given: dict[str, Any] = {"mask": mask, "divergence": divergence, "beta": beta}
    given |= {"temperature": temperature, "entropy": entropy, "ids": ids, "expected": expected}
    with whole_reference(LMHead.of_call(hidden, head, teacher)) as student:
        if student.process_group is None:
            student = _over_common_ids(student)
        with planned("linear_divergence", student, run, given) as call:
            call.head.check()
            if ids is not None:
                check_ids("ids", ids, call.head.hidden)
            call.make_plan(jsd_beta=jsd_beta)
            some_ids = no_ids(call.head.hidden) if ids is None else ids
            call.rows = read_rows(call, some_ids, mask, temperature)
            gradient = expected_divergence(call, call.rows, expected, ids, entropy=entropy)
        rows = call.check_range("ids", call.rows)
        request = request_of(call, rows, gradient, entropy=entropy)
        return scored(call, request, has_ids=ids is not None)


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

    The student's logits are the head's (`Head`) divided by the temperature. Gradients go to hidden
    states, weight, bias and adapter. Values at masked positions are never read.

    Args:
        hidden, head, mask, temperature: (..., H), the student's head, (...) and a number or (...),
            as in `linear_logprob`.
        teacher_ids: (..., K) signed integers, padded with -1, in any order. A repeated id counts
            once, with its first log-probability.
        teacher_logps: (..., K), natural logarithms, of a softmax over the whole vocabulary at the
            teacher's own temperature: they are used as they come. An entry of -inf is padding.
        divergence: ``"forward_kl"``, KL(teacher || student), or ``"reverse_kl"``, KL(student ||
            teacher).
        tail: True: the other ids count as one more outcome. None: True for ``"reverse_kl"``, which
            needs it, else False. The tail's probability is clamped to at least eps of the dtype of
            `teacher_logps` or of the result, whichever is coarser: nothing smaller is known.
        log_prob_min_clamp: lower bound to which both log-probabilities are clamped; an id whose
            student log-probability is below it gives no gradient. Only for the forward KL without a
            tail.
        loss_max_clamp: bound to which |D| is clamped; a position where it is reached gives no
            gradient.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same
            for all. Where it is right, it saves the recomputation; the gradient is exact in any
            case.
        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `divergence`, and without gradient `student_mass`, sum_k p_k.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done. On a CPU that includes an id that is neither -1 nor in [0, V); on other devices
            that position's results are NaN.
    """
    measured = (divergence, tail, log_prob_min_clamp, loss_max_clamp)
    given: dict[str, Any] = {"teacher_ids": teacher_ids, "teacher_logps": teacher_logps}
    given |= {"mask": mask, "temperature": temperature, "expected": expected}
    given["divergence, tail, clamps"] = measured
    with planned("topk_divergence", LMHead.of_call(hidden, head), run, given) as call:
        call.head.check()
        states = call.head.hidden
        check_listed("teacher_ids", teacher_ids, states, teacher_logps)
        call.make_plan()
        call.rows = read_rows(call, no_ids(states), mask, temperature)
        dtype = call.plan.accumulator
        weights = divergence_weights("expected", expected, states, call.rows.positions, dtype)
        measure = measure_of(*measured, dtype, teacher_logps.dtype)
    rows = with_listed(call, teacher_ids, teacher_logps, measure)
    gradient = ExpectedRows.of(Coefficients(d_divergence=weights))
    request = request_of(call, rows, gradient, entropy=False, extras=("student_mass",))
    return scored(call, request, has_ids=False)


def _over_common_ids(head: LMHead) -> LMHead:
    """Return both heads with the `vocab_size` of the shorter one, if they differ and are valid."""
    other = head.reference
    assert other is not None
    teacher = Head.of(other.head)
    sizes: set[Any] = {head.vocab_size, teacher.vocab_size} - {None}
    weights = (head.weight, teacher.weight)
    if all(isinstance(x, Tensor) and not is_dtensor(x) and x.dim() == 2 for x in weights):
        rows = {x.shape[0] for x in weights}
        sizes |= rows if len(rows) > 1 else set()
    if not sizes or not all(isinstance(x, int) for x in sizes):
        return head
    if isinstance(other.head, Head):
        other = replace(other, head=replace(teacher, vocab_size=None))
    return replace(head, vocab_size=min(sizes), reference=other)
