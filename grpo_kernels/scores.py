"""Differentiable scores of each position, from hidden states; other losses can build on them.

If you pass the upstream gradient that you expect, the forward computes the gradients of the hidden
states and the weight from the logits that it already has. The backward finds the factor c between
the expected and the actual upstream gradient, and recomputes only the rows that do not match. The
gradient is always exact; a correct expectation saves the recomputation.

The formulas and their derivatives::

    linear_logps         backends/torch_rows.py
      over kept sets     engine/kept.py
      of K more ids      engine/topk.py
    linear_divergence    backends/divergence.py
    topk_divergence      engine/topk.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients
from grpo_kernels.base import EXTRAS, DivergenceName, Extra, OnMissingSet, TopKDivergenceName
from grpo_kernels.base.checks import (
    check_choice,
    check_ids,
    check_mask,
    check_masses,
    check_number,
    check_tensor,
    is_dtensor,
    outside_graphs,
    warn_of_graph,
    warn_once,
)
from grpo_kernels.engine.autograd import run_scores
from grpo_kernels.engine.kept import score_kept
from grpo_kernels.engine.plan import (
    Rows,
    Run,
    call_heads,
    checked_on_all_ranks,
    plan,
)
from grpo_kernels.engine.topk import TopKLogps, TopKTeacher, check_topk
from grpo_kernels.head import Head, HeadLike, StatesAndHead, is_module, read_heads
from grpo_kernels.head_module import read_reference, within_module
from grpo_kernels.kept_ids import KeptIds, read_kept_ids
from grpo_kernels.objective.expected import (
    Expectation,
    Expected,
    ExpectedGradient,
    read_d_result,
    read_expected,
    read_expected_divergence,
)
from grpo_kernels.results import Scores
from grpo_kernels.tokens import counted_positions


@outside_graphs
def linear_logps(
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
    """Compute log-probabilities and entropies of any ids, without the (tokens, vocabulary) logits.

    ::

        scores = linear_logps(hidden, model.lm_head, completion_ids, completion_mask)
        scores.logps, scores.entropies  # shaped like completion_ids

    `logps` are ``log softmax(z)[id]``, and `entropies` are the entropies of ``softmax(z)``, where z
    are the head's logits (see `Head`) divided by the temperature. With `kept_ids`, both are taken
    over each position's kept set. Both have first-order gradients with respect to the hidden
    states, weight, bias and adapter.

    Args:
        hidden: (..., H) hidden states, aligned with `completion_ids`: nothing is shifted here.
        head: a weight (V, H), a `Head`, or the model's head module. If the model scales or
            soft-caps its logits, pass a `Head` with these values: they cannot be read from a weight
            or a module. ``grpo_kernels.transformers.describe_head(model)`` makes this `Head`.
        completion_ids: (...) integers, the tokens to score, in prompts or completions. Ids at
            masked positions are never read.
        completion_mask: (...) bool, int or float. Positions with a non-zero value count; NaN raises
            an error. None: every position counts.
        temperature: a number, or a tensor shaped like `completion_ids` with one temperature per
            position. The temperature gets no gradient.
        entropy: False skips the entropy. With `kept_ids`, True gives the entropy over the set, and
            ``"full"`` the entropy over the whole vocabulary, which costs one more product with the
            head.
        extras: names of further results to compute in the same pass, without gradient:
            ``"log_sum_sq_probs"``, ``"mean_logits"``, ``"is_top1"``; see `Scores`. Not available
            with `kept_ids`.
        expected: the upstream gradient that you expect, up to one common factor. A correct value
            saves recomputation; the gradient is exact either way. With `kept_ids`, the expectation
            applies only to the positions that are scored over the whole vocabulary. Not available
            with `topk_ids`. Pass one of:

            - a = d loss / d logp, shaped like `completion_ids`;
            - a pair (a, b), where b is d loss / d entropy or None;
            - an `Expectation`, or its `coefficients`.

        topk_ids: (..., K) signed integers in any order, padded with -1: more ids to score at each
            position, in the same pass. A sampler's most likely ids are an example
            (https://arxiv.org/abs/2609.20807). The call returns their log-probabilities as
            `topk_logps`. Not available with `kept_ids`. To get log-probabilities over a set S, pass
            S as `topk_ids` and take ``topk_logps - topk_logps.logsumexp(-1, keepdim=True)``.

        The sampler:

        kept_ids: the ids that a truncating sampler (top-k, top-p, min-p) kept at each position:
            `KeptIds`, or (..., K) signed integers padded with -1. Sets at masked positions are
            never read. The ids may have any order, and a repeated id counts once. Operands keep
            their stored dtype; under autocast, they are rounded to its dtype. Products are fp32.
            The only vocabulary-sized tensors are the gradients of weight and bias, in fp32 (fp64).
            Each kept id takes 8 bytes (12 in fp64) from forward to backward. The host waits for the
            device. With a sharded head, pass the same sets on every rank.
        on_missing_set: what to do with a position whose set is empty or lacks the sampled id.
            ``"error"`` raises an error on a CPU; elsewhere, the position's results are NaN.
            ``"full"`` scores the position over the whole vocabulary, as prime-rl does; this costs
            as much as a call without sets.

        How it is computed:

        run: a `Run`, the options for engine, backend and memory.

    Returns:
        `Scores` with `logps` and the `extras`, with `entropies` unless `entropy` is False, and with
        `topk_logps` if you pass `topk_ids`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done. On a CPU, the call also checks that every id of `kept_ids` and `topk_ids` is -1 or
            in [0, V), and that each set contains the sampled id. On other devices, a position that
            breaks these rules gives NaN.
    """
    arguments = {**locals()}
    if is_module(head):
        return within_module(linear_logps, arguments)
    with checked_on_all_ranks("linear_logps", arguments) as (head, run, ranks):
        _check_requested(arguments)
        hidden, head, _ = read_heads(hidden, head)
        check_ids("completion_ids", completion_ids, hidden)
        heads = call_heads(hidden, head, run)
        dtype = heads.dtype
        rows = _read_rows(dtype, completion_ids, completion_mask, temperature)

        def expected_at(positions: Tensor) -> ExpectedGradient:
            return read_expected(expected, completion_ids, positions, dtype, entropy=bool(entropy))

        gradient = expected_at(rows.positions)
        sets = None
        if kept_ids is not None or on_missing_set != "error":
            sets = read_kept_ids(kept_ids, completion_ids, on_missing_set)
        if topk_ids is not None:
            check_topk("topk_ids", topk_ids, hidden)
            ids = topk_ids.detach().flatten(0, -2)[rows.positions]
            rows = replace(rows, topk=TopKLogps.of(ids, rows.ids)[0])
        job = plan(
            heads, rows, run, ranks, gradient if sets is None else None,
            entropy=bool(entropy), extras=tuple(extras),
        )  # fmt: skip
    if sets is None:
        return Scores(**run_scores(job, gradient, completion_ids.shape))
    scores, _ = score_kept(
        job, run, sets, completion_ids, on_missing_set, expected_at, entropy=entropy
    )
    return Scores(**scores)


@outside_graphs
def linear_divergence(
    hidden: Tensor,  # (..., H)
    head: HeadLike,
    teacher: tuple[Tensor, HeadLike],  # (..., H') and its head
    completion_mask: Tensor | None = None,  # (...)
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    completion_ids: Tensor | None = None,  # (...)
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None = None,  # (...)
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """Compute the divergence between two models at each position, over the whole vocabulary.

    ::

        scores = linear_divergence(hidden, model.lm_head, (teacher_hidden, teacher.lm_head), mask)
        loss = scores.divergence.sum() / mask.sum()

    All results have first-order gradients with respect to the student's hidden states, weight, bias
    and adapter; the teacher's tensors are constants. Each head defines its own logits (see `Head`);
    the logits of both heads are divided by the same temperature. Values at masked positions are
    never read.

    Args:
        hidden: (..., H) hidden states of the student.
        head: the student's head, as in `linear_logps`.
        teacher: a pair (hidden states (..., H') at the same positions, head); both are constants.
            H' may differ from H. The head is a weight (V', H'), a `Head` without adapter, or a
            module without active adapters. If FSDP2 or ZeRO-3 shards the module, this call gathers
            it, so all ranks that share the module must make the call. V' may differ from V, and the
            ``vocab_size`` of the heads may differ, too. Both distributions then cover only the ids
            that both heads have. The call warns of this, unless a head states its ``vocab_size``.
            With a process group, both heads must have the same number of ids, or the same
            ``vocab_size``. Each rank must hold the same ids of both heads.
        completion_mask: (...), as in `linear_logps`.
        divergence: ``"reverse_kl"``, KL(student || teacher); ``"forward_kl"``, KL(teacher ||
            student); or ``"jsd"``.
        beta: TRL's beta in [0, 1]; the default is 0.5. 0 gives the forward KL and 1 the reverse KL.
            Only for ``"jsd"``; otherwise an error.
        temperature: a number, or a tensor with one temperature per position.
        entropy: False skips the entropy of the student's distribution.
        completion_ids: (...) tokens; the call also returns their log-probabilities under the
            student. None: no log-probabilities.
        expected: d(loss) / d(divergence) at each position, if you know it in advance; a common
            factor does not matter. None: the same value for all positions, as from a sum or a mean.
            A correct value saves recomputation; the gradient is exact either way. With
            `completion_ids`, you may pass a pair, for the divergences and the log-probabilities.
            You may also pass an `Expectation`, which covers the entropies, too.
        run: a `Run`, the options for engine, backend and memory.

    Returns:
        `Scores` with `divergence`, with `entropies` unless `entropy` is False, and with `logps` if
        you pass `completion_ids`. The forward KL is inf where the student alone gives an id
        probability 0. The reverse KL is inf where the teacher alone does.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done.

    Without a mask, you can capture the call in a CUDA graph. In a graph, a trainable head takes
    two passes.
    """
    arguments = {**locals()}
    if is_module(head):
        return within_module(linear_divergence, arguments)
    with checked_on_all_ranks("linear_divergence", arguments) as (head, run, ranks):
        jsd_beta = _beta_of(divergence, beta)
        teacher_model: Any = read_reference(teacher, head, "teacher.")
        if ranks is None:
            head, teacher_model = _over_common_ids(head, teacher_model)
        if not isinstance(entropy, bool):
            raise TypeError(f"entropy: expected a bool, got {entropy!r}")
        hidden, head, teacher_model = read_heads(hidden, head, teacher_model)
        if completion_ids is not None:
            check_ids("completion_ids", completion_ids, hidden)
        heads = call_heads(hidden, head, run, teacher_model)
        dtype = heads.dtype
        ids = _no_ids(hidden) if completion_ids is None else completion_ids
        rows = _read_rows(dtype, ids, completion_mask, temperature)
        gradient = read_expected_divergence(
            expected, hidden, completion_ids, rows.positions, dtype, entropy=entropy
        )
        job = plan(heads, rows, run, ranks, gradient, jsd_beta=jsd_beta, entropy=entropy)
    has_ids = completion_ids is not None
    return Scores(**run_scores(job, gradient, hidden.shape[:-1], has_ids=has_ids))


@outside_graphs
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
    """Compute the student's divergence from a teacher that gives log-probabilities of only K ids.

    ::

        scores = topk_divergence(hidden, model.lm_head, teacher_ids, teacher_logps, mask)

    The divergence has first-order gradients with respect to the hidden states, weight, bias and
    adapter. The student's logits are those that `head` produces, divided by `temperature`. Values
    at masked positions are never read.

    Args:
        hidden: (..., H) hidden states of the student.
        head: the student's head, as in `linear_logps`.
        teacher_ids: (..., K) signed integers, padded with -1, in any order. A repeated id counts
            once, with its first log-probability.
        teacher_logps: (..., K) natural logarithms of a softmax over the whole vocabulary, at the
            teacher's own temperature. They are used unchanged. An entry of -inf is padding.
        completion_mask: (...), as in `linear_logps`.
        divergence: ``"reverse_kl"``, KL(student || teacher), or ``"forward_kl"``, KL(teacher ||
            student).
        tail: True counts all other ids, the tail, as one more outcome. None: True for
            ``"reverse_kl"``, which needs the tail, and False otherwise. The tail's probability is
            clamped to at least the machine epsilon of the dtype of `teacher_logps` or of the
            result, whichever is larger. Smaller values are rounding noise.
        log_prob_min_clamp: lower bound, < 0, to which the student's and the teacher's
            log-probabilities are clamped. An id whose student log-probability is below this bound
            gets no gradient. Only for the forward KL without a tail; otherwise an error.
        loss_max_clamp: upper bound on the absolute value of each position's divergence. A position
            that reaches it gets no gradient.
        temperature: a number, or a tensor with one temperature per position.
        expected: d(loss) / d(divergence) at each position, if you know it in advance; a common
            factor does not matter. None: the same value for all positions. A correct value saves
            recomputation; the gradient is exact either way.
        run: a `Run`, the options for engine, backend and memory.

    Returns:
        `Scores` with `divergence`, and with `student_mass`, the student's total probability of the
        teacher's ids, which has no gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is
            done. On a CPU, the call also checks that every id is -1 or in [0, V). On other devices,
            a position with an invalid id gives NaN.
    """
    arguments = {**locals()}
    if is_module(head):
        return within_module(topk_divergence, arguments)
    with checked_on_all_ranks("topk_divergence", arguments) as (head, run, ranks):
        hidden, head, _ = read_heads(hidden, head)
        check_topk("teacher_ids", teacher_ids, hidden, teacher_logps)
        warn_of_graph("teacher_logps", teacher_logps)
        heads = call_heads(hidden, head, run)
        dtype = heads.dtype
        rows = _read_rows(dtype, _no_ids(hidden), completion_mask, temperature)
        d_divergence = read_d_result("expected", expected, hidden, rows.positions, dtype)
        gradient = ExpectedGradient(Coefficients(d_divergence=d_divergence))
        measure = _measure_of(
            divergence, tail, log_prob_min_clamp, loss_max_clamp, dtype, teacher_logps.dtype
        )
        ids, logps = (
            x.detach().flatten(0, -2)[rows.positions] for x in (teacher_ids, teacher_logps)
        )
        topk = TopKTeacher.of(ids, logps, measure)
        has_tail = topk.least_tail is not None and ids.shape[1] < head.weight.shape[0]
        check_masses("teacher_logps", topk.logps, has_tail=has_tail)
        rows = replace(rows, topk=topk)
        job = plan(heads, rows, run, ranks, gradient, entropy=False)
    return Scores(**run_scores(job, gradient, hidden.shape[:-1], has_ids=False))


def _check_requested(arguments: Mapping[str, Any]) -> None:
    """Check which results a call of `linear_logps` asks for, and that they go together."""
    entropy, extras, kept_ids = (arguments[name] for name in ("entropy", "extras", "kept_ids"))
    if kept_ids is None:
        if not isinstance(entropy, bool):
            raise TypeError(f"entropy: expected a bool without kept_ids, got {entropy!r}")
    elif not isinstance(entropy, bool) and entropy != "full":
        raise ValueError(f"entropy: expected True, False or 'full', got {entropy!r}")
    elif extras:
        raise ValueError(f"extras: expected none with kept_ids, got {extras}")
    if isinstance(extras, str):
        raise TypeError(f"extras: expected a tuple of names, got {extras!r}; pass ({extras!r},)")
    if unknown := {*extras} - {*EXTRAS}:
        named = ", ".join(EXTRAS)
        raise ValueError(f"extras: expected some of {named}, got {sorted(unknown)}")
    for name in () if arguments["topk_ids"] is None else ("kept_ids", "expected"):
        if arguments[name] is not None:
            got = type(arguments[name]).__name__
            raise ValueError(f"{name}: expected None with topk_ids, got {got}")


def _no_ids(hidden: Tensor) -> Tensor:
    """Zeros (...), one per position of hidden states (..., H), for a call without ids."""
    return hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])


def _read_rows(
    dtype: torch.dtype, ids: Tensor, mask: Tensor | None, temperature: float | Tensor
) -> Rows:
    """Select the rows at unmasked positions; their ids are not yet checked for range."""
    if mask is not None:
        check_mask("completion_mask", mask, ids)
    positions = counted_positions(mask, ids)
    inverse: float | Tensor
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0.0)
        inverse = 1.0 / float(temperature)
    else:
        shape = "of the tokens", ids.shape
        check_tensor("temperature", temperature, shape, like=ids, floating=True)
        warn_of_graph("temperature", temperature)
        rows = temperature.detach().reshape(-1)[positions].to(dtype)
        bad = ~((rows > 0) & torch.isfinite(rows))
        if rows.device.type == "cpu" and bool(bad.any()):
            got = rows[bad][0].item()
            raise ValueError(
                f"temperature: expected finite numbers > 0 at unmasked positions, got {got}"
            )
        inverse = (1.0 / rows)[:, None]
    return Rows.of(ids, positions, inverse)


def _over_common_ids(head: Head, teacher: StatesAndHead) -> tuple[Head, StatesAndHead]:
    """Give both heads the `vocab_size` of the shorter one, if the sizes differ and are valid."""
    sizes: set[Any] = {head.vocab_size, teacher.head.vocab_size} - {None}
    weights = (head.weight, teacher.head.weight)
    if all(isinstance(x, Tensor) and not is_dtensor(x) and x.dim() == 2 for x in weights):
        rows = {x.shape[0] for x in weights}
        if len(rows) > 1:
            if not sizes:
                warn_once(
                    f"teacher: its head has {teacher.head.weight.shape[0]} ids, the other head "
                    f"{head.weight.shape[0]}; the divergence is over the first {min(rows)} alone. "
                    "If the two share a tokenizer, say so with Head(..., vocab_size=...); if they "
                    "do not, the divergence means nothing"
                )
            sizes |= rows
    if not sizes or not all(isinstance(x, int) for x in sizes):
        return head, teacher
    teacher = teacher._replace(head=replace(teacher.head, vocab_size=None))
    return replace(head, vocab_size=min(sizes)), teacher


def _beta_of(divergence: Any, beta: Any) -> float:
    """The divergence as a beta: 0 forward KL, 1 reverse KL (`backends.Chunk`)."""
    check_choice("divergence", divergence, get_args(DivergenceName))
    if divergence != "jsd":
        if beta is not None:
            raise ValueError(
                f"beta: expected None with divergence = {divergence!r} (only 'jsd' uses it), got "
                f"{beta!r}"
            )
        return 1.0 if divergence == "reverse_kl" else 0.0
    beta = 0.5 if beta is None else beta
    check_number("beta", beta, 0.0, inclusive=True, highest=1.0)
    return float(beta)


def _measure_of(
    divergence: Any, tail: Any, log_prob_min_clamp: Any, loss_max_clamp: Any, *dtypes: torch.dtype
) -> dict[str, Any]:
    """The fields of a `TopKTeacher` that these arguments describe.

    Args:
        dtypes: of the result and of the teacher's log-probabilities.
    """
    check_choice("divergence", divergence, get_args(TopKDivergenceName))
    reverse = divergence == "reverse_kl"
    if tail is not None and not isinstance(tail, bool):
        raise TypeError(f"tail: expected a bool or None, got {tail!r}")
    if reverse and tail is False:
        raise ValueError(
            "tail: expected True or None with divergence = 'reverse_kl', got False: over the "
            "listed ids alone the divergence is smallest if the student gives them no probability"
        )
    tail = reverse if tail is None else tail
    if log_prob_min_clamp is not None:
        check_number("log_prob_min_clamp", log_prob_min_clamp)
        if log_prob_min_clamp >= 0.0:  # would clamp every log-probability
            raise ValueError(
                f"log_prob_min_clamp: expected a number < 0, got {log_prob_min_clamp!r}"
            )
        if tail:
            raise ValueError(
                f"log_prob_min_clamp: expected None with a tail, got {log_prob_min_clamp!r}; it "
                "works only for the forward KL over the listed ids"
            )
    if loss_max_clamp is not None:
        check_number("loss_max_clamp", loss_max_clamp, 0.0)
    least_tail = max(torch.finfo(dtype).eps for dtype in dtypes) if tail else None
    return {
        "reverse": reverse,
        "least_tail": least_tail,
        "log_prob_min_clamp": log_prob_min_clamp,
        "loss_max_clamp": loss_max_clamp,
    }
