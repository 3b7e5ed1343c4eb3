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

from grpo_kernels.batch.tokens import LossInputs, read_tokens
from grpo_kernels.call.results import Scores
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import active_adapters, constants_of, linear_of
from grpo_kernels.objective.losses import loss_of, token_weights
from grpo_kernels.scores import linear_divergence
from grpo_kernels.transformers.head import inner_head
from grpo_kernels.trl.micro_batches import config_of, counted_tokens, metrics_of

REFERENCE = "reference_of_exact_kl"  # a `Reference`, in the micro-batch


class Reference:
    """The reference of a micro-batch: its head, and that head's inputs.

    `model` is read here, with the adapters active now.
    """

    def __init__(self, model: Any) -> None:
        head = inner_head(model.get_output_embeddings())
        self._linear = linear_of(head)
        if self._linear is not head and active_adapters(head):
            raise ValueError(
                "kl_estimator: expected 'k3' where the reference is an adapter of its own and has "
                "a part on lm_head, got 'full'"
            )
        self._hidden, self._constants = torch.empty(0), Head(None)
        self._divergences: Tensor | None = None  # (B, T), of `compare`

    def take(
        self, hidden: Tensor, head: Head, ids: Tensor, *, extras: Sequence[str], **_: Any
    ) -> Scores:
        """`Foreseen.score` of the reference: keeps `hidden` (B, T, H'); the results are 0."""
        self._constants = replace(head, weight=None, bias=None, lora=None)
        self._hidden = hidden.detach().clone()  # not with the prompt's, of which it is a part
        zeros = hidden.new_zeros(ids.shape, dtype=torch.float32)
        return Scores(**dict.fromkeys(("logps", "entropies", *extras), zeros))

    def compare(
        self, hidden: Tensor, head: Head, ids: Tensor, *, extras: Sequence[str], **how: Any
    ) -> Scores:
        """`Foreseen.score` of the policy: makes the divergences. TRL's loss reads no `extras`."""
        states = self._hidden.to(hidden.device)
        # read now: under FSDP2 the weight is another tensor within a forward than outside
        with constants_of(self._linear, "reference") as (weight, bias):
            reference = replace(self._constants, weight=weight, bias=bias)
            found = linear_divergence(hidden, head, states, reference, ids=ids, **how)
        if self._divergences is None or torch.is_grad_enabled():
            self._divergences = found.divergence
        return Scores.of(logps=found.logps, entropies=found.entropies)

    def given(self) -> Tensor:
        """The divergences (B, T) of the last `compare`; they are not kept here any longer."""
        found, self._divergences = self._divergences, None
        if found is None:
            raise RuntimeError("kl_estimator: expected trl's loss to run its fused head, got none")
        return found


def check(trainer: Any) -> None:
    """Raise ValueError unless `trainer` can have its `kl_estimator`."""
    expected, owner = "kl_estimator: expected 'k3'", trainer.loss_owner
    if trainer.args.beta == 0.0:
        raise ValueError(
            f"{expected} with beta = 0, which leaves no KL term, got 'full'; give beta"
        )
    if owner is not GRPOTrainer:
        raise ValueError(f"{expected}, since {owner.__name__} has a loss of its own, got 'full'")
    if trainer.args.sync_ref_model:
        raise ValueError(
            "sync_ref_model: expected False with kl_estimator = 'full', which keeps hidden states "
            "of one reference model for the head of the same, got True"
        )


def add_term(trainer: Any, loss: Tensor, inputs: dict[str, Any], divergences: Tensor) -> Tensor:
    """TRL's `loss` () plus beta times the loss type's mean of `divergences` (B, T); logs them."""
    config = config_of(trainer)
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
