"""TRL's micro-batches: predict the gradient of each, and regroup samples by prompt.

The prediction follows from the trainer's options and the micro-batch. TRL's own loss runs, so a
wrong prediction costs time but never changes a result. A gradient where none was expected raises.

TRL scatters the completions of a prompt over micro-batches, which leaves a prefix tree little to
share. `regrouped` redistributes the samples of a `Window`: samples of one prompt stay together,
those without gradient come last, and one micro-batch after another is filled. The gradient of the
optimizer step is the same sum. Metrics remain those of TRL's own micro-batches: the window keeps
the log-probabilities and entropies of each sample. After its last micro-batch, TRL's loss runs on
the kept results, without gradient, once for each of TRL's micro-batches. Only these runs log.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from grpo_kernels.loss import policy_expectation
from grpo_kernels.objective.config import LossConfig, config_of_trainer
from grpo_kernels.objective.expected import Expectation
from grpo_kernels.objective.loss_types import LOSSES
from grpo_kernels.patching import all_replaced, divided, numbered
from grpo_kernels.tokens import read_tokens

OLD, RATIO, REFERENCE = "old_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps"
PART = "regrouped"  # the entry of a regrouped micro-batch that holds its `Part`
Batch = dict[str, Any]


def counted_tokens(inputs: Batch) -> Tensor:
    """Mask (B, T) of TRL's batch: 0 for padding and tool tokens."""
    mask, tool_mask = inputs["completion_mask"], inputs.get("tool_mask")
    return mask if tool_mask is None else mask * tool_mask


def metrics_of(trainer: Any) -> dict[str, list[float]]:
    """TRL's metrics for the trainer's current mode, train or eval."""
    found: dict[str, list[float]] = trainer._metrics["train" if trainer.model.training else "eval"]
    return found


def is_corrected(trainer: Any) -> bool:
    """True if `trainer` corrects for the mismatch between sampler and policy."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def correction_options(trainer: Any) -> dict[str, Any]:
    """Fields of `LossConfig` that describe the trainer's sampler correction."""
    names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    correction = {"vllm_importance_sampling_correction": True}
    return correction | {name: getattr(trainer, name) for name in names}


def config_of(trainer: Any, **overrides: Any) -> LossConfig:
    """Configuration of the trainer's loss, including values that TRL stores on the trainer."""
    of_trainer = {"loss_type": trainer.loss_type, "beta": trainer.beta}
    return config_of_trainer(trainer.args, **{**of_trainer, **overrides})


def foreseen(
    trainer: Any, inputs: Batch
) -> tuple[LossConfig | None, Expectation | None, Tensor | None]:
    """Return three predictions: the loss's config, its gradient, and which sequences may get one.

    The last is (B,) bool. Each is None if unknown. The policy term and the entropy bonus must share
    one scale. TRL divides the bonus and most losses by the accumulation steps G. It divides dapo,
    cispo and vespo by num_items / world_size * G / steps_per_generation instead. This function
    leaves G out of both, so it divides these three by num_items / (world_size *
    steps_per_generation).
    """
    owner, config = trainer.loss_owner, None
    is_gmpo = owner.__name__ == "GMPOTrainer" and owner.__module__.startswith("trl.")
    if not torch.is_grad_enabled() or not (is_gmpo or owner is GRPOTrainer):
        return None, None, None
    overrides: dict[str, Any] = {"kl_estimator": trainer.kl_estimator}
    if is_gmpo:  # GMPOTrainer has its own loss, which reads none of these options
        overrides = {"loss_type": "gmpo", "entropy_coef": 0.0, "delta": None}
        overrides["off_policy_mask_threshold"] = None
    elif trainer.use_adaptive_entropy:  # TRL stores the bonus's weight on the trainer
        too_low = trainer._last_world_entropy <= trainer.args.entropy_target
        overrides["entropy_coef"] = trainer.entropy_coef if too_low else 0.0
    if not is_gmpo and is_corrected(trainer) and RATIO not in inputs:
        overrides |= correction_options(trainer)  # the loss computes the ratio
    names = "advantages", OLD, "sampling_per_token_logps"
    given: dict[str, Any] = {name: inputs.get(name) for name in names}
    items = inputs.get("num_items_in_batch")
    if items is not None:
        items = torch.as_tensor(items).clamp(min=1.0) / trainer.accelerator.num_processes
        given["num_items_in_batch"] = items / trainer.args.steps_per_generation
    try:
        config = config_of(trainer, **overrides)
        if config.estimates_kl:  # without scores yet, zeros predict the same rows
            zeros = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
            given[REFERENCE] = inputs.get(REFERENCE, zeros)
        if is_corrected(trainer) or config.definition.surrogate_input is not None:
            given[RATIO] = inputs.get(RATIO)
        expected = policy_expectation(config, completion_mask=counted_tokens(inputs), **given)
    except (TypeError, ValueError) as error:  # options or shapes that TRL accepts and we do not
        warnings.warn(
            f"grpo_kernels: cannot predict the gradient of this loss: {error}", stacklevel=3
        )
        return config, None, None
    live = None if trainer.aux_loss_enabled else expected.live  # (B, T)
    return config, expected, None if live is None else live.any(dim=1)


def without_dead(
    inputs: Batch, live: Tensor, config: LossConfig | None
) -> tuple[Batch, Tensor | float]:
    """Mask sequences that are not `live`: (inputs of TRL's loss, factor for the loss)."""
    mask = inputs["completion_mask"]
    keep = live.to(mask.device)[:, None]
    found = {**inputs, "completion_mask": mask * keep}
    for name, x in inputs.items():
        if name.endswith("_per_token_logps") and isinstance(x, Tensor):
            found[name] = x.masked_fill(~keep, 0.0)  # so that no ratio overflows
    if config is None or config.definition.loss_over(num_items=True) != "tokens":
        return found, 1.0
    counted = counted_tokens(inputs)  # bnpo: a mean over all tokens of the micro-batch
    return found, (counted * keep).sum() / counted.sum().clamp(min=1)


def with_exact_kl(trainer: Any, loss: Tensor, inputs: Batch, divergences: Tensor) -> Tensor:
    """Add the exact KL to TRL's `loss` (), and log it as TRL logs its own.

    The term is beta times the mean of `divergences` (B, T), averaged as the loss type averages.
    """
    config = config_of(trainer)
    mask, trains = counted_tokens(inputs), trainer.model.training
    definition, items, per_item = config.definition, None, 1.0
    # `items` counts the tokens of the generated batch, items / per_item those of a micro-batch.
    if definition.normalizer == "num_items":
        items = inputs["num_items_in_batch"].clamp(min=1.0)
        steps = trainer.args.steps_per_generation if trains else 1
        per_item = trainer.accelerator.num_processes * steps
    tokens = read_tokens(mask, mask, mask.new_zeros(len(mask)), divergences.dtype)
    weights = per_item * definition.token_weights(tokens, items, config)
    term = config.beta * (weights * divergences.reshape(-1)[tokens.layout.positions]).sum()
    accumulated = trainer.current_gradient_accumulation_steps if trains else 1
    metrics = metrics_of(trainer)
    if trainer._entropy_bonus_enabled:  # TRL's policy loss includes the KL term
        value = term / accumulated if items is not None else term
        gathered = trainer.accelerator.gather(value.detach())
        metrics["policy_loss"][-1] += gathered.nanmean().item()
    totals = torch.stack([(divergences.detach() * mask).sum(), mask.sum().to(divergences.dtype)])
    total, count = trainer.accelerator.reduce(totals, reduction="sum")
    metrics["kl"].append((total / count.clamp(min=1.0)).item())
    return loss + term / accumulated


def samples_of(batch: Batch, samples: Sequence[int]) -> Batch:
    """Select samples of a batch. As in TRL, every entry with a length is indexed by sample."""

    def chosen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() > 0:
            return x[[*samples]]
        return [x[i] for i in samples] if isinstance(x, list) else x

    return {name: chosen(x) for name, x in batch.items()}


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor) and parts[0].dim() > 0:
        return torch.cat([*parts])
    return [x for part in parts for x in part] if isinstance(parts[0], list) else parts[0]


@dataclass(eq=False)
class Window:
    """TRL's micro-batches that share one optimizer step, and the results kept for their samples."""

    batches: list[Batch]
    kept: dict[str, Tensor] = field(default_factory=dict)  # (S, ...) by sample

    def keep(self, samples: Sequence[int], results: dict[str, Tensor]) -> None:
        """Store the `results`, (n, ...) each, of these n samples."""
        for name, x in results.items() if samples else ():
            if name not in self.kept:
                count = sum(len(batch["prompt_ids"]) for batch in self.batches)
                self.kept[name] = x.new_zeros(count, *x.shape[1:])
            self.kept[name][[*samples]] = x

    def restored(self) -> list[Batch]:
        """TRL's micro-batches, with the kept results of their samples."""
        kept = split_tensor_dict(self.kept, len(self.batches))
        return [{**batch, **own} for batch, own in zip(self.batches, kept, strict=True)]


@dataclass(frozen=True, eq=False)
class Part:
    """A regrouped micro-batch: its samples in the window, or no tokens if it has no samples."""

    window: Window
    samples: list[int]
    is_last: bool


def is_empty(batch: Batch) -> bool:
    """True for a regrouped micro-batch without samples."""
    return PART in batch and not batch[PART].samples


def reason_against_regrouping(trainer: Any) -> str | None:
    """Say why samples cannot be regrouped; None if they can."""
    args, owner, definition = trainer.args, trainer.loss_owner, LOSSES.get(trainer.loss_type)
    # a mean over a micro-batch's tokens depends on which samples these are
    depends = definition is None or definition.normalizer == "token_mean"
    # These are the values that TRL's loss reads; a callback may change them.
    for what, is_set in (
        (f"{owner.__name__}'s own loss", owner is not GRPOTrainer),
        (f"loss_type={trainer.loss_type!r}", depends),
        ("entropy_coef", trainer._entropy_bonus_enabled),
        ("top_entropy_quantile", trainer.top_entropy_quantile < 1.0),
        ("router_aux_loss_coef", trainer.aux_loss_enabled),
    ):
        if is_set:
            return f"{what}, whose loss depends on which samples share a micro-batch"
    steps, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % accumulated and accumulated % steps:
        both = f"steps_per_generation={steps} and gradient_accumulation_steps={accumulated}"
        return f"{both}, neither a multiple of the other"
    return None


def window_of(trainer: Any) -> int:
    """Number of a generation's micro-batches that share one optimizer step."""
    args = trainer.args
    return int(min(args.gradient_accumulation_steps, args.steps_per_generation))


def regrouped(trainer: Any, batches: list[Batch], *, in_trees: bool) -> list[Batch]:
    """Redistribute the samples of each window over its micro-batches, by prompt, with `divided`.

    A micro-batch that is left without samples gets one sample without tokens.
    """
    found: list[Batch] = []
    count = window_of(trainer)
    for start in range(0, len(batches), count):
        window = Window(batches[start : start + count])
        size = len(batches[0]["prompt_ids"])
        batch = {name: _joined([x[name] for x in window.batches]) for name in batches[0]}
        _, _, live = foreseen(trainer, batch)
        is_live = [True] * size * count if live is None else live.tolist()
        columns = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        both = zip(batch["prompt_ids"].cpu(), batch["prompt_mask"].cpu(), strict=True)
        prompts = numbered([tuple(ids[mask != 0].tolist()) for ids, mask in both])
        lengths = batch["completion_mask"].sum(1).tolist()
        budget = trainer.tokens_per_forward or size * columns
        most = {"tokens": budget} if in_trees else {"rows": size}
        parts = divided(prompts, lengths, is_live, count, **most)
        for i, samples in enumerate(parts):
            own = samples_of(batch, samples or [0])
            if not samples:
                own, _ = without_dead(own, torch.zeros(1, dtype=torch.bool), None)
            found.append({**own, PART: Part(window, samples, is_last=i == count - 1)})
    return found


def unlogged(trainer: Any) -> AbstractContextManager[None]:
    """Inside the context, TRL's loss logs nothing and asks no other process for its metrics."""
    asks = ("gather", "gather_for_metrics", "reduce")
    changes = [(trainer.accelerator, name, lambda x, *_, **__: x) for name in asks]
    unread = defaultdict[str, Any](lambda: defaultdict(list))
    return all_replaced([*changes, (trainer, "_metrics", unread)])
