"""`Scoring`: facts about one loss or one scored batch; `ModelCall`: facts about one call of the model within it.

TRL's loss calls `_get_per_token_logps_and_entropies`, which calls the model, which calls its fused head. TRL passes
none of them what our trainer knows about the batch. So it is in two objects, the values of `SCORING` and `CALL` while
they are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.call.output import Scores
from grpo_kernels.call.run import Run
from grpo_kernels.head.head import Head
from grpo_kernels.host import KnownRows, Shares
from grpo_kernels.trl.exact_kl import Comparison, ReferenceHead
from grpo_kernels.trl.sampled_sets import SampledSets


@dataclass
class Scoring:
    """One loss of a micro-batch, or one generation, or one scoring of a batch before its loss.

    Attributes:
        run, logits_dtype: how head calls are computed.
        shares: where their rows are counted.
        rows: the (B, T) completion tokens that are read, and the gradient to expect there; None: not known.
        ids: (B, L) of the loss's call: `rows`, `unscored` and `comparison` are of that call alone. None: of all.
        sampled: a truncating sampler's sets, one record per completion, for the rows that have them (`of_rows`).
        unscored: inputs of the loss, as long as they lack old log-probabilities.
        heads: measured heads of student and teacher, for distillation; None: TRL's constants serve.
        comparison: of the loss's head calls with the reference, for the exact KL term.
        reference_head: what keeps the inputs of the reference's head, for the exact KL term.
    """

    run: Run = field(default_factory=Run)
    logits_dtype: LogitsDtype = "float32"
    shares: Shares = field(default_factory=Shares)
    ids: Tensor | None = None
    rows: KnownRows | None = None
    sampled: Sequence[SampledSets | None] | None = None
    unscored: dict[str, Any] | None = None
    comparison: Comparison | None = None
    heads: tuple[Head | None, Head | None] = (None, None)
    reference_head: ReferenceHead | None = None


@dataclass
class ModelCall:
    """One call of the model by TRL, in which head calls walk through the B sequences in order.

    Attributes:
        labelled: (B, T) bool, completion tokens that TRL labels; elsewhere TRL's result is 0 whatever its head
            returned. None: not known.
        batch_size: sequences of one head call.
        rows: the (B, T) completion tokens that are read, and the gradient to expect there; None: not known.
        compute: function that computes a head call, from hidden states, head, positions in the flattened (B, T) and
            the options of `linear_logprob`; None: `linear_logprob`.
        start: first sequence of the next head call.
        passed: completion tokens, labelled or not, of the sequences of the last head call.
    """

    labelled: Tensor | None = None
    batch_size: int = 0
    rows: KnownRows | None = None
    compute: Callable[..., Scores] | None = None
    start: int = 0
    passed: int = 0

    def next_call(self, rows: int, *, compact: bool) -> Tensor | None:
        """Return the positions (rows,) of the next head call's rows in the flattened (B, T), -1 outside; None: unknown.

        TRL passes only the labelled rows if it has Triton (`compact`), else every position of the sequences, whose last
        T positions are the completion.
        """
        if self.labelled is None:
            return None
        first, length = self.start, self.labelled.size(1)
        count = min(self.batch_size, self.labelled.size(0) - first)
        self.start, self.passed = first + count, count * length
        if compact:
            labelled = (
                self.labelled[first : first + count].reshape(-1).nonzero().squeeze(1)
                + first * length
            )
            return labelled if labelled.numel() == rows else None
        if count <= 0 or rows % count or rows // count < length:
            return None
        positions = torch.full((count, rows // count), -1, device=self.labelled.device)
        positions[:, -length:] = torch.arange(count * length, device=positions.device).view(
            count, length
        )
        return torch.where(positions < 0, positions, positions + first * length).reshape(-1)


PATCHED = Scoring()  # of all other trainers: `patch_trl` sets its options, and they log its shares
SCORING: ContextVar[Scoring] = ContextVar("grpo_kernels_trl_scoring", default=PATCHED)
UNKNOWN_CALL = ModelCall()  # of all other trainers, too: nothing is known of its rows
CALL: ContextVar[ModelCall] = ContextVar("grpo_kernels_trl_call", default=UNKNOWN_CALL)
HEAD_OF_MODEL: ContextVar[Head | None] = ContextVar(
    "grpo_kernels_trl_head", default=None
)  # its measured constants
