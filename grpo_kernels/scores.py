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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_kernels.backends import choose_backend
from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.checks import (
    check_choice,
    check_ids,
    check_mask,
    check_number,
    check_on_missing_set,
    check_shape,
    check_signed_ids,
    check_tensor,
    is_dtensor,
)
from grpo_kernels.base.choices import (
    DivergenceName,
    Extra,
    OnMissingSet,
    TopKDivergenceName,
    choices,
)
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.autograd import LinearLogprob, scatter
from grpo_kernels.engine.kept import WORKSPACE_BYTES, KeptSetLogprob, plan_sets, survey_sets
from grpo_kernels.engine.plan import Job, Rows, Run, begin, choose_engine, in_range, plan, together
from grpo_kernels.engine.sweep import first_pass
from grpo_kernels.engine.top_k import TopKLogps, TopKTeacher
from grpo_kernels.head import (
    Head,
    HeadLike,
    Tensors,
    read_heads,
    takes_heads,
    with_its_group,
)
from grpo_kernels.kept_ids import KeptIds, read_kept_ids
from grpo_kernels.module import whole_reference, within_module
from grpo_kernels.objective.expected import (
    Expectation,
    Expected,
    ExpectedGradient,
    divergence_weights,
    expected_divergence,
    read_expected,
)
from grpo_kernels.results import Scores
from grpo_kernels.token_loss.record import TOPK_LOGPS, Coefficients
from grpo_kernels.tokens import counted_positions

_ON_MISSING_SET = choices(OnMissingSet)


@takes_heads(within_module)
def linear_logprob(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    completion_ids: Tensor,  # (...)
    completion_mask: Tensor | None = None,  # (...)
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["full"] = True,
    extras: tuple[Extra, ...] = (),
    expected: Expected | None = None,
    topk_ids: Tensor | None = None,  # (..., K)
    # the sampler
    kept_ids: Tensor | KeptIds | None = None,  # (..., K)
    on_missing_set: OnMissingSet = "error",
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """Compute log-probabilities and entropies, without the (tokens, vocabulary) logits.

    ::

        scores = linear_logprob(hidden, model.lm_head, completion_ids, completion_mask)
        scores.logps, scores.entropies  # shaped like completion_ids

    They are ``log softmax(z)[id]`` and the entropy of ``softmax(z)``; z are the head's logits
    (`Head`) divided by the temperature. With `kept_ids` both are over the set of each position.
    Results are differentiable, once, in hidden states, weight, bias and adapter.

    Args:
        hidden: (..., H) hidden states, aligned with `completion_ids`: nothing is shifted here.
        head: a weight (V, H), a `Head`, or the model's head module.
        completion_ids: (...) integers, the tokens to score, of prompts or completions; read only
            where the mask counts.
        completion_mask: (...) bool, int or float; non-zero counts, NaN is refused. None: every
            position counts.
        temperature: a number, or one per position, shaped like `completion_ids`; a constant,
            without gradient.
        entropy: False to leave out the entropy. With `kept_ids` it is over the set; ``"full"``:
            over the whole vocabulary, for one more product with the head.
        extras: further results of the same pass, without gradient: ``"log_sum_sq_probs"``,
            ``"mean_logits"``, ``"is_top1"``, see `Scores`. Not with `kept_ids`.
        expected: the upstream gradient that will arrive, up to one common factor: a = d loss / d
            logp shaped like `completion_ids`; or (a, b) with b = d loss / d entropy or None; or an
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
        on_missing_set: treatment of a position without a set. ``"error"``: each set must hold the
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
    given = {**locals()}
    if kept_ids is None:
        check_on_missing_set(on_missing_set)
        if not isinstance(entropy, bool):
            raise TypeError(f"entropy: expected a bool without kept_ids, got {entropy!r}")
    elif extras:
        raise ValueError(f"extras: expected none with kept_ids, got {extras}")
    if topk_ids is not None:
        for name, x in (("kept_ids", kept_ids), ("expected", expected)):
            if x is not None:
                raise ValueError(f"{name}: expected None with topk_ids, got {type(x).__name__}")
    head = with_its_group(hidden, head)
    with together("linear_logprob", head.process_group, given) as ranks:
        hidden, head, _ = read_heads(hidden, head)
        check_ids("completion_ids", completion_ids, hidden)
        if unknown := {*extras} - {*STATISTICS}:
            named = ", ".join(STATISTICS)
            raise ValueError(f"extras: expected some of {named}, got {sorted(unknown)}")
        job = begin(hidden, head, run, backend=None if kept_ids is None else "torch")
        job = replace(job, entropy=bool(entropy), extras=tuple(extras))
        rows = _read_rows(job, completion_ids, completion_mask, temperature)
        # also where few rows, or none, may need it
        gradient = read_expected(
            expected, completion_ids, rows.positions, job.accumulator, entropy=bool(entropy)
        )
        if kept_ids is not None:
            sets = read_kept_sets(kept_ids, on_missing_set, completion_ids, entropy)
            job, tensors, _ = plan(job, hidden, head, rows, run, ranks, names=None)
        else:
            if topk_ids is not None:
                check_listed("topk_ids", topk_ids, hidden)
                listed = topk_ids.detach().flatten(0, -2)[rows.positions]
                rows = replace(rows, top_k=TopKLogps.of(listed, rows.ids)[0])
                job = replace(job, extras=(*extras, TOPK_LOGPS))
            job, tensors, _ = plan(job, hidden, head, rows, run, ranks, gradient)
    if kept_ids is None:
        return scored(job, tensors, None, gradient, completion_ids.shape)
    options: dict[str, Any] = {"entropy": entropy, "expected": expected}
    return score_kept(job, tensors, run, sets, completion_ids, on_missing_set, **options)[0]


@takes_heads(within_module)
def linear_divergence(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    teacher: tuple[Tensor, HeadLike],  # (..., H') and its head
    completion_mask: Tensor | None = None,  # (...)
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    completion_ids: Tensor | None = None,  # (...)
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None = None,  # (...)
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """Compute the divergence of two models at each position, over the whole vocabulary.

    ::

        scores = linear_divergence(hidden, model.lm_head, (teacher_hidden, teacher.lm_head), mask)
        loss = scores.divergence.sum() / mask.sum()

    All results are differentiable, once. Each head has logits of its own (`Head`); both are divided
    by the same temperature. Gradients go to the student's hidden states, weight, bias and adapter;
    the teacher's tensors are constants. Values at masked positions are never read.

    Args:
        hidden, head, completion_mask: (..., H), the student's head and (...), as in
            `linear_logprob`.
        teacher: (hidden states (..., H') at the same positions, head), constants. H' may differ
            from H. The head is a weight (V', H'), a `Head` without adapter, or a module without
            active adapters, which is gathered for this call if FSDP2 or ZeRO-3 has divided it: all
            ranks that share it must then make the call. V' may differ from V, and the heads'
            ``vocab_size``: both distributions are then over the ids that both heads have, the first
            ones, alone. A process group divides both heads, into the same ids on each rank; its
            ranks do not see whole heads, so that both must have the same number of ids, or the same
            ``vocab_size``.
        divergence: ``"reverse_kl"``, ``"forward_kl"`` or ``"jsd"``.
        beta: for ``"jsd"``: TRL's beta, in [0, 1], by default 0.5; 0 is the forward and 1 the
            reverse KL.
        temperature: a number, or one per position.
        entropy: True to compute the entropy of the student's distribution.
        completion_ids: (...) tokens whose log-probabilities under the student to compute; None:
            none.
        expected: the upstream gradient of each divergence, up to one common factor; None: the same
            for all, as from a sum or a mean. Where it is right, it saves the recomputation; the
            gradient is exact in any case. With `completion_ids` it may be a pair, of the
            divergences and of the log-probabilities. It may also be an `Expectation`, which has the
            entropies too.
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
    given, jsd_beta = {**locals()}, _beta_of(divergence, beta)
    both: Any = whole_reference(teacher, hidden, head, "teacher.")
    head = with_its_group(hidden, head)
    if head.process_group is None:
        head, both = _over_common_ids(head, both)
    with together("linear_divergence", head.process_group, given) as ranks:
        if teacher is None:
            raise TypeError("teacher: expected (hidden, head), got NoneType")
        hidden, head, both = read_heads(hidden, head, both, prefix="teacher.")
        if completion_ids is not None:
            check_ids("completion_ids", completion_ids, hidden)
        job = begin(hidden, head, run, both, "teacher.")
        job = replace(job, entropy=entropy, jsd_beta=jsd_beta)
        ids = _no_ids(hidden) if completion_ids is None else completion_ids
        rows = _read_rows(job, ids, completion_mask, temperature)
        gradient = expected_divergence(
            expected, hidden, completion_ids, rows.positions, job.accumulator, entropy=entropy
        )
        job, tensors, reference = plan(
            job, hidden, head, rows, run, ranks, gradient, reference=both, prefix="teacher."
        )
    has_ids = completion_ids is not None
    return scored(job, tensors, reference, gradient, hidden.shape[:-1], has_ids=has_ids)


@takes_heads(within_module)
def topk_divergence(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    teacher_ids: Tensor,  # (..., K)
    teacher_logps: Tensor,  # (..., K)
    completion_mask: Tensor | None = None,  # (...)
    *,
    divergence: TopKDivergenceName = "reverse_kl",
    tail: bool | None = None,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    temperature: float | Tensor = 1.0,
    expected: Tensor | None = None,  # (...)
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """Compute the divergence from a teacher that gives K ids and log-probabilities per position.

    ::

        scores = topk_divergence(hidden, model.lm_head, teacher_ids, teacher_logps, mask)

    It is differentiable, once. The student's logits are the head's (`Head`) divided by the
    temperature. Gradients go to hidden states, weight, bias and adapter. Values at masked positions
    are never read.

    Args:
        hidden, head, completion_mask, temperature: (..., H), the student's head, (...) and a number
            or (...), as in `linear_logprob`.
        teacher_ids: (..., K) signed integers, padded with -1, in any order. A repeated id counts
            once, with its first log-probability.
        teacher_logps: (..., K), natural logarithms, of a softmax over the whole vocabulary at the
            teacher's own temperature: they are used as they come. An entry of -inf is padding.
        divergence: ``"reverse_kl"``, KL(student || teacher), or ``"forward_kl"``, KL(teacher ||
            student).
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
    given, head = {**locals()}, with_its_group(hidden, head)
    measured = (divergence, tail, log_prob_min_clamp, loss_max_clamp)
    with together("topk_divergence", head.process_group, given) as ranks:
        hidden, head, _ = read_heads(hidden, head)
        check_listed("teacher_ids", teacher_ids, hidden, teacher_logps)
        job = replace(begin(hidden, head, run), entropy=False, extras=("student_mass",))
        rows, dtype = (
            _read_rows(job, _no_ids(hidden), completion_mask, temperature),
            job.accumulator,
        )
        weights = divergence_weights("expected", expected, hidden, rows.positions, dtype)
        measure = _measure_of(*measured, dtype, teacher_logps.dtype)
        listed, logps = (
            x.detach().flatten(0, -2)[rows.positions] for x in (teacher_ids, teacher_logps)
        )
        gradient = ExpectedGradient(coefficients=Coefficients(d_divergence=weights))
        rows = replace(rows, top_k=TopKTeacher.of(listed, logps, measure))
        names = ("completion_ids", "teacher_ids")
        job, tensors, _ = plan(job, hidden, head, rows, run, ranks, gradient, names=names)
    return scored(job, tensors, None, gradient, hidden.shape[:-1], has_ids=False)


def scored(
    job: Job,
    head: Tensors,
    reference: Tensors | None,
    expected: ExpectedGradient,
    shape: torch.Size,
    *,
    has_ids: bool = True,
) -> Scores:
    """Run one forward, and return its results in the shape of the positions."""
    first = first_pass(job, head, reference, expected)
    logps, entropies, divergence, *extras = LinearLogprob.apply(job, first, reference, *head)
    results = {
        "logps": logps if has_ids else None,
        "entropies": entropies,
        "divergence": divergence,
        **dict(zip(job.extras, extras, strict=True)),
    }
    there = {name: x for name, x in results.items() if x is not None}
    return Scores(**{name: x.view(*shape, *x.shape[1:]) for name, x in there.items()})


def read_kept_sets(
    kept_ids: Any, on_missing_set: Any, ids: Tensor, entropy: bool | str = True
) -> KeptIds:
    """The sets of checked `ids`, as int64 bounds and ids."""
    check_choice("on_missing_set", on_missing_set, _ON_MISSING_SET)
    if not isinstance(entropy, bool) and entropy != "full":
        raise ValueError(f"entropy: expected True, False or 'full', got {entropy!r}")
    return read_kept_ids(kept_ids, ids)


def score_kept(
    job: Job,
    head: Tensors,
    run: Run | None,
    sets: KeptIds,
    ids: Tensor,
    on_missing_set: OnMissingSet = "error",
    *,
    entropy: bool | str = True,
    expected: Expected | None = None,
    others: Mapping[str, Tensor | None] | None = None,
) -> tuple[Scores, dict[str, tuple[Tensor, Tensor]]]:
    """Score rows over their sets, rows without a set over the whole vocabulary.

    Args:
        job: planned for the torch backend, its ids not checked for range.
        entropy: True: over the sets; "full": over the whole vocabulary; False: none.
        expected: the expected gradient where there is no set.
        others: other policies' log-probabilities, (...) each, which must be over the same sets.

    Returns:
        The scores, and the metrics of the sets, as (sum, count).
    """
    run = Run() if run is None else run
    budget = WORKSPACE_BYTES if run.workspace_bytes is None else run.workspace_bytes
    over_sets = replace(job, workspace_bytes=budget, entropy=entropy is True)
    survey = survey_sets(over_sets, head.weight.shape[0], sets, ids, on_missing_set, others or {})
    planned, any_without = plan_sets(over_sets, head, sets, survey)
    whole, in_full, shape = None, entropy == "full", ids.shape
    if any_without or in_full:
        vocab = head.weight.shape[0] if job.shard is None else job.shard.vocab
        rows = job.rows if in_full else take(job.rows, survey.without.nonzero()[:, 0])
        gradient = read_expected(
            expected, ids, rows.positions, job.accumulator, entropy=bool(entropy)
        )
        whole = replace(
            job,
            rows=in_range(rows, ("completion_ids", ""), vocab, job.first_id),
            backend=choose_backend(run.backend, ids.device, job.dtype)[0],
            entropy=bool(entropy),
        )
        whole = replace(whole, engine=choose_engine(run.engine, whole, gradient))
    logps, entropies = KeptSetLogprob.apply(planned, *head)
    logps, entropies = logps.view(shape), None if entropies is None else entropies.view(shape)
    if whole is not None:
        without = scatter(survey.without, job.rows, shape.numel()).view(shape)
        full = scored(whole, head, None, gradient, shape)
        logps = torch.where(without, full.logps, logps)
        if entropies is not None:
            entropies = torch.where(without, full.entropies, entropies)
        elif in_full:
            entropies = full.entropies
    scores = Scores(logps=logps) if entropies is None else Scores(logps=logps, entropies=entropies)
    return scores, survey.metrics(job.accumulator)


def _no_ids(hidden: Tensor) -> Tensor:
    """Zeros (...), one per position of hidden states (..., H), for a call without ids."""
    return hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])


def _read_rows(job: Job, ids: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Rows:
    """The rows where the mask counts, with ids not yet checked for range."""
    if mask is not None:
        check_mask("completion_mask", mask, ids)
    positions = counted_positions(mask, ids)
    inverse: float | Tensor
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0.0)
        inverse = 1.0 / float(temperature)
    else:
        check_tensor("temperature", temperature, like=ids, floating=True)
        check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
        rows = temperature.detach().reshape(-1)[positions].to(job.accumulator)
        bad = ~((rows > 0) & torch.isfinite(rows))
        if rows.device.type == "cpu" and bool(bad.any()):
            got = rows[bad][0].item()
            raise ValueError(
                f"temperature: expected finite numbers > 0 where the mask counts, got {got}"
            )
        inverse = (1.0 / rows)[:, None]
    return Rows(positions, ids.detach().reshape(-1)[positions].long(), inverse)


def _over_common_ids(head: Head, teacher: Any) -> tuple[Head, Any]:
    """Both heads with the `vocab_size` of the shorter one, if they differ and are valid."""
    if not isinstance(teacher, tuple) or len(teacher) != 2:
        return head, teacher
    states, given = teacher
    other = Head.of(given)
    sizes: set[Any] = {head.vocab_size, other.vocab_size} - {None}
    weights = (head.weight, other.weight)
    if all(isinstance(x, Tensor) and not is_dtensor(x) and x.dim() == 2 for x in weights):
        rows = {x.shape[0] for x in weights}
        sizes |= rows if len(rows) > 1 else set()
    if not sizes or not all(isinstance(x, int) for x in sizes):
        return head, teacher
    if isinstance(given, Head):
        given = replace(other, vocab_size=None)
    return replace(head, vocab_size=min(sizes)), (states, given)


def _beta_of(divergence: Any, beta: Any) -> float:
    """The divergence as a beta: 0 forward KL, 1 reverse KL (`backends.interface.Teacher`)."""
    check_choice("divergence", divergence, choices(DivergenceName))
    if divergence != "jsd":
        if beta is not None:
            raise ValueError(
                f"beta: expected None with divergence = {divergence!r}, which has none, got "
                f"{beta!r}"
            )
        return 1.0 if divergence == "reverse_kl" else 0.0
    beta = 0.5 if beta is None else beta
    check_number("beta", beta, 0.0, inclusive=True)
    if beta > 1.0:
        raise ValueError(f"beta: expected a number in [0, 1], got {beta!r}")
    return float(beta)


def _measure_of(
    divergence: Any, tail: Any, log_prob_min_clamp: Any, loss_max_clamp: Any, *dtypes: torch.dtype
) -> dict[str, Any]:
    """The fields of a `TopKTeacher` that these arguments describe.

    Args:
        dtypes: those of the result and of the teacher's log-probabilities.
    """
    check_choice("divergence", divergence, choices(TopKDivergenceName))
    reverse = divergence == "reverse_kl"
    if tail is not None and not isinstance(tail, bool):
        raise TypeError(f"tail: expected a bool or None, got {tail!r}")
    if reverse and tail is False:
        raise ValueError(
            "tail: expected True or None with divergence = 'reverse_kl', got False: over the "
            "listed ids alone it is least where the student gives them nothing"
        )
    tail = reverse if tail is None else tail
    if log_prob_min_clamp is not None:
        check_number("log_prob_min_clamp", log_prob_min_clamp)
        if tail:
            raise ValueError(
                f"log_prob_min_clamp: expected None with a tail, got {log_prob_min_clamp!r}; it is "
                "of the forward KL over the listed ids alone"
            )
    if loss_max_clamp is not None:
        check_number("loss_max_clamp", loss_max_clamp, 0.0)
    least_rest = max(torch.finfo(dtype).eps for dtype in dtypes) if tail else None
    return {
        "reverse": reverse,
        "least_rest": least_rest,
        "log_prob_min_clamp": log_prob_min_clamp,
        "loss_max_clamp": loss_max_clamp,
    }


def check_listed(name: str, ids: Any, hidden: Tensor, logps: Any = None) -> None:
    """Raise unless ids (..., K), the argument `name`, and log-probabilities, ``*_logps`` of the
    same name, fit hidden states (..., H)."""
    check_signed_ids(name, ids, hidden)
    shape = (*hidden.shape[:-1], max(1, ids.shape[-1] if ids.dim() else 0))
    check_shape(name, ids, ("(*that of hidden without H, K), K > 0", shape))
    if logps is not None:
        of_them = name.replace("_ids", "_logps")
        check_tensor(of_them, logps, like=hidden, floating=True)
        check_shape(of_them, logps, (f"that of {name}", shape))
