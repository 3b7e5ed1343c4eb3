"""verl's FSDP engines: sequences without gradient, in micro-batches of their own that run without a graph.

Where all rewards of a group are equal, its advantages are 0, and so is the gradient of its sequences. The option
``zero_advantage=score`` puts them into micro-batches of their own, which are scored under ``no_grad``, for the metrics.
The loss itself confirms each of them, by its derivatives at the log-probabilities found: if one is not 0, the
micro-batch runs again with a graph. All ranks run equally many of both kinds, since FSDP's collectives go in step.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.verl.losses import actor_config, has_other_terms, mode_of, padded, slopes_of
from grpo_kernels.verl.rows import Places, flag

DEAD = "grpo_kernels_dead"  # flag of a micro-batch: it has no gradient
ALLOWED = ("train", "score")
WHERE = "actor_rollout_ref.model.fused_kernel_options.zero_advantage"

Step = Callable[[Any], tuple[Any, dict[str, Any]]]  # of a loss function
Divide = Callable[[Any], tuple[Any, Any]]  # of a batch: micro-batches, and their places in it


def is_asked_for(options: Any) -> bool:
    """Read `options`, verl's ``fused_kernel_options``; True: ``zero_advantage=score``.

    Raises:
        ValueError: an option or a value that is not known.
    """
    unknown = set(options) - {"impl_backend", "zero_advantage"}
    if unknown:
        raise ValueError(
            f"actor_rollout_ref.model.fused_kernel_options: expected impl_backend and zero_advantage, got "
            f"{', '.join(sorted(map(str, unknown)))}"
        )
    value = options.get("zero_advantage", "train")
    if value not in ALLOWED:
        raise ValueError(f"{WHERE}: expected one of {', '.join(map(repr, ALLOWED))}, got {value!r}")
    return value == "score"


def live_sequences(data: Any, loss_function: Any) -> Tensor:
    """Return (B,) bool: sequences of `data` that may have a gradient.

    Raises:
        ValueError: the loss gives every sequence a gradient, or one that depends on the micro-batches.
    """
    reason = _refusal(data, loss_function)
    if reason is not None:
        raise ValueError(f"{WHERE}: expected 'train' {reason}, got 'score'")

    names = ["response_mask", "advantages"]
    if "rollout_is_weights" in data.keys() and mode_of(actor_config(loss_function)).by_weight:  # noqa: SIM118
        names.append("rollout_is_weights")
    width = Places(data).width
    return torch.stack([padded(data[name], width) != 0 for name in names]).all(dim=0).any(dim=1)


def _refusal(data: Any, loss_function: Any) -> str | None:
    config = actor_config(loss_function)
    if config is None:
        return "with another loss than ppo_loss"
    if has_other_terms(config, entropy=bool(flag(data, "calculate_entropy"))):
        return "with a KL or entropy term, which gives all sequences a gradient"
    if not mode_of(config).by_advantage:
        return f"with loss_mode={config.policy_loss.get('loss_mode', 'vanilla')}"
    if config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        return "with seq-mean-token-sum-norm without loss_scale_factor, which divides by a micro-batch's own width"
    if flag(data, "return_model_output") or flag(data, "force_group_size", 1) != 1:
        return "with return_model_output or force_group_size"
    return None


def divide(
    theirs: Divide, data: Any, live: Tensor, group: Any, device: Any
) -> tuple[list[Any], None]:
    """Return micro-batches that `theirs` makes of `data`, those without gradient first, and flagged.

    verl synchronises gradients in the last one, so one with a graph is left to the end.
    """
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    order = torch.argsort(live.long(), stable=True)
    n_live = int(live.sum())
    n_dead = len(live) - n_live

    def part(rows: Tensor) -> list[Any]:
        return list(theirs(tensordict_utils.index_select_tensor_dict(data, rows))[0])

    if flag(data, "use_dynamic_bsz", default=True):
        if min(_least(group, device, n_dead, n_live)) == 0:  # some rank has no such micro-batch
            return part(order), None
        dead, others = part(order[:n_dead]), part(order[n_dead:])
    else:
        micro_batches = part(order)
        size = data["micro_batch_size_per_gpu"]
        (without,) = _least(group, device, min(n_dead // size, len(micro_batches) - 1))
        dead, others = micro_batches[:without], micro_batches[without:]
    for micro_batch in dead:
        tensordict_utils.assign_non_tensor(micro_batch, **{DEAD: True})
    return dead + others, None


def _least(group: Any, device: Any, *counts: int) -> list[int]:
    found = torch.tensor(counts, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return [int(x) for x in found.tolist()]


def score(step: Step, data: Any, loss_function: Any, group: Any) -> tuple[Any, dict[str, Any]]:
    """Run `step` on `data`, flagged as without gradient, under ``no_grad``; again with a graph if that was wrong."""
    steepest: list[Tensor] = []

    def confirmed(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
        results: list[tuple[Tensor, Any]] = []

        def loss(leaves: dict[str, Tensor]) -> Tensor:
            results.append(loss_function(model_output=leaves, data=data, dp_group=dp_group))
            return results[0][0]

        slopes = slopes_of(
            loss, {name: x.values() for name, x in model_output.items()}
        )  # packed tensors do, too
        steepest.append(torch.stack([x.abs().amax() for x in slopes.values()]).amax())
        return results[0][0].detach(), results[0][1]

    with torch.no_grad():
        loss, output = step(confirmed)
    has_gradient = (steepest[0] != 0).float()  # NaN too
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    if has_gradient.item():
        warnings.warn(
            f"{WHERE}: expected no gradient where all advantages are 0, got one: those sequences run twice, since the "
            "loss has a term that is not known here; set it to 'train'",
            RuntimeWarning,
            stacklevel=2,
        )
        return step(loss_function)
    return loss + torch.zeros(
        (), device=loss.device, requires_grad=True
    ), output  # verl calls its backward
