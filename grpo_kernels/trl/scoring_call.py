"""One call of TRL's `_get_per_token_logps_and_entropies`, in which the model computes only what is read of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.body.trunk import live_trunk
from grpo_kernels.host import KnownRows, Shares, during
from grpo_kernels.trl import sampled_sets
from grpo_kernels.trl.expected_gradient import live_sequences
from grpo_kernels.trl.fused_head import HEAD
from grpo_kernels.trl.head import whole_heads
from grpo_kernels.trl.scoring import CALL, SCORING, ModelCall, Scoring


@contextmanager
def only_needed(trainer: Any, scoring: Scoring, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, trunk and head of the model compute only what the call with `arguments` needs, if this TRL is known.

    `scoring` is that of the loss or generation in which TRL makes the call.
    """
    if not HEAD.is_known():
        yield
        return
    labelled: Tensor | None = None
    if "attention_mask" in arguments and "logits_to_keep" in arguments:
        labelled = arguments["attention_mask"][:, -arguments["logits_to_keep"] :] != 0
    call = _model_call(trainer, scoring, arguments, labelled)
    trunk = (
        nullcontext()
        if labelled is None
        else _trunk(trainer, scoring.shares, call.rows, arguments, labelled)
    )
    with (
        HEAD.replaced(),
        during(SCORING, scoring),
        during(CALL, call),
        whole_heads(arguments["model"]),
        trunk,
    ):
        yield


def _model_call(
    trainer: Any, scoring: Scoring, arguments: dict[str, Any], labelled: Tensor | None
) -> ModelCall:
    """Return the rows of one call of the model and the way to compute them; `labelled` (B, T) as in `ModelCall`."""
    compute = None if scoring.comparison is None else scoring.comparison.compare
    if labelled is None:
        return ModelCall(compute=compute)
    rows = scoring.rows
    if rows is None or rows.counted.shape != labelled.shape or not torch.is_grad_enabled():
        rows = KnownRows(labelled)
    if scoring.reference_head is not None:
        compute = scoring.reference_head.take
    elif scoring.sampled is not None and trainer.sampling_mask is not None:
        ids, mask = arguments["input_ids"], arguments["attention_mask"]
        sets = sampled_sets.of_rows(scoring.sampled, ids, mask, labelled.shape[1])
        if any(x is not None for x in sets):
            compute, drawn = sampled_sets.scoring_over(sets, labelled, trainer.sampling_mask)
            rows = KnownRows(rows.counted * drawn, rows.fill, rows.expected)
    return ModelCall(labelled, arguments.get("batch_size") or labelled.size(0), rows, compute)


def _trunk(
    trainer: Any,
    shares: Shares,
    rows: KnownRows | None,
    arguments: dict[str, Any],
    labelled: Tensor,
) -> AbstractContextManager[Any]:
    """Return a context in which the trunk computes the cells that predict `labelled` (B, T): each the next token."""
    prompt = arguments["attention_mask"].shape[1] - labelled.shape[1]
    needed = F.pad(labelled, (prompt - 1, 1))
    live = (
        None if trainer.trunk_options.zero_advantage == "train" else live_sequences(trainer, rows)
    )
    shares = shares if trainer.model.training else Shares()
    return live_trunk(
        arguments["model"], trainer.trunk_options, needed=needed, live=live, shares=shares
    )
