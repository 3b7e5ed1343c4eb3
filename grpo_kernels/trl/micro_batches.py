"""TRL's micro-batches: which tokens count, which gradient to expect, samples brought together.

The expected gradient follows from the trainer's options and the micro-batch. It is TRL's own loss
that runs, so an expectation that is off costs time and changes no result.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.body.inputs import check_skip
from grpo_kernels.loss import policy_expectation
from grpo_kernels.objective.config import LossConfig, config_of_trainer
from grpo_kernels.objective.losses import averaged_over, loss_of
from grpo_kernels.patching import KnownRows
from grpo_kernels.trl.fused_head import HEAD

# Losses whose optimizer step is the same sum over samples, whatever micro-batches they are in.
REGROUPED = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")
# entries of a regrouped micro-batch
EMPTY = "has_no_samples"  # no samples are left: it has one, without tokens
SIZE = "samples_before"  # the number of samples that TRL gave it


def counted_tokens(inputs: dict[str, Any]) -> Tensor:
    """Mask (B, T) of TRL's batch, 0 where a token is padding or a tool's."""
    mask, tool_mask = inputs["completion_mask"], inputs.get("tool_mask")
    return mask if tool_mask is None else mask * tool_mask


def metrics_of(trainer: Any) -> dict[str, list[float]]:
    """TRL's metrics of the mode that the trainer is in."""
    found: dict[str, list[float]] = trainer._metrics["train" if trainer.model.training else "eval"]
    return found


def is_corrected(trainer: Any) -> bool:
    """True if `trainer` corrects for its sampler."""
    return bool(
        getattr(trainer, "use_vllm", False)
        and getattr(trainer, "vllm_importance_sampling_correction", False)
    )


def correction_options(trainer: Any) -> dict[str, Any]:
    """The `LossConfig` fields of the trainer's correction for its sampler."""
    names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    found = {name: getattr(trainer, name) for name in names}
    return {"vllm_importance_sampling_correction": True, **found}


def loss_config(trainer: Any, *, is_unscored: bool = False) -> LossConfig | None:
    """Configuration of the trainer's loss; None if it has no gradient, or we do not know it."""
    if not (torch.is_grad_enabled() and HEAD.is_known()):
        return None
    owner = trainer._loss_owner
    overrides: dict[str, Any] = {"kl_estimator": trainer.kl_estimator}
    if getattr(trainer, "use_adaptive_entropy", False):  # TRL keeps the weight on the trainer
        too_low = trainer._last_world_entropy <= trainer.args.entropy_target
        overrides["entropy_coef"] = trainer.entropy_coef if too_low else 0.0
    if owner.__name__ == "GMPOTrainer" and owner.__module__.startswith("trl."):
        # it overrides the loss and reads none of these options
        overrides = {"loss_type": "gmpo", "entropy_coef": 0.0, "delta": None}
        overrides["off_policy_mask_threshold"] = None
    elif owner is not GRPOTrainer:
        return None
    elif is_unscored and is_corrected(trainer):  # the loss makes the ratio to the sampler
        overrides |= correction_options(trainer)
    try:
        return dataclasses.replace(config_of_trainer(trainer.args), **overrides)
    except (TypeError, ValueError) as error:
        _warn(error)
        return None


def rows_of_loss(
    trainer: Any, inputs: dict[str, Any], config: LossConfig | None
) -> KnownRows | None:
    """The rows (B, T) that the loss `config` reads, and the gradient that it will send."""
    if config is None:
        return None
    counted, fill = counted_tokens(inputs), None
    if counted is not inputs["completion_mask"]:
        # Tools' tokens are labelled and not read. With these log-probabilities a ratio is finite.
        scored = (inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps"))
        fill = next((logps for logps in scored if logps is not None), None)
    try:
        given = _policy_inputs(trainer, inputs, config)
        expected = policy_expectation(config, completion_mask=counted, **given)
    except (TypeError, ValueError) as error:  # TRL takes some shapes that we do not
        _warn(error)
        expected = None
    return KnownRows(counted, fill, expected)


def _policy_inputs(trainer: Any, inputs: dict[str, Any], config: LossConfig) -> dict[str, Any]:
    """The batch as `policy_expectation` takes it, on one scale for policy term and entropy bonus.

    TRL divides the bonus and most losses by the accumulation steps G. dapo, cispo and vespo divide
    by num_items / world_size * G / steps_per_generation instead. G is left out of both here, so
    that these three divide by num_items / (world_size * steps_per_generation).
    """
    found = {
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs.get("old_per_token_logps"),
    }
    if config.estimates_kl:  # where it is not scored yet, any values grade the same rows
        reference = inputs.get("ref_per_token_logps")
        zeros = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
        found["ref_per_token_logps"] = zeros if reference is None else reference
    if config.masks_off_policy or config.corrects_sampling:
        found["sampling_per_token_logps"] = inputs.get("sampling_per_token_logps")
    enters = loss_of(config).importance_ratio
    if enters == "argument" or (enters == "factor" and is_corrected(trainer)):
        found["importance_sampling_ratio"] = inputs.get("importance_sampling_ratio")
    items = inputs.get("num_items_in_batch")
    if items is not None:
        items = torch.as_tensor(items).clamp(min=1.0) / trainer.accelerator.num_processes
        steps = getattr(trainer.args, "steps_per_generation", None) or 1
        found["num_items_in_batch"] = items / steps
    return found


def _warn(error: Exception) -> None:
    warnings.warn(f"grpo_kernels: the gradient of this loss is not foreseen: {error}", stacklevel=3)


def live_of_loss(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """`live_sequences` of the loss of `inputs`."""
    return live_sequences(trainer, rows_of_loss(trainer, inputs, loss_config(trainer)))


def live_sequences(trainer: Any, rows: KnownRows | None) -> Tensor | None:
    """(B,) bool: sequences that may get a gradient from the loss of `rows`; None: not known."""
    graded = None if rows is None or rows.expected is None else rows.expected.graded
    return None if graded is None or trainer.aux_loss_enabled else graded.any(dim=1)


def without_dead(
    inputs: dict[str, Any], live: Tensor, config: LossConfig | None
) -> tuple[dict[str, Any], Tensor | float]:
    """Inputs of TRL's loss with the sequences that are not `live` masked; a factor for the loss."""
    mask = inputs["completion_mask"]
    keep = live.to(mask.device)[:, None]
    found = {**inputs, "completion_mask": mask * keep}
    for name, x in inputs.items():
        if name.endswith("_per_token_logps") and isinstance(x, Tensor):
            found[name] = x.masked_fill(~keep, 0.0)  # so that no ratio overflows
    if config is None or averaged_over(config, num_items=True) != "tokens":
        return found, 1.0
    counted = counted_tokens(inputs)  # bnpo: a mean over all tokens of the micro-batch
    return found, (counted * keep).sum() / counted.sum().clamp(min=1)


@contextmanager
def measured(trainer: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """Remove the metrics that TRL's loss adds inside if no process has a sequence to measure."""
    has_sequence = inputs["completion_mask"].any().reshape(1)
    is_empty = not trainer.accelerator.gather(has_sequence).any()
    metrics = metrics_of(trainer)
    before = {name: len(x) for name, x in metrics.items()}
    yield
    for name in [*metrics] if is_empty else ():
        del metrics[name][before.get(name, 0) :]
        if not metrics[name]:
            del metrics[name]


def check_options(trainer: Any) -> None:
    """Raise ValueError unless the loss allows `zero_advantage` and `regroup`."""
    args, budget, owner = trainer.args, trainer.tokens_per_forward, trainer._loss_owner
    adapts_entropy = getattr(args, "use_adaptive_entropy", False)
    if trainer.trunk_options.zero_advantage == "skip":
        check_skip(config_of_trainer(args))
        for name, is_set in (
            ("use_adaptive_entropy", adapts_entropy),
            ("fused_sampling_correction", trainer.fused_sampling_correction is True),
        ):
            if is_set:
                raise ValueError(
                    f"zero_advantage: expected 'score' or 'train' with {name}, which reads all "
                    "sequences, got 'skip'"
                )
    if not trainer.regroup:
        if budget is not None:
            raise ValueError(
                "tokens_per_forward: expected None without regroup=True, which it is for, got "
                f"{budget}"
            )
        return
    is_number = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    if budget is not None and not is_number:
        raise ValueError(
            f"tokens_per_forward: expected a number of tokens, an int >= 1, or None, got {budget!r}"
        )
    for what, is_set in (
        (f"a loss of {owner.__name__}'s own", owner is not GRPOTrainer),
        (f"loss_type={args.loss_type!r}", args.loss_type not in REGROUPED),
        ("entropy_coef", args.entropy_coef != 0.0),
        ("use_adaptive_entropy", adapts_entropy),
        ("top_entropy_quantile", args.top_entropy_quantile < 1.0),
        ("router_aux_loss_coef", trainer.aux_loss_enabled),
    ):
        if is_set:
            raise ValueError(
                f"regroup: expected False with {what}, whose loss depends on which samples share a "
                "micro-batch, got True"
            )
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % accumulated and accumulated % steps:
        raise ValueError(
            "regroup: expected gradient_accumulation_steps and steps_per_generation of which one "
            f"divides the other, got {accumulated} and {steps}"
        )


def check_window(trainer: Any) -> None:
    """Raise RuntimeError if the optimizer step of the next micro-batch ends within a window."""
    window = min(trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation)
    if trainer.accelerator.sync_gradients and (trainer._step + 1) % window:
        raise RuntimeError(
            f"regroup: expected optimizer steps of whole windows of {window} micro-batches, got "
            "one that ends within a window: a training was interrupted within an optimizer step, "
            "and train() called again; make a new trainer, which can resume from a checkpoint, or "
            "pass regroup=False"
        )


def share_of_mean(trainer: Any, inputs: dict[str, Any]) -> float:
    """Factor of a micro-batch's loss, if it is a mean: its samples over those before regrouping."""
    config = config_of_trainer(trainer.args)
    if SIZE not in inputs or averaged_over(config, num_items=True) != "sequences":
        return 1.0
    return len(inputs["prompt_ids"]) / float(inputs[SIZE])


def regrouped(
    trainer: Any, batches: list[dict[str, Any]], *, in_trees: bool
) -> list[dict[str, Any]]:
    """TRL's micro-batches of a generation, the samples of each optimizer step `divided` anew.

    A micro-batch without a sample left gets one without tokens.
    """
    if any(batch.get("pixel_values") is not None for batch in batches):
        warnings.warn(
            "grpo_kernels: regroup: a batch has images, its samples stay as they are", stacklevel=2
        )
        return batches
    found = []
    window = min(trainer.args.gradient_accumulation_steps, len(batches))
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        size = len(part[0]["prompt_ids"])
        is_live: list[bool] = []
        for batch in part:
            live = live_of_loss(trainer, batch)
            is_live += [True] * size if live is None else live.tolist()
        names = [name for name, x in part[0].items() if _is_per_sample(x, size)]
        merged = {name: _joined([batch[name] for batch in part]) for name in names}
        columns = merged["prompt_ids"].shape[1] + merged["completion_ids"].shape[1]
        both = zip(merged["prompt_ids"].cpu(), merged["prompt_mask"].cpu(), strict=True)
        prompts = [tuple(ids[mask != 0].tolist()) for ids, mask in both]
        lengths = merged["completion_mask"].sum(1).tolist()
        budget = trainer.tokens_per_forward or size * columns
        parts = divided(prompts, lengths, is_live, len(part), budget, size, in_trees=in_trees)
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
    """Divide samples into `parts` of at most `budget` tokens, those of a prompt together.

    Prompts with live samples come first, and of these the ones with most tokens. A sample that fits
    nowhere goes where fewest tokens are. `in_trees`: a part computes each prompt once; else its
    rows stand side by side, and it has `size` samples.
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
    has_length = isinstance(x, list) or (isinstance(x, Tensor) and x.dim() > 0)
    return has_length and len(x) == size


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([*parts]) if isinstance(parts[0], Tensor) else [x for y in parts for x in y]
