"""TRL's micro-batches: tokens that count, sequences without gradient left out, samples regrouped by prompt."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl
from torch import Tensor

from grpo_kernels.body.inputs import check_skip
from grpo_kernels.objective.config import LossConfig, config_of_trainer
from grpo_kernels.objective.normaliser import averaged_over

# Losses whose optimizer step is the same sum over samples however they are divided into micro-batches.
REGROUPED = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")
_IMAGES = "pixel_values"
EMPTY = "has_no_samples"  # entry of a micro-batch that regrouping has left without samples; it has one without tokens
SIZE = "samples_before"  # entry of a regrouped micro-batch: the number of samples that TRL gave it


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """Mask (B, T) of TRL's batch, 0 where a token is padding or a tool's."""
    mask, tool_mask = inputs["completion_mask"], inputs.get("tool_mask")
    return mask if tool_mask is None else mask * tool_mask


def check_options(trainer: Any, owner: type) -> None:
    """Raise unless the loss of `trainer`, a method of `owner`, allows its `zero_advantage` and its regrouping.

    Raises:
        ValueError: it does not; the message names the option.
    """
    args = trainer.args
    if trainer.trunk_options.zero_advantage == "skip":
        check_skip(config_of_trainer(args))
        for name, is_set in (
            ("use_adaptive_entropy", getattr(args, "use_adaptive_entropy", False)),
            ("fused_sampling_correction", trainer.fused_sampling_correction is True),
        ):
            if is_set:
                raise ValueError(
                    f"zero_advantage: expected 'score' or 'train' with {name}, which reads all sequences, got 'skip'"
                )
    if trainer.regroup:
        _check_regroup(trainer, owner)
    elif trainer.tokens_per_forward is not None:
        raise ValueError(
            f"tokens_per_forward: expected None without regroup=True, which it is for, got {trainer.tokens_per_forward}"
        )


def _check_regroup(trainer: Any, owner: type) -> None:
    args, budget = trainer.args, trainer.tokens_per_forward
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int) or budget < 1
    ):
        raise ValueError(
            f"tokens_per_forward: expected a number of tokens, an int >= 1, or None, got {budget!r}"
        )
    refused = {
        f"a loss of {owner.__name__}'s own": owner is not trl.GRPOTrainer,
        f"loss_type={args.loss_type!r}": args.loss_type not in REGROUPED,
        "entropy_coef": args.entropy_coef != 0.0,
        "use_adaptive_entropy": getattr(args, "use_adaptive_entropy", False),
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "router_aux_loss_coef": trainer.aux_loss_enabled,
    }
    found = next((name for name, is_set in refused.items() if is_set), None)
    if found is not None:
        raise ValueError(
            f"regroup: expected False with {found}, whose loss depends on which samples share a micro-batch, got True"
        )
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % accumulated and accumulated % steps:
        raise ValueError(
            f"regroup: expected gradient_accumulation_steps and steps_per_generation of which one divides the other, "
            f"got {accumulated} and {steps}"
        )


def check_window(trainer: Any) -> None:
    """Raise RuntimeError if the optimizer step that the next micro-batch ends does not end a window of `regrouped`.

    TRL goes on with the rest of its buffer if ``train()`` is called again after an interrupt within a step.
    """
    window = min(trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation)
    if trainer.accelerator.sync_gradients and (trainer._step + 1) % window:
        raise RuntimeError(
            f"regroup: expected optimizer steps of whole windows of {window} micro-batches, got one that ends within a "
            "window: a training was interrupted within an optimizer step, and train() called again; make a new "
            "trainer, which can resume from a checkpoint, or pass regroup=False"
        )


def regrouped(
    batches: list[dict[str, Any]],
    live: Sequence[Tensor | None],
    window: int,
    budget: int | None,
    *,
    in_trees: bool,
) -> list[dict[str, Any]]:
    """Return `batches` with the samples of each `window` divided by prompts, within a `budget` of tokens.

    Micro-batches then have different numbers of samples. One that has none left gets one sample without tokens.

    Args:
        batches: the micro-batches that TRL keeps of a generation, B samples each.
        live: for each micro-batch (B,) bool, the sequences that may get a gradient; None: all.
        window: micro-batches of one optimizer step.
        budget: tokens of a micro-batch; None: those of a padded one.
        in_trees: True if a micro-batch computes each prompt once, False if its rows stand side by side.
    """
    if any(batch.get(_IMAGES) is not None for batch in batches):
        warnings.warn(
            "grpo_kernels: regroup: a batch has images, its samples stay as they are", stacklevel=2
        )
        return batches
    found = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        size = len(part[0]["prompt_ids"])
        is_live = [
            x
            for y in live[start : start + window]
            for x in ([True] * size if y is None else y.tolist())
        ]
        names = [name for name, x in part[0].items() if _is_per_sample(x, size)]
        merged = {name: _joined([batch[name] for batch in part]) for name in names}
        columns = merged["prompt_ids"].shape[1] + merged["completion_ids"].shape[1]
        both = zip(merged["prompt_ids"].cpu(), merged["prompt_mask"].cpu(), strict=True)
        prompts = [tuple(ids[mask != 0].tolist()) for ids, mask in both]
        lengths = merged["completion_mask"].sum(1).tolist()
        parts = divided(
            prompts, lengths, is_live, len(part), budget or size * columns, size, in_trees=in_trees
        )
        for batch, chosen in zip(part, parts, strict=True):
            own = {name: _chosen(x, chosen or [0]) for name, x in merged.items()} | {SIZE: size}
            if not chosen:
                own |= {EMPTY: True, "completion_mask": torch.zeros_like(own["completion_mask"])}
            found.append({**batch, **own})
    return found


def divided(
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    live: Sequence[bool],
    parts: int,
    budget: int,
    size: int,
    *,
    in_trees: bool,
) -> list[list[int]]:
    """Divide samples into `parts` of at most `budget` tokens: all samples of a prompt together where they fit.

    Prompts with live samples come first, and of these the ones with most tokens. A sample that fits nowhere goes where
    fewest tokens are. Without trees a part has `size` samples, as TRL has it.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    found: list[list[int]] = [[] for _ in range(parts)]
    used, inside = [0] * parts, [set[tuple[int, ...]]() for _ in range(parts)]

    def place(prompt: tuple[int, ...], samples: Sequence[int], *, anywhere: bool) -> bool:
        own = sum(lengths[i] for i in samples)
        added = [own if prompt in inside[k] else own + len(prompt) for k in range(parts)]
        room = [k for k in range(parts) if in_trees or len(found[k]) + len(samples) <= size]
        fits = [k for k in room if not in_trees or used[k] + added[k] <= budget]
        if not fits and not anywhere:
            return False
        part = min(fits, key=added.__getitem__) if fits else min(room, key=used.__getitem__)
        used[part] += added[part]
        inside[part].add(prompt)
        found[part] += samples
        return True

    def rank(samples: Sequence[int]) -> tuple[bool, int]:
        return not any(live[i] for i in samples), -sum(lengths[i] for i in samples)

    for prompt, samples in sorted(groups.items(), key=lambda item: rank(item[1])):
        if not place(prompt, samples, anywhere=False):
            for i in sorted(samples, key=lambda i: -lengths[i]):
                place(prompt, [i], anywhere=True)
    return found


def first_sample(batch: dict[str, Any]) -> dict[str, Any]:
    """Return `batch` with its first sample alone."""
    size = len(batch["prompt_ids"])
    return {name: _chosen(x, [0]) if _is_per_sample(x, size) else x for name, x in batch.items()}


def _chosen(x: Any, samples: Sequence[int]) -> Any:
    return x[[*samples]] if isinstance(x, Tensor) else [x[i] for i in samples]


def _is_per_sample(x: Any, size: int) -> bool:
    return (isinstance(x, Tensor) and x.dim() > 0 and len(x) == size) or (
        isinstance(x, list) and len(x) == size
    )


def _joined(parts: Sequence[Any]) -> Any:
    return (
        torch.cat([*parts]) if isinstance(parts[0], Tensor) else [x for part in parts for x in part]
    )


def share_of_mean(trainer: Any, inputs: dict[str, Any]) -> float:
    """Return the factor of a micro-batch's loss: its number of samples over that before regrouping, if it is a mean."""
    if (
        SIZE not in inputs
        or averaged_over(config_of_trainer(trainer.args), num_items=True) != "sequences"
    ):
        return 1.0
    return len(inputs["prompt_ids"]) / float(inputs[SIZE])


@contextmanager
def unmeasured(metrics: dict[str, list[float]]) -> Iterator[None]:
    """Remove what `metrics` gain inside, for a micro-batch without a sequence to measure."""
    before = {name: len(x) for name, x in metrics.items()}
    yield
    for name in [*metrics]:
        del metrics[name][before.get(name, 0) :]
        if not metrics[name]:
            del metrics[name]


def without_dead(
    inputs: dict[str, Any], live: Tensor, config: LossConfig | None
) -> tuple[dict[str, Any], Tensor | float]:
    """Return the inputs of TRL's loss without sequences that are not `live` (B,), and a factor that corrects the loss.

    The dead sequences are masked, and their log-probabilities 0, so that no ratio overflows. The factor is 1 except for
    a mean over all tokens of the micro-batch (bnpo).
    """
    mask = inputs["completion_mask"]
    keep = live.to(mask.device)[:, None]
    found = {**inputs, "completion_mask": mask * keep}
    for name, x in inputs.items():
        if name.endswith("_per_token_logps") and isinstance(x, Tensor):
            found[name] = x.masked_fill(~keep, 0.0)
    if config is None or averaged_over(config, num_items=True) != "tokens":
        return found, 1.0
    counted = counted_tokens(inputs)
    return found, (counted * keep).sum() / counted.sum().clamp(min=1)
