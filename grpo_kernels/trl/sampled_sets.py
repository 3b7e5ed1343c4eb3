"""A truncating sampler's kept sets in TRL's trainer: from the rollout, into the batch, to every scoring of it.

TRL's own generation drops them. A ``rollout_func`` can return them as one more field, ``"sampling_mask"``: for each
completion a list of the ids kept at each token, as vLLM's ``output.sampling_mask.token_ids``. TRL shuffles and splits
the batch's lists like its tensors. Old, reference and current log-probabilities are then taken over these sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import WithoutSet, choices
from grpo_kernels.batch.kept_ids import KeptIds, joined_ids
from grpo_kernels.call.output import Scores
from grpo_kernels.head.head import Head
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.trl import sampling

KEY = "sampling_mask"  # of the rollout's output and of TRL's batch


class SampledSets(NamedTuple):
    """The sets of one completion of T tokens."""

    tokens: tuple[tuple[int, ...], tuple[int, ...]]  # of the prompt and of the completion
    ids: Tensor  # (M,) int32 or int64, one token after the other
    counts: Tensor  # (T,) int64
    drawn: Tensor  # (T,) bool: False where the token is a tool's


def check_option(trainer: Any, *, is_known: bool) -> None:
    """Raise unless the trainer can have its option `sampling_mask`; `is_known`: TRL's fused head is the known one.

    Raises:
        ValueError: it cannot.
    """
    option = trainer.sampling_mask
    if option is None:
        return
    if option not in choices(WithoutSet):
        names = ", ".join(map(repr, choices(WithoutSet)))
        raise ValueError(f"sampling_mask: expected one of {names}, or None, got {option!r}")
    refused = {
        "kl_estimator='full', the divergence over the whole vocabulary": trainer.kl_estimator
        == "full",
        "this trl, which has no fused head that is known": not is_known,
        "no rollout_func, whose output has the sets": trainer.rollout_func is None,
    }
    found = next((name for name, is_set in refused.items() if is_set), None)
    if found is not None:
        raise ValueError(f"sampling_mask: expected None with {found}, got {option!r}")


def warn_of_truncation(trainer: Any) -> None:
    """Warn, once, of a sampler that truncates where TRL would multiply the loss by a sequence's ratio to it."""
    args = trainer.args
    cuts = {
        f"top_p={args.top_p}": args.top_p is not None and args.top_p < 1.0,
        f"top_k={args.top_k}": args.top_k is not None and args.top_k > 0,
        f"min_p={args.min_p}": bool(args.min_p),
    }
    of_sequence = sampling.is_corrected(trainer) and args.vllm_importance_sampling_mode.startswith(
        "sequence_"
    )
    if trainer.sampling_mask is None and of_sequence and any(cuts.values()):
        warn_once(
            f"{', '.join(name for name, is_set in cuts.items() if is_set)}: the sampler's log-probabilities are of the "
            "ids that it keeps, ours of all, so that a sequence's ratio falls with its length, and "
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} multiplies the loss by it; hand "
            "over the sets (sampling_mask=, docs/truncating-samplers.md), or sample from the whole vocabulary"
        )


def measure(trainer: Any, sets: Sequence[SampledSets]) -> None:
    """Log the mean size of the sets, and the share of the drawn tokens that have none, of all ranks."""
    counts = torch.cat([x.counts[x.drawn] for x in sets])
    sums = torch.stack([counts.sum(), (counts > 0).sum(), (counts == 0).sum()])
    size, having, without = trainer.accelerator.reduce(
        sums.to(trainer.accelerator.device), "sum"
    ).tolist()
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics["kept/size"].append(size / max(having, 1))
    metrics["kept/without_set"].append(without / max(having + without, 1))


def taken(generated: tuple[Any, ...]) -> list[SampledSets]:
    """Take the sets out of the results of TRL's ``_generate``, one record per completion.

    Raises:
        ValueError: there are none, or not one list of ids for each token.
    """
    prompts, completions, tool_masks, _, _, extra_fields, *_ = generated
    rows = extra_fields.pop(KEY, None)
    if rows is None:
        raise ValueError(
            "sampling_mask: expected a list of them in rollout_func's output, got none"
        )
    if len(rows) != len(completions):
        raise ValueError(
            f"sampling_mask: expected the sets of {len(completions)} completions, got {len(rows)}"
        )
    found = []
    for i, (sets, ids) in enumerate(zip(rows, completions, strict=True)):
        if len(sets) != len(ids):
            raise ValueError(
                f"sampling_mask: expected {len(ids)} lists of ids for completion {i}, one a token, got {len(sets)}"
            )
        drawn = (
            torch.ones(len(ids), dtype=torch.bool)
            if tool_masks is None
            else torch.tensor(tool_masks[i]).bool()
        )
        tokens = tuple(map(int, prompts[i])), tuple(map(int, ids))
        found.append(SampledSets(tokens, *joined_ids("sampling_mask", sets), drawn))
    return found


def of_rows(
    sets: Sequence[SampledSets | None], ids: Tensor, mask: Tensor, columns: int
) -> list[SampledSets | None]:
    """Return the sets of each row of `ids` (B, L), whose completion is in the last `columns`; None: it has none.

    The tokens that `mask` (B, L) attends to decide. A reward function may score other rows in between, and a subclass
    may leave samples out.
    """
    left: dict[Any, list[SampledSets]] = defaultdict(list)
    for x in sets:
        if x is not None:
            left[x.tokens].append(x)
    found: list[SampledSets | None] = []
    for row, attended in zip(ids.cpu(), mask.cpu() != 0, strict=True):
        prompt, completion = (
            tuple(row[part][attended[part]].tolist())
            for part in (slice(-columns), slice(-columns, None))
        )
        equal = left.get((prompt, completion), [None])
        found.append(equal.pop(0) if len(equal) > 1 else equal[0])
    return found


def of_batch(sets: Sequence[SampledSets | None], batch: dict[str, Any]) -> list[SampledSets | None]:
    """Return the sets of each sample of TRL's `batch`; None for one that is masked whole.

    Raises:
        ValueError: a sample is none of the completions that the sets are of.
    """
    mask = batch["completion_mask"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    found = of_rows(sets, ids, torch.cat([batch["prompt_mask"], mask], dim=1), mask.shape[1])
    if any(
        x is None and is_read for x, is_read in zip(found, mask.any(dim=1).tolist(), strict=True)
    ):
        raise ValueError(
            "sampling_mask: expected a batch of the completions that rollout_func has returned, got others: a subclass "
            "that changes them has to change their sets, before FusedLossMixin._generate returns"
        )
    return found


def scoring_over(
    sets: Sequence[SampledSets | None], labelled: Tensor, without_set: WithoutSet
) -> tuple[Callable[..., Scores], Tensor]:
    """Return (`ModelCall.compute` over the sets of a batch, the mask (B, T) of the drawn tokens); `labelled` (B, T).

    Rows without sets have none at any token, and all of their tokens count as drawn.
    """
    counts, drawn, of_tokens = (
        torch.zeros(labelled.shape, dtype=torch.int64),
        labelled.cpu().clone(),
        labelled.cpu(),
    )
    for i, x in enumerate(sets):
        if x is not None:
            counts[i, of_tokens[i]], drawn[i, of_tokens[i]] = x.counts, x.drawn
    ids = torch.cat([x.ids for x in sets if x is not None])
    kept = KeptIds.from_counts(ids.to(labelled.device), counts.to(labelled.device))
    return partial(_score, kept, without_set), drawn.to(labelled.device)


def _score(
    kept: KeptIds,
    without_set: WithoutSet,
    hidden: Tensor,
    head: Head,
    positions: Tensor | None,
    **options: Any,
) -> Scores:
    """Compute a head call over the sets `kept` of the batch, at `positions` (n,) of the flattened (B, T)."""
    if positions is None:
        raise RuntimeError("sampling_mask: expected TRL to score (B, T) positions, got others")
    return linear_logprob(
        hidden, head, kept_ids=kept.at(positions), without_set=without_set, **options
    )
