"""The KL term of TRL's GRPO over the whole vocabulary, in place of its estimate from sampled tokens.

Before the loss of a micro-batch its completions run through the reference (`old_scoring`), and the input of the
reference's head, (B, T, H'), is kept in place of log-probabilities (B, T). The loss's own call to the policy's head
projects both inputs, and returns each token's divergence beside its log-probability. TRL computes its loss as if beta
were 0; the term is added to it, with the same normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx

from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import read_tokens
from grpo_kernels.call.output import Scores
from grpo_kernels.divergence import linear_divergence
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import active_adapters, linear_of, whole_constant
from grpo_kernels.host import replaced
from grpo_kernels.objective.config import config_of_trainer
from grpo_kernels.objective.losses import loss_of
from grpo_kernels.objective.normaliser import token_weights
from grpo_kernels.transformers.head import inner_head
from grpo_kernels.trl.micro_batches import counted_tokens

KEY = "ref_hidden_states"  # an entry of TRL's batch; TRL shuffles and splits it like the other entries


class ReferenceHead:
    """The reference's head, and its inputs, which are kept in place of its log-probabilities."""

    def __init__(self, model: Any, shape: torch.Size) -> None:
        """`shape` is (B, T), that of the completions; `model` is read here, with the adapters active now."""
        head = inner_head(model.get_output_embeddings())
        self.linear = linear_of(head)
        if self.linear is not head and active_adapters(head):
            raise ValueError(
                "kl_estimator: expected 'k3' where the reference is an adapter of its own and has a part on lm_head, "
                "got 'full'"
            )
        self.constants = Head(None)
        self._shape, self._hidden = shape, torch.empty(0)

    def take(
        self,
        hidden: Tensor,
        head: Head,
        positions: Tensor | None,
        *,
        extras: Sequence[str],
        **_: Any,
    ) -> Scores:
        """Keep `hidden` (n, H'), at `positions` (n,) of the flattened (B, T), -1 outside, and what makes logits of its
        product with `head`.

        The results are 0, (n,) each: this is our own call, and nobody reads them.
        """
        self.constants = replace(head, weight=None, bias=None, lora=None)
        if positions is None:
            raise RuntimeError(
                "kl_estimator: expected TRL's reference to be scored at (B, T) positions, got others"
            )
        if self._hidden.numel() == 0:
            self._hidden = hidden.new_zeros(self._shape.numel(), hidden.shape[-1])
        inside = positions >= 0
        self._hidden[positions[inside]] = hidden.detach()[inside]
        return Scores(
            **dict.fromkeys(
                ("logps", "entropies", *extras), hidden.new_zeros(len(hidden), dtype=torch.float32)
            )
        )

    def give(self) -> Tensor:
        """Return the hidden states (B, T, H'), 0 at padding, and release them."""
        hidden, self._hidden = self._hidden, torch.empty(0)
        return hidden.view(*self._shape, hidden.shape[-1])


@dataclass
class Comparison:
    """Comparison with the reference in one call of the policy's head."""

    hidden: Tensor  # (B, T, H')
    head: ReferenceHead
    divergences: Tensor | None = None  # (B, T), 0 where no token counts; set by `compare`

    def compare(
        self,
        hidden: Tensor,
        head: Head,
        positions: Tensor | None,
        *,
        extras: Sequence[Any],
        **options: Any,
    ) -> Scores:
        """Return the log-probabilities of the rows `hidden` (n, H), and keep their divergences.

        Options are those of `linear_divergence`, with `ids` and `mask`.
        """
        assert not extras  # TRL's loss reads none
        if positions is None:
            raise RuntimeError(
                "kl_estimator: expected TRL's loss to score (B, T) positions, got others"
            )
        other = self.head
        linear = (
            other.linear
        )  # read now: under FSDP2 the weight is another tensor within a forward than outside
        states = self.hidden.reshape(-1, self.hidden.shape[-1]).to(hidden.device)
        with maybe_gather_lm_head_ctx(linear.weight, linear.bias):
            bias = None if linear.bias is None else whole_constant(linear.bias)
            reference = replace(other.constants, weight=whole_constant(linear.weight), bias=bias)
            found = linear_divergence(
                hidden, head, states[positions.clamp(min=0)], reference, **options
            )
        inside, shape = positions >= 0, self.hidden.shape[:-1]
        every = hidden.new_zeros(shape.numel(), dtype=found.divergence.dtype)
        self.divergences = every.index_put((positions[inside],), found.divergence[inside]).view(
            shape
        )
        return Scores.of(logps=found.logps, entropies=found.entropies)


def check_estimator(name: Any) -> None:
    """Raise ValueError unless `name` is a KL estimator that TRL's trainer can have."""
    if name not in ("k3", "full"):
        raise ValueError(
            f"kl_estimator: expected 'k3', which is TRL's own, or 'full', got {name!r}"
        )


def is_asked_for(trainer: Any) -> bool:
    """Return True if the KL term of `trainer` is over the whole vocabulary."""
    return bool(trainer.kl_estimator == "full" and trainer.args.beta != 0.0)


def check_beta(trainer: Any) -> None:
    """Raise ValueError if `trainer` asks for the exact KL term with beta = 0, which leaves no KL term."""
    if trainer.kl_estimator == "full" and trainer.args.beta == 0.0:
        raise ValueError(
            "kl_estimator: expected 'k3' with beta = 0, which leaves no KL term, got 'full'; give beta"
        )


def check_trainer(trainer: Any, owner: type, compatible: bool) -> None:
    """Raise ValueError unless `trainer`, whose loss `owner` defines, can have the exact KL term."""
    if not compatible:
        raise ValueError(
            "kl_estimator: expected 'k3', since this trl has no fused head that is known, got 'full'"
        )
    if owner is not GRPOTrainer:
        raise ValueError(
            f"kl_estimator: expected 'k3', since {owner.__name__} has a loss of its own, got 'full'"
        )
    if getattr(trainer.args, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model: expected False with kl_estimator = 'full', which keeps hidden states of one reference "
            "model for the head of the same, got True"
        )


def comparison_of(trainer: Any, inputs: dict[str, Any]) -> Comparison | None:
    """Return the comparison with the reference in the loss of `inputs`; None if the KL term is TRL's."""
    return Comparison(inputs[KEY], trainer._reference_head) if is_asked_for(trainer) else None


def without_estimate(trainer: Any) -> AbstractContextManager[None]:
    """Return a context in which TRL's loss has no KL term of its own."""
    return replaced(trainer, "beta", 0.0)


def add_term(
    trainer: Any, loss: Tensor, inputs: dict[str, Any], divergences: Tensor | None
) -> Tensor:
    """Return TRL's `loss` () plus beta times the loss type's mean of `divergences` (B, T); and log TRL's metrics."""
    if divergences is None:
        raise RuntimeError("kl_estimator: expected trl's loss to call its fused head, got none")
    config = config_of_trainer(trainer.args)
    mask, trains = counted_tokens(inputs), trainer.model.training
    items, per_item = None, 1.0
    if (
        loss_of(config).normaliser == "num_items"
    ):  # items: of the generated batch; items / per_item: of a micro-batch
        items = inputs["num_items_in_batch"].clamp(min=1.0)
        per_item = trainer.accelerator.num_processes * (
            trainer.args.steps_per_generation if trains else 1
        )
    blank = LossInputs(None, mask, divergences.new_zeros(len(mask))).with_blank_ids(mask)
    layout = read_tokens(blank, divergences.dtype).layout
    weights = per_item * token_weights(config, layout, items, divergences.dtype)
    term = config.beta * (weights * divergences.reshape(-1)[layout.positions]).sum()
    accumulated = trainer.current_gradient_accumulation_steps if trains else 1
    metrics, gather = trainer._metrics["train" if trains else "eval"], trainer.accelerator.gather
    if trainer._entropy_bonus_enabled:  # TRL's policy loss has the KL term in it
        value = term / accumulated if items is not None else term
        metrics["policy_loss"][-1] += gather(value.detach()).nanmean().item()
    totals = torch.stack([(divergences.detach() * mask).sum(), mask.sum().to(divergences.dtype)])
    total, count = trainer.accelerator.reduce(totals, reduction="sum")
    metrics["kl"].append((total / count.clamp(min=1.0)).item())
    return loss + term / accumulated
