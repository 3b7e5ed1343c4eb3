"""Rows of the head that count in a micro-batch of verl, and the gradient to expect there.

verl's engines hand a model packed ids: prompts, responses, padding. Only the row in front of a
response's token predicts something that the loss reads, and only where the mask counts. A
micro-batch has all that tells them apart; `packed_rows` reads it in verl's packed order. What a
rank then gives its head is a part of that order, padded and divided; an engine sends numbers
through its own layout (`numbers_of`), and `KnownRows.at` reads them. The gradient is asked of
verl's own loss (`Slopes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.objective.expected import Expectation
from grpo_kernels.patching import KnownRows


class Mode(NamedTuple):
    """Facts of a ``loss_mode`` of verl; `MODES` has those that are known."""

    # a token's gradient depends on no log-probability or entropy but its own
    by_token: bool = False
    by_advantage: bool = False  # it is 0 where the advantage is 0, whatever shares a micro-batch
    by_weight: bool = False  # it is 0 where ``rollout_is_weights`` are 0


MODES = {
    **dict.fromkeys(
        ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo"), Mode(True, True, True)
    ),
    "gspo": Mode(by_advantage=True, by_weight=True),
    "dro": Mode(by_token=True, by_weight=True),  # its penalty of the log-ratio stays
}  # the others read the whole micro-batch


def mode_of(config: Any) -> Mode:
    """The facts of the mode that an actor's `config` names."""
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
    """The config of an actor if `loss_function` is verl's ``ppo_loss`` with one, else None."""
    return loss_function.keywords["config"] if _is(loss_function, "ppo_loss") else None


def _is(loss_function: Any, name: str) -> bool:
    theirs = getattr(importlib.import_module("verl.workers.utils.losses"), name)
    return getattr(loss_function, "func", None) is theirs


def has_other_terms(config: Any, *, entropy: bool) -> bool:
    """True if a KL or (computed) entropy term gives each counted token a gradient."""
    return bool(config.use_kl_loss or (entropy and config.entropy_coeff != 0))


def flag(data: Any, name: str, default: Any = False) -> Any:
    """A value of `data`, a TensorDict of verl, that is no tensor."""
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    return tensordict_utils.get_non_tensor_data(data=data, key=name, default=default)


def packed_rows(data: Any, loss_function: Any, dp_group: Any) -> KnownRows | None:
    """The rows of the micro-batch `data` that `loss_function` reads; or, if that is None, verl.

    Returns:
        (N,) for N tokens in verl's packed order. None if all rows may be read: by another loss, or
        since the log-probabilities go back to the caller.
    """
    if flag(data, "return_model_output"):
        return None
    is_sft = _is(loss_function, "sft_loss")
    if loss_function is not None and not is_sft and not _is(loss_function, "ppo_loss"):
        distillation = importlib.import_module("verl.trainer.distillation.losses")
        if getattr(loss_function, "func", None) is not distillation.distillation_ppo_loss:
            return None
    entropy = bool(flag(data, "calculate_entropy"))
    if is_sft:
        weights = data["loss_mask"].values().roll(-1, 0).float()  # as the loss rolls it
        expected = Expectation(
            lambda index, *_: weights[index], graded=weights != 0, has_entropy_gradient=False
        )
        return KnownRows(weights != 0, expected=expected, entropy=entropy)
    names = set(data.keys())
    if not {"responses", "response_mask"} <= names:
        return None
    places = Places(data)
    # The losses compare the log-probabilities of all tokens with the old ones, and mask the result.
    others = places.packed(data["old_log_probs"]) if "old_log_probs" in names else None
    counted = places.packed(data["response_mask"]) != 0
    config = actor_config(loss_function)
    mode = Mode() if config is None else mode_of(config)
    if others is None or not mode.by_token:
        return KnownRows(counted, others, entropy=entropy)
    graded = counted
    if mode.by_advantage and not has_other_terms(config, entropy=entropy):
        graded = counted & (places.packed(data["advantages"]) != 0)
        if mode.by_weight and "rollout_is_weights" in names:
            graded &= places.packed(data["rollout_is_weights"]) != 0
    slopes = Slopes(loss_function, data, places, dp_group, entropy=entropy)
    expected = Expectation(slopes, graded=graded, has_entropy_gradient=slopes.of_entropy)
    return KnownRows(counted, others, expected, entropy=entropy)


def numbers_of(rows: KnownRows) -> Tensor:
    """(N,) int64, 1 for the first row and so on: 0 is left for padding."""
    return torch.arange(1, len(rows.counted) + 1, device=rows.counted.device)


class Places:
    """Rows of the packed tokens that predict the responses' tokens, (B, `width`) with padding."""

    def __init__(self, data: Any) -> None:
        ends = data["input_ids"].offsets()[1:]
        prompts, responses = data["prompts"], data["responses"]
        if responses.is_nested:
            lengths = responses.offsets().diff()
            self.width = int(lengths.max())
        else:
            lengths = data["attention_mask"][:, prompts.shape[1] :].sum(dim=1)
            self.width = responses.shape[1]
        self.lengths = lengths  # (B,), tokens of the responses
        t = torch.arange(self.width, device=ends.device)
        self._inside = t < lengths[:, None]
        starts = ends - lengths - 1  # the last token of a prompt predicts the first of the response
        self._rows = (starts[:, None] + t)[self._inside]
        self._tokens = len(data["input_ids"].values())

    def packed(self, x: Tensor) -> Tensor:
        """`x`, (B, `width`) or nested, of each packed row (N,); 0 where it predicts no response."""
        values = x.values() if x.is_nested else x[self._inside]
        return values.new_zeros(self._tokens).index_copy(0, self._rows, values)

    def of_rows(self) -> Tensor:
        """b * `width` + t of the response's token that each packed row (N,) predicts; else 0."""
        places = torch.arange(self._inside.numel(), device=self._rows.device)
        return self.packed(places.view(self._inside.shape))


class Slopes:
    """Derivatives of verl's ``ppo_loss``, for modes that take log-probabilities token by token.

    The loss is a sum over sequences, with constants of the whole mini-batch. So it is asked about
    the sequences of the tokens at hand alone, as a batch whose prompts have one token, with old
    log-probabilities for all other tokens.
    """

    FIELDS = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights", "ref_log_prob")
    CONSTANTS = ("dp_size", "batch_num_tokens", "global_batch_size")

    def __init__(
        self, loss_function: Any, data: Any, places: Places, dp_group: Any, *, entropy: bool
    ) -> None:
        """`entropy`: whether the loss has entropies."""
        self.loss_function, self.dp_group, self.entropy = loss_function, dp_group, entropy
        self.places, self.width = places.of_rows(), places.width
        # True if the derivative by the entropy may not be 0
        self.of_entropy = entropy and actor_config(loss_function).entropy_coeff != 0
        names = set(data.keys())
        self.fields = {x: padded(data[x], self.width) for x in self.FIELDS if x in names}
        self.constants = {name: data[name] for name in self.CONSTANTS}

    def __call__(
        self, rows: Tensor, logps: Tensor, entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Both derivatives (n,) at `rows` (n,) of the packed tokens; None: no entropies."""
        places = self.places[rows]
        sequences, here = torch.unique(places // self.width, return_inverse=True)
        at = here, places % self.width
        data = self._batch(sequences)
        leaves = {"log_probs": data["old_log_probs"].to(logps.dtype).index_put(at, logps)}
        if self.entropy:
            zeros = torch.zeros_like(leaves["log_probs"])
            given = None if entropies is None else entropies.to(zeros.dtype)
            leaves["entropy"] = zeros if given is None else zeros.index_put(at, given)

        def loss(leaves: dict[str, Tensor]) -> Tensor:
            # the last token predicts nothing
            packed = {name: F.pad(x, (0, 1)).flatten() for name, x in leaves.items()}
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
        layout = {"prompts": ids[:, :1], "responses": ids[:, 1:]}
        layout["attention_mask"] = torch.ones_like(ids)
        fields = {name: x[sequences] for name, x in self.fields.items()}
        data = TensorDict({**layout, **fields}, batch_size=[size])
        tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
        tensordict_utils.assign_non_tensor(data, **self.constants)
        return data


def padded(x: Tensor, width: int) -> Tensor:
    """(B, `width`) of nested numbers, 0 where they end; (B, `width`) as it is."""
    if not x.is_nested:
        return x
    return torch.nested.to_padded_tensor(x, 0, output_size=(x.shape[0], width))


def slopes_of(
    loss: Callable[[dict[str, Tensor]], Tensor], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The derivative of `loss` by each of the tensors that it takes, at `values`."""
    with torch.enable_grad():
        leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
        value = loss(leaves)
        if not value.requires_grad:
            return {name: torch.zeros_like(x) for name, x in leaves.items()}
        found = torch.autograd.grad(
            value, [*leaves.values()], allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))
