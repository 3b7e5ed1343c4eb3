"""verl's losses: what is known of each mode, and the gradient of one, asked of verl's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Mode(NamedTuple):
    """Facts of a ``loss_mode`` of verl.

    Attributes:
        by_token: the gradient of a token depends on no log-probability or entropy but its own.
        by_advantage: the gradient is 0 where the advantage is 0, whichever sequences share a micro-batch.
        by_weight: the gradient is 0 where ``rollout_is_weights`` are 0.
    """

    by_token: bool = False
    by_advantage: bool = False
    by_weight: bool = False


MODES = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo"), Mode(True, True, True)),
    "gspo": Mode(by_advantage=True, by_weight=True),
    "dro": Mode(by_token=True, by_weight=True),  # its penalty of the log-ratio stays
}  # the others read the whole micro-batch


def mode_of(config: Any) -> Mode:
    """Return the facts of the mode that an actor's `config` names; none of them if the mode is not known."""
    name = config.policy_loss.get("loss_mode", "vanilla")
    if name != "bypass_mode":
        return MODES.get(name, Mode())
    correction = config.policy_loss.get("rollout_correction", None) or {}
    if correction.get("rollout_is_batch_normalize", False):  # a mean over the ranks' micro-batches
        return Mode()
    rejections = (correction.get("rollout_rs", None) or "").split(",")
    by_token = correction.get("rollout_is", None) != "sequence" and all(
        not rule.strip() or rule.strip().startswith("token") for rule in rejections
    )
    return Mode(by_token, by_advantage=True)  # it makes its own weights


def actor_config(loss_function: Any) -> Any:
    """Return the config of an actor if `loss_function` is verl's ``ppo_loss`` with one, else None."""
    return loss_function.keywords["config"] if _is(loss_function, "ppo_loss") else None


def reads_counted_rows(loss_function: Any) -> bool:
    """Return True for the losses of verl that read log-probabilities and entropies at counted tokens alone."""
    if _is(loss_function, "ppo_loss") or _is(loss_function, "sft_loss"):
        return True
    distillation = importlib.import_module("verl.trainer.distillation.losses")
    return getattr(loss_function, "func", None) is distillation.distillation_ppo_loss


def is_sft(loss_function: Any) -> bool:
    """Return True for verl's ``sft_loss``."""
    return _is(loss_function, "sft_loss")


def _is(loss_function: Any, name: str) -> bool:
    theirs = getattr(importlib.import_module("verl.workers.utils.losses"), name)
    return getattr(loss_function, "func", None) is theirs


def has_other_terms(config: Any, *, entropy: bool) -> bool:
    """Return True if a KL term, or one of the entropy (if it is computed), gives each counted token a gradient."""
    return bool(config.use_kl_loss or (entropy and config.entropy_coeff != 0))


class Slopes:
    """Derivatives of a loss of verl by log-probabilities and entropies, for losses that take them token by token.

    Args:
        loss: function of verl's ``model_output``, which returns the loss.
        offsets: (B + 1,) bounds of the sequences among the N packed tokens.
        others: (N,) log-probabilities that stand for those of the tokens that are not asked for.
        entropy: whether the loss has entropies.
    """

    def __init__(self, loss: Callable[[dict[str, Tensor]], Tensor], offsets: Tensor, others: Tensor, *, entropy: bool):
        self.loss, self.offsets, self.others, self.entropy = loss, offsets, others, entropy

    def __call__(self, rows: Tensor, logps: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return both derivatives (n,) at `rows` (n,) of the packed tokens; None: no entropies."""
        given = {"log_probs": self.others.to(logps.dtype).index_copy(0, rows, logps)}
        if self.entropy:
            given["entropy"] = torch.zeros_like(given["log_probs"])
            if entropies is not None:
                given["entropy"].index_copy_(0, rows, entropies.to(logps.dtype))
        slopes = slopes_of(self.loss, given, self.offsets)
        return slopes["log_probs"][rows], slopes["entropy"][rows] if self.entropy else None


def slopes_of(
    loss: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor], offsets: Tensor
) -> dict[str, Tensor]:
    """Return the derivative of `loss` by each of `given`, (N,) packed tensors that it takes as nested ones."""
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        value = loss({name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in leaves.items()})
        if not value.requires_grad:
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
