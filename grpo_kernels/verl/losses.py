"""verl's losses: what is known of each mode, and the gradient of one, asked of verl's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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
    **dict.fromkeys(
        ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo"), Mode(True, True, True)
    ),
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
    """Derivatives of verl's ``ppo_loss`` by log-probabilities and entropies, for modes that take them token by token.

    The loss is a sum over sequences, with constants of the whole mini-batch. So it is asked about the sequences of the
    tokens at hand alone, as a batch whose prompts have one token, with old log-probabilities for all other tokens.

    Args:
        loss_function: verl's, with its config.
        data: the micro-batch; its fields of (B, T) numbers, nested or not, are read.
        places: (N,) int64, for each packed token b * T + t of the response's token that it predicts.
        width: T.
        dp_group: as verl passes it to the loss.
        entropy: whether the loss has entropies.
    """

    FIELDS = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob")
    CONSTANTS = ("dp_size", "batch_num_tokens", "global_batch_size")

    def __init__(
        self,
        loss_function: Any,
        data: Any,
        places: Tensor,
        width: int,
        dp_group: Any,
        *,
        entropy: bool,
    ) -> None:
        self.loss_function, self.places, self.width, self.dp_group = (
            loss_function,
            places,
            width,
            dp_group,
        )
        self.entropy = entropy
        self.of_entropy = (
            entropy and actor_config(loss_function).entropy_coeff != 0
        )  # that derivative may not be 0
        names = set(data.keys())
        self.fields = {name: padded(data[name], width) for name in self.FIELDS if name in names}
        self.constants = {name: data[name] for name in self.CONSTANTS}

    def __call__(
        self, rows: Tensor, logps: Tensor, entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return both derivatives (n,) at `rows` (n,) of the packed tokens; None: no entropies."""
        places = self.places[rows]
        sequences, here = torch.unique(places // self.width, return_inverse=True)
        at = here, places % self.width
        data = self._batch(sequences)
        leaves = {"log_probs": data["old_log_probs"].to(logps.dtype).index_put(at, logps)}
        if self.entropy:
            zeros = torch.zeros_like(leaves["log_probs"])
            leaves["entropy"] = (
                zeros if entropies is None else zeros.index_put(at, entropies.to(zeros.dtype))
            )

        def loss(leaves: dict[str, Tensor]) -> Tensor:
            packed = {
                name: F.pad(x, (0, 1)).flatten() for name, x in leaves.items()
            }  # the last token predicts nothing
            found: Tensor = self.loss_function(
                model_output=packed, data=data, dp_group=self.dp_group
            )[0]
            return found

        slopes = slopes_of(loss, leaves)
        return slopes["log_probs"][at], slopes["entropy"][at] if self.entropy else None

    def _batch(self, sequences: Tensor) -> Any:
        from tensordict import TensorDict  # verl's own dependency

        size, device = len(sequences), sequences.device
        ids = torch.zeros(size, 1 + self.width, dtype=torch.long, device=device)
        layout = {
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "attention_mask": torch.ones_like(ids),
        }
        fields = {name: x[sequences] for name, x in self.fields.items()}
        data = TensorDict({**layout, **fields}, batch_size=[size])
        importlib.import_module("verl.utils.tensordict_utils").assign_non_tensor(
            data, **self.constants
        )
        return data


def padded(x: Tensor, width: int) -> Tensor:
    """Return (B, `width`) of nested numbers, 0 where they end; (B, `width`) as it is."""
    return (
        torch.nested.to_padded_tensor(x, 0, output_size=(x.shape[0], width)) if x.is_nested else x
    )


def slopes_of(
    loss: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the derivative of `loss` by each of the tensors that it takes, at `values`."""
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
        value = loss(leaves)
        if not value.requires_grad:
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        found = torch.autograd.grad(
            value, [*leaves.values()], allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))
