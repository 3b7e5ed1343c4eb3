"""Samples of an optimizer step brought together by prompt, with TRL's losses and metrics.

TRL scatters the completions of a prompt over micro-batches, and a tree has little to share in each.
`regrouped` divides the samples of a `Window` anew: those of a prompt together, the ones without
gradient last, micro-batches filled up one after the other. The step's gradient is the same sum.

Metrics are TRL's own, of TRL's own micro-batches: each sample's log-probabilities and entropies are
kept, and after the last micro-batch of the window TRL's loss runs on them once more, without
gradient, for each micro-batch that it had made. What it logs then is logged; what it logs of a
regrouped micro-batch is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.objective.losses import averaged_over
from grpo_kernels.patching import divided, numbered, replaced
from grpo_kernels.trl.micro_batches import config_of, live_of_loss, metrics_of

# Losses whose optimizer step is the same sum over samples, whatever micro-batches they are in.
REGROUPED = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")
PART = "regrouped"  # the entry of a regrouped micro-batch that holds its `Part`


@dataclass(eq=False)
class Window:
    """TRL's micro-batches that one optimizer step divides, and what their samples' losses gave."""

    batches: list[dict[str, Any]]
    kept: dict[str, Tensor] = field(default_factory=dict)  # (S, ...) by sample

    @property
    def size(self) -> int:
        """The samples of one of TRL's micro-batches."""
        return len(self.batches[0]["prompt_ids"])

    def keep(self, samples: Sequence[int], results: dict[str, Tensor]) -> None:
        """Keep the (n, ...) `results` of these samples."""
        for name, x in results.items() if samples else ():
            if name not in self.kept:
                self.kept[name] = x.new_zeros(len(self.batches) * self.size, *x.shape[1:])
            self.kept[name][[*samples]] = x

    def restored(self) -> list[dict[str, Any]]:
        """TRL's micro-batches with all that is kept of their samples."""
        found = [{**batch} for batch in self.batches]
        for name, x in self.kept.items():
            for batch, own in zip(found, x.split(self.size), strict=True):
                batch[name] = own
        return found


@dataclass(frozen=True, eq=False)
class Part:
    """A regrouped micro-batch: its samples in the window; none, and the batch is of no tokens."""

    window: Window
    samples: list[int]
    is_last: bool


def reason_against(trainer: Any) -> str | None:
    """What forbids to regroup: the loss depends on which samples share a micro-batch."""
    args, owner = trainer.args, trainer.loss_owner
    # what TRL's loss reads: a callback may change it
    for what, is_set in (
        (f"a loss of {owner.__name__}'s own", owner is not GRPOTrainer),
        (f"loss_type={trainer.loss_type!r}", trainer.loss_type not in REGROUPED),
        ("entropy_coef", trainer._entropy_bonus_enabled),
        ("top_entropy_quantile", trainer.top_entropy_quantile < 1.0),
        ("router_aux_loss_coef", trainer.aux_loss_enabled),
    ):
        if is_set:
            return f"{what}, whose loss depends on which samples share a micro-batch"
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % accumulated and accumulated % steps:
        return f"steps_per_generation={steps}, of which optimizer steps of {accumulated} take parts"
    return None


def window_of(trainer: Any) -> int:
    """The micro-batches of a generation that one optimizer step divides."""
    args = trainer.args
    return int(min(args.gradient_accumulation_steps, args.steps_per_generation))


def check_window(trainer: Any) -> None:
    """Raise RuntimeError if the optimizer step of the next micro-batch ends within a window."""
    window = window_of(trainer)
    if trainer.accelerator.sync_gradients and (trainer._step + 1) % window:
        raise RuntimeError(
            f"regroup: expected optimizer steps of whole windows of {window} micro-batches, got "
            "one that ends within a window; pass regroup=False"
        )


def share_of_mean(trainer: Any, inputs: dict[str, Any]) -> float:
    """Factor of a part's loss, if it is a mean: its samples over those of TRL's micro-batch."""
    config = config_of(trainer)
    if averaged_over(config, num_items=True) != "sequences":
        return 1.0
    return len(inputs["prompt_ids"]) / inputs[PART].window.size


@contextmanager
def unlogged(trainer: Any) -> Iterator[None]:
    """Inside, TRL's loss logs nothing, and asks no other process for its metrics."""
    metrics, accelerator = metrics_of(trainer), trainer.accelerator
    before = {name: len(x) for name, x in metrics.items()}
    with ExitStack() as stack:
        for name in ("gather", "gather_for_metrics", "reduce"):
            stack.enter_context(replaced(accelerator, name, lambda x, *_, **__: x))
        try:
            yield
        finally:
            for name in [*metrics]:
                del metrics[name][before.get(name, 0) :]
                if not metrics[name]:
                    del metrics[name]


def regrouped(
    trainer: Any, batches: list[dict[str, Any]], *, in_trees: bool
) -> list[dict[str, Any]]:
    """TRL's micro-batches of a generation, the samples of each window `divided` anew.

    A micro-batch without a sample left gets one without tokens.
    """
    found: list[dict[str, Any]] = []
    count = window_of(trainer)
    for start in range(0, len(batches), count):
        window = Window(batches[start : start + count])
        size = window.size
        is_live: list[bool] = []
        for batch in window.batches:
            live = live_of_loss(trainer, batch)
            is_live += [True] * size if live is None else live.tolist()
        first = window.batches[0]
        names = [name for name, x in first.items() if _is_per_sample(x, size)]
        merged = {name: _joined([batch[name] for batch in window.batches]) for name in names}
        columns = merged["prompt_ids"].shape[1] + merged["completion_ids"].shape[1]
        both = zip(merged["prompt_ids"].cpu(), merged["prompt_mask"].cpu(), strict=True)
        prompts = numbered([tuple(ids[mask != 0].tolist()) for ids, mask in both])
        lengths = merged["completion_mask"].sum(1).tolist()
        budget = trainer.tokens_per_forward or size * columns
        parts = divided(prompts, lengths, is_live, count, budget, size, in_trees=in_trees)
        for i, (batch, samples) in enumerate(zip(window.batches, parts, strict=True)):
            own = {name: _chosen(x, samples or [0]) for name, x in merged.items()}
            for name in own if not samples else ():  # no token, and no ratio that overflows
                if name == "completion_mask" or name.endswith("_per_token_logps"):
                    own[name] = torch.zeros_like(own[name])
            own[PART] = Part(window, samples, is_last=i == len(parts) - 1)
            found.append({**batch, **own})
    return found


def is_empty(batch: dict[str, Any]) -> bool:
    """True for a regrouped micro-batch without samples."""
    return PART in batch and not batch[PART].samples


def undone(batches: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """TRL's own micro-batches of a generation that was regrouped.

    They have those of the fields `names` that all samples of their window have.
    """
    found = []
    for i, batch in enumerate(batches):
        if PART not in batch:  # it was left as it was
            found.append(batch)
        elif batch[PART].is_last:
            window = batch[PART].window
            parts = batches[i + 1 - len(window.batches) : i + 1]
            window.kept.clear()
            has_all = all(name in x for x in parts for name in names)
            for part in parts if has_all else ():
                window.keep(part[PART].samples, {name: part[name] for name in names})
            found += window.restored()
    return found


def first_sample(batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` with its first sample alone."""
    size = len(batch["prompt_ids"])
    return {name: _chosen(x, [0]) if _is_per_sample(x, size) else x for name, x in batch.items()}


def _chosen(x: Any, samples: Sequence[int]) -> Any:
    return x[[*samples]] if isinstance(x, Tensor) else [x[i] for i in samples]


def _is_per_sample(x: Any, size: int) -> bool:
    has_length = isinstance(x, list) or (isinstance(x, Tensor) and x.dim() > 0)
    return has_length and len(x) == size


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([*parts]) if isinstance(parts[0], Tensor) else [x for y in parts for x in y]
