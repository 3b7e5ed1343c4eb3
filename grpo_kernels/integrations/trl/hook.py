"""The seam in TRL: its fused language-model head, computed by our engines.

TRL 1.15 and 1.16 route every fused head (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO) through one autograd function, which
they look up at call time as ``trl.trainer.utils._ChunkedLogProbFunction``. `FusedHead` has the same ``apply`` and
returns the same five values. A trainer that knows more about its rows than TRL passes down (which of them count, what
their gradient will be) says so with `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor

from grpo_kernels.base.checks import is_fake
from grpo_kernels.base.choices import Extra, LogitsDtype, choices
from grpo_kernels.call.options import Run
from grpo_kernels.call.output import Scores
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.head import Head
from grpo_kernels.integrations.trl import row_count
from grpo_kernels.integrations.trl.head import ModelHead
from grpo_kernels.integrations.trl.seam import Seam
from grpo_kernels.logprob import Expectation, linear_logprob

EXTRAS: tuple[Extra, ...] = choices(Extra)  # type: ignore[assignment]

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _scored(hidden: Tensor, head: Head, positions: Tensor | None, **options: Any) -> Scores:
    """Compute a head call with `linear_logprob`."""
    return linear_logprob(hidden, head, **options)


@dataclass
class Rows:
    """Facts of a trainer about the rows of its head calls, as (B, T) tensors over the completion tokens.

    Attributes:
        labelled: completion tokens that TRL labels; elsewhere TRL's result is 0 whatever the head returned.
        batch_size: sequences of one head call; the calls walk through the B sequences in order.
        counted: the labelled tokens that the loss reads, or None for all of them. The others are not projected.
        fill: log-probability reported where a labelled token is not counted, so that a ratio there stays finite.
        expected: the gradient to expect, for ids of shape (B, T).
        compute: function that computes a head call, from hidden states, head, positions in the flattened (B, T) and
            the options of `linear_logprob`; it returns `Scores`.
    """

    labelled: Tensor
    batch_size: int
    counted: Tensor | None = None
    fill: Tensor | None = None
    expected: Expectation | None = None
    compute: Callable[..., Scores] = _scored
    start: int = 0  # first sequence of the next call
    last_positions: int = 0  # completion positions of the sequences of the last call

    def next_call(self, rows: int, compact: bool) -> Tensor | None:
        """Positions (rows,) of the next head call's rows in the flattened (B, T), -1 outside; None: unknown.

        TRL passes only the labelled rows if it has Triton (`compact`), else every position of the sequences, whose last
        T positions are the completion.
        """
        first, length = self.start, self.labelled.size(1)
        count = min(self.batch_size, self.labelled.size(0) - first)
        self.start, self.last_positions = first + count, count * length
        if compact:
            found = self.labelled[first : first + count].reshape(-1).nonzero().squeeze(1) + first * length
            return found if found.numel() == rows else None
        if count <= 0 or rows % count or rows // count < length:
            return None
        positions = torch.full((count, rows // count), -1, device=self.labelled.device)
        positions[:, -length:] = torch.arange(count * length, device=positions.device).view(count, length)
        return torch.where(positions < 0, positions, positions + first * length).reshape(-1)


_rows: ContextVar[Rows | None] = ContextVar("grpo_kernels_trl_rows", default=None)
_run: ContextVar[Run | None] = ContextVar("grpo_kernels_trl_run", default=None)
# `patch_trl` sets these two
logits_dtype: LogitsDtype = "float32"
run = Run()  # of trainers that have none of their own


class FusedHead:
    """Stand-in for TRL's autograd function: same call, same results, our engines."""

    @staticmethod
    @torch.compiler.disable  # a compiled model breaks its graph here: which rows count depends on data
    def apply(
        hidden: Tensor,  # (N, H)
        weight: Tensor | ModelHead,  # (V, H)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *EXTRAS),
    ) -> Results:
        """(logps, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N,), None where `outputs` lacks the name.

        `chunk_size`, the width of TRL's tiles, is not used: the engine plans its own workspace.
        """
        options: dict[str, Any] = {
            "ids": targets,
            "entropy": "entropy" in outputs,
            "extras": tuple(name for name in EXTRAS if name in outputs),
            "temperature": temperature,
        }
        run_of_call = _run.get() or run

        def score(hidden: Tensor, head: Head, gather: Gather | None) -> Scores:
            head = replace(
                head,
                final_logit_softcapping=final_logit_softcapping,
                logit_scale=logit_scale,
                logits_dtype=logits_dtype,
            )
            return _score(hidden, head, run=replace(run_of_call, gather=gather), **options)

        if isinstance(weight, ModelHead):
            found = weight.score(hidden, score)
        else:
            # ZeRO-3 partitions the weight again after the forward
            found = score(hidden, Head(weight, bias), lambda: trl_utils.maybe_gather_lm_head_ctx(weight, bias))
        return found.logps, found.entropies, found.log_sum_sq_probs, found.mean_logits, found.is_top1


def _score(hidden: Tensor, head: Head, **options: Any) -> Scores:
    """The results (N,) of one head call on `hidden` (N, H); `options` are those of `linear_logprob`."""
    rows, (positions, mask, expected, fill) = _rows.get(), _known(hidden)
    compute = rows.compute if rows else _scored
    with _operands_as_trls(hidden):
        found = compute(hidden, head, positions, mask=mask, expected=expected, **options)
    if mask is not None and fill is not None:
        found.logps = torch.where(mask, found.logps, fill)
    if not is_fake(hidden):
        places = rows.last_positions if rows and mask is not None else len(hidden)
        row_count.current().add(places, mask, (found.logps, found.entropies))
    return found


def _operands_as_trls(hidden: Tensor) -> AbstractContextManager[Any]:
    """Context in which products of 16-bit hidden states are in 16 bits, if `logits_dtype` is "input"."""
    kind = hidden.device.type
    if logits_dtype != "input" or hidden.dtype.itemsize != 2 or torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, hidden.dtype)


def _known(hidden: Tensor) -> tuple[Tensor | None, Tensor | None, Expectation | None, Tensor | None]:
    """(positions, mask, expected, fill) of this call's rows; each None if unknown."""
    rows = _rows.get()
    if rows is None or is_fake(hidden):
        return None, None, None, None
    use_triton = getattr(trl_utils, "_use_triton", None)  # TRL 1.15 has none, and always passes only labelled rows
    positions = rows.next_call(hidden.size(0), use_triton is None or use_triton(hidden.device))
    if positions is None or positions.device != hidden.device:  # a head on another device than the batch
        return None, None, None, None
    index = positions.clamp(min=0)
    counted = rows.labelled if rows.counted is None else rows.counted
    mask = (positions >= 0) & counted.reshape(-1)[index].bool()
    fill = None if rows.fill is None else rows.fill.reshape(-1)[index]
    return positions, mask, _at(rows.expected, index), fill


def _at(expected: Expectation | None, positions: Tensor) -> Expectation | None:
    """Select from an expectation over (B, T) the rows of a call, at `positions` (N,) of the flattened (B, T)."""
    if expected is None:
        return None
    coefficients, graded = expected.coefficients, expected.graded

    def of_rows(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Any:
        assert coefficients is not None
        return coefficients(positions[index], logps, entropies)

    known = None if coefficients is None else of_rows
    return replace(expected, coefficients=known, graded=None if graded is None else graded.reshape(-1)[positions])


@contextmanager
def rows(known: Rows | None, run: Run) -> Iterator[None]:
    """Inside, head calls use the facts in `known` about their rows, and are computed as `run` says."""
    token, other = _rows.set(known), _run.set(run)
    try:
        yield
    finally:
        _rows.reset(token)
        _run.reset(other)


SEAM = Seam(
    trl_utils,
    "_ChunkedLogProbFunction",
    FusedHead,
    (
        "ctx",
        "hidden",
        "weight",
        "bias",
        "targets",
        "temperature",
        "chunk_size",
        "final_logit_softcapping",
        "logit_scale",
        "outputs",
    ),
    unknown="fused language-model head with the signature of trl 1.15 and 1.16; TRL works unchanged",
    needed=("add_fused_lm_head", "maybe_gather_lm_head_ctx"),
)
