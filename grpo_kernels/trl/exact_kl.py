"""The KL term of TRL's GRPO over the whole vocabulary, not estimated from sampled tokens.

Before the loss of a micro-batch its completions run through the reference (`scoring`), and the
input of the reference's head, (B, T, H'), is kept in place of log-probabilities (B, T). The loss's
own call to the policy's head projects both inputs, and returns each token's divergence beside its
log-probability. TRL computes its loss as if beta were 0; the term is added to it, with the same
normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx

from grpo_kernels.batch.tokens import LossInputs, read_tokens
from grpo_kernels.call.results import Scores
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import active_adapters, linear_of, whole_constant
from grpo_kernels.objective.config import config_of_trainer
from grpo_kernels.objective.losses import loss_of, token_weights
from grpo_kernels.scores import linear_divergence
from grpo_kernels.transformers.head import inner_head
from grpo_kernels.trl.fused_head import HEAD
from grpo_kernels.trl.micro_batches import counted_tokens, metrics_of


class Reference:
    """The reference of a micro-batch: its head, and that head's inputs.

    `shape` is (B, T), that of the completions. `model` is read here, with the adapters active now.
    """

    KEY = "reference_of_exact_kl"  # its place in the micro-batch

    def __init__(self, model: Any, shape: torch.Size) -> None:
        head = inner_head(model.get_output_embeddings())
        self._linear = linear_of(head)
        if self._linear is not head and active_adapters(head):
            raise ValueError(
                "kl_estimator: expected 'k3' where the reference is an adapter of its own and has "
                "a part on lm_head, got 'full'"
            )
        self._shape, self._hidden, self._constants = shape, torch.empty(0), Head(None)
        self.divergences: Tensor | None = None  # (B, T), 0 where no token counts; of `compare`

    def take(
        self, hidden: Tensor, head: Head, *, positions: Tensor, extras: Sequence[str], **_: Any
    ) -> Scores:
        """`HeadCalls.compute` of the reference: keeps `hidden` (n, H'); the results are 0."""
        self._constants = replace(head, weight=None, bias=None, lora=None)
        if self._hidden.numel() == 0:
            self._hidden = hidden.new_zeros(self._shape.numel(), hidden.shape[-1])
        inside = positions >= 0
        self._hidden[positions[inside]] = hidden.detach()[inside]
        zeros = hidden.new_zeros(len(hidden), dtype=torch.float32)
        return Scores(**dict.fromkeys(("logps", "entropies", *extras), zeros))

    def compare(
        self, hidden: Tensor, head: Head, *, positions: Tensor, extras: Sequence[str], **how: Any
    ) -> Scores:
        """`HeadCalls.compute` of the policy: sets `divergences`. TRL's loss reads no `extras`."""
        # read now: under FSDP2 the weight is another tensor within a forward than outside
        linear = self._linear
        states = self._hidden.to(hidden.device)[positions.clamp(min=0)]
        with maybe_gather_lm_head_ctx(linear.weight, linear.bias):
            bias = None if linear.bias is None else whole_constant(linear.bias)
            reference = replace(self._constants, weight=whole_constant(linear.weight), bias=bias)
            found = linear_divergence(hidden, head, states, reference, **how)
        inside = positions >= 0
        every = hidden.new_zeros(self._shape.numel(), dtype=found.divergence.dtype)
        every = every.index_put((positions[inside],), found.divergence[inside])
        self.divergences = every.view(self._shape)
        return Scores.of(logps=found.logps, entropies=found.entropies)


def check(trainer: Any) -> None:
    """Raise ValueError unless `trainer` can have its `kl_estimator`."""
    if trainer.kl_estimator == "k3":
        return
    expected, owner = "kl_estimator: expected 'k3'", trainer._loss_owner
    if trainer.args.beta == 0.0:
        raise ValueError(
            f"{expected} with beta = 0, which leaves no KL term, got 'full'; give beta"
        )
    if not HEAD.is_known():
        raise ValueError(f"{expected}, since this trl has no fused head that is known, got 'full'")
    if owner is not GRPOTrainer:
        raise ValueError(f"{expected}, since {owner.__name__} has a loss of its own, got 'full'")
    if getattr(trainer.args, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model: expected False with kl_estimator = 'full', which keeps hidden states "
            "of one reference model for the head of the same, got True"
        )


def add_term(
    trainer: Any, loss: Tensor, inputs: dict[str, Any], divergences: Tensor | None
) -> Tensor:
    """TRL's `loss` () plus beta times the loss type's mean of `divergences` (B, T); logs them."""
    if divergences is None:
        raise RuntimeError("kl_estimator: expected trl's loss to call its fused head, got none")
    config = config_of_trainer(trainer.args)
    mask, trains = counted_tokens(inputs), trainer.model.training
    items, per_item = None, 1.0
    # items: of the generated batch; items / per_item: of a micro-batch
    if loss_of(config).normaliser == "num_items":
        items = inputs["num_items_in_batch"].clamp(min=1.0)
        steps = trainer.args.steps_per_generation if trains else 1
        per_item = trainer.accelerator.num_processes * steps
    blank = LossInputs(None, mask, divergences.new_zeros(len(mask))).with_blank_ids(mask)
    layout = read_tokens(blank, divergences.dtype).layout
    weights = per_item * token_weights(config, layout, items, divergences.dtype)
    term = config.beta * (weights * divergences.reshape(-1)[layout.positions]).sum()
    accumulated = trainer.current_gradient_accumulation_steps if trains else 1
    metrics = metrics_of(trainer)
    if trainer._entropy_bonus_enabled:  # TRL's policy loss has the KL term in it
        value = term / accumulated if items is not None else term
        gathered = trainer.accelerator.gather(value.detach())
        metrics["policy_loss"][-1] += gathered.nanmean().item()
    totals = torch.stack([(divergences.detach() * mask).sum(), mask.sum().to(divergences.dtype)])
    total, count = trainer.accelerator.reduce(totals, reduction="sum")
    metrics["kl"].append((total / count.clamp(min=1.0)).item())
    return loss + term / accumulated
