"""TRL's experimental IW-OPD trainer with its log-probabilities computed from hidden states.

The objective of IW-OPD reads the sampled tokens' log-probabilities alone, under student and teacher; TRL 1.16 makes the
logits (B, L, V) of both models for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trl.experimental.iw_opd import IWOPDTrainer

from grpo_kernels.transformers.completion import completion_logprobs
from grpo_kernels.trl.row_count import LogsRows, count_rows

__all__ = ["FusedIWOPDTrainer"]


class FusedIWOPDTrainer(LogsRows, IWOPDTrainer):
    """``trl.experimental.iw_opd.IWOPDTrainer`` with the same arguments, losses and metrics, and no logits.

    That holds for its own objective, ``distillation_objective="iw_opd"``, while it trains with a teacher in the same
    process. In evaluation, with a teacher server and with the objective ``"jsd"`` TRL's own loss runs.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute TRL's loss, from log-probabilities where it needs no more."""
        if return_outputs or self.use_teacher_server or self.distillation_objective != "iw_opd":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._raise_if_local_teacher_tokenizer_mismatch()
        start = self._compute_prompt_length(inputs)
        ids, labels, rollout = (
            inputs["input_ids"],
            inputs["labels"][:, start:],
            inputs.get("rollout_logprobs"),
        )
        args = ids, inputs["attention_mask"], labels != -100
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "entropy": False,
            "layout": "padded",
        }
        student = completion_logprobs(model, *args, **options).logps
        self.teacher_model.eval()
        with torch.no_grad():
            teacher = completion_logprobs(self.teacher_model, *args, **options).logps
        count_rows(self._shares, labels.numel(), labels != -100, (student,))
        return self._compute_iw_opd_loss(
            student_logits=_Sampled(student),
            completion_tokens=ids[:, start:],
            labels=labels,
            teacher_actual_logprobs=teacher,
            rollout_logprobs=None if rollout is None else rollout[:, start:],
            num_items_in_batch=num_items_in_batch,
        )


class _Sampled:
    """Stand-in for logits (B, T, V): TRL's loss divides them, takes the log-softmax, and gathers the sampled tokens."""

    def __init__(self, logps: Tensor) -> None:
        self._logps = logps  # (B, T), at the trainer's temperature

    def __truediv__(self, temperature: float) -> _Sampled:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not F.log_softmax:
            raise TypeError(
                f"IWOPDTrainer: expected a loss that takes the log-softmax of its logits, got {function}"
            )
        return args[0]

    def gather(self, dim: int, index: Tensor) -> Tensor:
        return self._logps[..., None]
