"""TRL's experimental GKD trainer with its divergence computed from the hidden states of student and teacher.

TRL 1.16 makes the logits (B, L, V) of both models, slices them, and hands them to `generalized_jsd_loss`. Here the
teacher's forward gives the input of its head, and the student's head, in its own forward, computes the divergence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from grpo_kernels.body.inputs import Batch
from grpo_kernels.divergence import linear_divergence
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import constants_of
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import PADDED, run_scored
from grpo_kernels.transformers.hidden_states import HeadInputs, head_inputs
from grpo_kernels.trl.row_count import LogsRows, count_rows

__all__ = ["FusedGKDTrainer"]


class FusedGKDTrainer(LogsRows, GKDTrainer):
    """``trl.experimental.gkd.GKDTrainer`` with the same arguments, losses and metrics, and no logits while it trains.

    Only the tokens that have a label are projected, 8NVH floating-point operations for N of them, where TRL projects
    all B x L positions. The divergence is in float32, where TRL's is in the dtype of the models. It also logs
    ``rows/projected`` and ``rows/gradient``. In evaluation the logits are part of what is returned, so TRL's own loss
    runs there.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute TRL's loss, without logits unless `return_outputs` asks for them."""
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        attention_mask = inputs["attention_mask"]
        batch = Batch.of(inputs["input_ids"], inputs["labels"] != -100)
        self.teacher_model.eval()
        with torch.no_grad(), head_inputs(self.teacher_model) as teacher:
            self.teacher_model(input_ids=batch.input_ids, attention_mask=attention_mask)

        def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
            return (_divergences(batch, hidden, head, teacher, self.beta),)

        (divergences,), *_ = run_scored(
            model, batch, score, {"attention_mask": attention_mask}, PADDED
        )
        counted = batch.needed().roll(1, dims=1)  # the labels that a position before them predicts
        count_rows(self._shares, counted.numel(), counted, (divergences,))
        items = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        total = divergences.sum()
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def _divergences(
    batch: Batch, hidden: Tensor, head: Head, teacher: HeadInputs, beta: float
) -> Tensor:
    """(B, L), each at the token that is predicted; `hidden` (B, L, H) is the student's."""
    states, _, mask = batch.aligned(hidden)
    teacher_states, *_ = batch.aligned(teacher.hidden.to(hidden.device))
    with constants_of(teacher.of_model.weight, "teacher_model") as (weight, bias):
        found = linear_divergence(
            states,
            heads.read(head, states),
            teacher_states,
            replace(teacher.of_model, weight=weight, bias=bias),
            mask=mask,
            divergence="jsd",
            beta=beta,
            run=heads.gathering(head),
        )
    return found.divergence
