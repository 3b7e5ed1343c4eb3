"""Score completions of a truncating sampler over the sets of ids that it kept.

A ``rollout_func`` returns the sets in a field ``"sampling_mask"``: for each completion, a list of
the ids kept at each token, like vLLM's ``output.sampling_mask.token_ids``. TRL shuffles and splits
the batch's lists in the same way as its tensors. Old, reference and current log-probabilities are
all computed over these sets. Completions are matched to sets by their ids, so texts that a reward
function scores have no sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base import OnMissingSet
from grpo_kernels.kept_ids import KeptIds, joined_ids
from grpo_kernels.results import Scores
from grpo_kernels.scores import linear_logps

SETS = "sampling_mask"  # field of the rollout's output and of TRL's batch


class SampledSets(NamedTuple):
    """The sets of one completion of T tokens."""

    tokens: tuple[tuple[int, ...], ...]  # (ids of the prompt, ids of the completion)
    ids: Tensor  # (M,) int32 or int64, the kept ids of all tokens, concatenated
    counts: Tensor  # (T,) int64, number of kept ids per token
    drawn: Tensor  # (T,) bool, True for tokens that the sampler drew, False for tool tokens


def taken_sets(
    generated: tuple[Any, ...], accelerator: Any, metrics: dict[str, list[float]]
) -> list[SampledSets]:
    """Pop the sets from the results of TRL's ``_generate``, and log the ``kept/*`` metrics."""
    prompts, completions, tool_masks, _, _, extra_fields, *_ = generated
    rows = extra_fields.pop(SETS, None)
    if rows is None:
        raise ValueError("sampling_mask: expected this field in rollout_func's output, got none")
    if len(rows) != len(completions):
        raise ValueError(
            f"sampling_mask: expected the sets of {len(completions)} completions, got {len(rows)}"
        )
    found: list[SampledSets] = []
    drawn_counts = []
    for i, (sets, ids) in enumerate(zip(rows, completions, strict=True)):
        if len(sets) != len(ids):
            raise ValueError(
                f"sampling_mask: expected {len(ids)} lists of ids for completion {i}, one "
                f"per token, got {len(sets)}"
            )
        drawn = torch.tensor([1] * len(ids) if tool_masks is None else tool_masks[i]).bool()
        tokens = tuple(map(int, prompts[i])), tuple(map(int, ids))
        kept, counts = joined_ids(SETS, sets)
        found.append(SampledSets(tokens, kept, counts, drawn))
        drawn_counts.append(counts[drawn])
    counts = torch.cat(drawn_counts)
    sums = torch.stack([counts.sum(), (counts > 0).sum(), (counts == 0).sum()])
    size, having, without = accelerator.reduce(sums.to(accelerator.device), "sum").tolist()
    metrics["kept/size"].append(size / max(having, 1))
    metrics["kept/without_set"].append(without / max(having + without, 1))
    return found


def _sets_of_rows(
    sets: Sequence[SampledSets | None], rows: Iterable[tuple[Tensor, Tensor]]
) -> list[SampledSets | None]:
    """The sets of each row (prompt ids, completion ids); None for a row that has none."""
    left: dict[Any, list[SampledSets]] = defaultdict(list)
    for x in sets:
        if x is not None:
            left[x.tokens].append(x)
    found: list[SampledSets | None] = []
    for row in rows:
        equal = left.get(tuple(tuple(ids.tolist()) for ids in row), [None])
        found.append(equal.pop(0) if len(equal) > 1 else equal[0])
    return found


def sets_of_batch(
    sets: Sequence[SampledSets | None], batch: dict[str, Any]
) -> list[SampledSets | None]:
    """Find the sets of each sample of TRL's `batch`; None for fully masked samples."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    parts = zip(*(batch[name].cpu() for name in names), strict=True)
    rows = [(prompt[of != 0], ids[mask != 0]) for prompt, of, ids, mask in parts]
    found = _sets_of_rows(sets, rows)
    if any(x is None and len(ids) for x, (_, ids) in zip(found, rows, strict=True)):
        raise ValueError(
            "sampling_mask: expected the completions that rollout_func returned, got others. A "
            "subclass that changes completions must also change their sets, before "
            "FusedLossMixin._generate returns"
        )
    return found


def over_sets(
    sets: Sequence[SampledSets | None],
    inputs: dict[str, Any],
    labeled: Tensor,  # (B, n) bool, columns from `start` on; True: predicts a completion id
    start: int,
    on_missing_set: OnMissingSet | None,
) -> tuple[Callable[..., Scores], Tensor]:
    """Bind `linear_logps` to the sets of a forward's rows; also mark the drawn tokens, (B, n).

    In a row without sets, all `labeled` tokens count as drawn.
    """
    ids = inputs["input_ids"]
    completion = torch.nn.functional.pad(labeled, (start + 1, 0))[:, : ids.shape[1]]
    prompt = (inputs["attention_mask"] != 0) & ~completion
    parts = zip(ids.cpu(), prompt.cpu(), completion.cpu(), strict=True)
    rows = _sets_of_rows(sets, ((row[of], row[mask]) for row, of, mask in parts))
    if all(x is None for x in rows):
        return linear_logps, labeled
    counts = torch.zeros(labeled.shape, dtype=torch.int64)
    of_tokens = labeled.cpu()
    drawn = of_tokens.clone()
    for i, x in enumerate(rows):
        if x is not None:
            counts[i, of_tokens[i]], drawn[i, of_tokens[i]] = x.counts, x.drawn
    joined = torch.cat([x.ids for x in rows if x is not None])
    kept = KeptIds.from_counts(joined.to(labeled.device), counts.to(labeled.device))
    of_sets: dict[str, Any] = {"kept_ids": kept, "on_missing_set": on_missing_set}
    return partial(linear_logps, **of_sets), drawn.to(ids.device)
