"""Log-probabilities and entropies straight from hidden states, both differentiable, for other losses to build on.

With an expected upstream gradient, d hidden and d weight are computed in the forward, from logits that are there
anyway. The backward finds the factor c between the expected and the upstream gradient, and recomputes only the rows
where they do not fit. So the gradient is always exact, and a right expectation saves the recomputation.

**Kept sets.** A sampler that cuts the distribution (top-k, top-p, min-p) draws y from the softmax over its kept set S,
the ids that it did not cut. The policy trained on y has the same support only if its own log-probabilities are taken
over S too (https://arxiv.org/abs/2512.02556, keep sampling mask)::

    logp = z_y - log sum_{j in S} exp z_j

Only the head's rows of S are read. They are gathered for some positions at a time and multiplied with the hidden states
of these positions. There are three products: one in the forward, one for d hidden, one for d weight. With N positions
of K ids each takes 2NKH floating point operations; with an adapter of rank r on the head 2NK(H + r). Positions are
sorted by falling size of their sets, so that short sets get little padding. An id that is alone in its set has
log-probability 0 whatever its logit is, and costs nothing.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from grpo_kernels.base.choices import Extra, WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds, check_without_set
from grpo_kernels.call.expected import Expectation, Expected
from grpo_kernels.call.kept import KeptCall, score_kept
from grpo_kernels.call.module_head import takes_heads
from grpo_kernels.call.output import Scores
from grpo_kernels.call.run import Execution, Run
from grpo_kernels.call.scores import ScoreCall, score
from grpo_kernels.head.head import Head, HeadLike
from grpo_kernels.head.lm_head import LMHead

__all__ = ["Expectation", "Expected", "linear_logprob"]


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
    # the sampler
    kept_ids: Tensor | KeptIds | None = None,  # (..., K)
    without_set: WithoutSet = "error",
    # how it is computed
    run: Run | None = None,
) -> Scores:
    """``log softmax(z)[id]`` and the entropy of ``softmax(z)``, without the (tokens, vocabulary) logits in memory.

    z are the head's logits (`Head`) divided by the temperature. With `kept_ids` both are over the set of each position.
    Results are differentiable, once, in hidden states, weight, bias and adapter.

    Args:
        hidden: (..., H) hidden states, aligned with `ids`: the library never shifts.
        head: a weight (V, H), a `Head`, or the model's head module.
        ids: (...) integers, the tokens to score; read only where the mask counts. (A loss calls them `completion_ids`,
            and their mask `completion_mask`.)
        mask: (...) bool, int or float; non-zero counts, NaN is refused. None: every position counts.
        temperature: a number, or one per position, shaped like `ids`; a constant, without gradient.
        entropy: False to leave out the entropy. With `kept_ids` it is over the set; ``"full"``: over the whole
            vocabulary, for one more product with the head.
        extras: further results of the same pass, without gradient: ``"log_sum_sq_probs"``, ``"mean_logits"``,
            ``"is_top1"``, see `Scores`. Not with `kept_ids`.
        expected: the upstream gradient that will arrive, up to one common factor: a = d loss / d logp shaped like
            `ids`; or (a, b) with b = d loss / d entropy or None; or an `Expectation`, or just its function. The
            gradient is exact whatever is expected. With
            `kept_ids`, for the positions that are scored over the whole vocabulary.

        The sampler:

        kept_ids: the kept set of each position, that is the ids that a truncating sampler (top-k, top-p, min-p) did not
            cut: `KeptIds`; or (..., K) signed integers padded with -1. They are read only where the mask counts. Their
            order does not matter, and a repeated id counts once. Operands are used as stored (under autocast rounded to
            its dtype), products are fp32. Of the vocabulary's size there is only the accumulator for the gradient of a
            weight that trains: V x H in fp32 (fp64), once per backward (and V for the bias). Besides the workspace, 8
            bytes for each (position, kept id) stay from forward to backward (12 in fp64). The host reads the sizes of
            the sets. With a divided head the sets, too, are the same on every
            rank.
        without_set: treatment of a position without a set. ``"error"``: each set must hold the sampled id. ``"full"``:
            a position whose set is empty, or lacks the sampled id, is scored over the whole vocabulary, as in prime-rl,
            and costs as without sets.

        How it is computed:

        run: engine, backend, memory: `Run`.

    Returns:
        `Scores` with `logps`, `entropies` unless `entropy` is False, and the `extras`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done. On a CPU that
            includes a kept id that is neither -1 nor in [0, V), and a sampled id outside its set; on other devices that
            position's results are NaN.
    """
    lm_head, execution = LMHead.of_call(hidden, Head.of(head)), Execution.of(run)
    if kept_ids is not None:
        if extras:
            raise ValueError(f"extras: expected none with kept_ids, got {extras}")
        sets = KeptCall(
            mask,
            temperature,
            (),
            ids,
            expected,
            kept_ids=kept_ids,
            without_set=without_set,
            entropy_over=entropy,
        )
        return score_kept(sets, lm_head, execution)
    check_without_set(without_set)
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected a bool without kept_ids, got {entropy!r}")
    outputs = (*(("entropy",) if entropy else ()), *extras)
    return score(ScoreCall(mask, temperature, outputs, ids, expected), lm_head, execution)
