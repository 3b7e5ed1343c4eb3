"""verl's FSDP engines, distilling from a teacher's top-k log-probabilities (`loss_mode=forward_kl_topk`).

verl's own fused heads have no logits for that loss. But its engine reads the field ``fused_linear_aux`` of a model's
output, if there is one: the loss of each token, and both models' mass on the listed ids. So we let the engine pass the
teacher's ids and log-probabilities to the model's forward (`engine`), which is ours (`forward`) and returns that field.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from torch import Tensor

from grpo_kernels.verl.rows import flag

MODE = "forward_kl_topk"


class TeacherLogprobs:
    """Teacher's log-probabilities for a forward. No dataclass: FSDP rounds the tensors of a dataclass on the way in.

    Attributes:
        ids, logps: (1, N, K), for the packed tokens of this rank.
        log_prob_min_clamp: as in `topk_divergence`.
        alone: True if only the divergence is wanted, without log-probabilities and entropies.
    """

    def __init__(
        self, ids: Tensor, logps: Tensor, log_prob_min_clamp: float | None, *, alone: bool
    ) -> None:
        self.ids, self.logps, self.log_prob_min_clamp, self.alone = (
            ids,
            logps,
            log_prob_min_clamp,
            alone,
        )


def teacher_of(engine: Any, micro_batch: Any, loss_function: Any) -> TeacherLogprobs | None:
    """Return the teacher's part of the micro-batch, for the tokens of this rank; None if none is asked for.

    Raises:
        ValueError: another loss than `MODE`, or a batch that keeps its padding.
    """
    if not flag(micro_batch, "distillation_use_topk"):
        return None
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    loss = None if config is None else config.distillation_loss
    if loss is None or loss.loss_mode != MODE:
        got = None if loss is None else loss.loss_mode
        raise ValueError(
            f"distillation.distillation_loss.loss_mode: expected {MODE!r}, got {got!r}"
        )
    if not flag(micro_batch, "use_remove_padding", default=True):
        raise ValueError(
            "actor_rollout_ref.model.use_remove_padding: expected True for distillation with fused kernels, got False"
        )
    ids, logps = (
        micro_batch[name].values().unsqueeze(0) for name in ("teacher_ids", "teacher_logprobs")
    )
    if engine.use_ulysses_sp:
        ulysses = importlib.import_module("verl.utils.ulysses")
        ids, logps = (ulysses.slice_input_tensor(x, dim=1, padding=True) for x in (ids, logps))
    alone = bool(flag(micro_batch, "distillation_only")) and not flag(
        micro_batch, "calculate_entropy"
    )
    return TeacherLogprobs(ids, logps, loss.log_prob_min_clamp, alone=alone)


@functools.cache
def with_aux(output: Any) -> Any:
    """Return a subclass of `output`, a model's output class, with the field that the engine reads."""
    names = {
        "__annotations__": {"fused_linear_aux": Any},
        "fused_linear_aux": None,
        "__module__": output.__module__,
    }
    return dataclasses.dataclass(type(output.__name__, (output,), names))


@functools.cache
def _aux_class() -> Any:
    from transformers.utils import ModelOutput  # FSDP2 finds the tensors in it

    fields = ("distillation_losses", "student_mass", "teacher_mass")
    names = {
        "__annotations__": dict.fromkeys(fields, Any),
        **dict.fromkeys(fields),
        "__module__": __name__,
    }
    return dataclasses.dataclass(type("DistillationOutput", (ModelOutput,), names))


def aux_of(divergence: Tensor, student_mass: Tensor, teacher: TeacherLogprobs) -> Any:
    """Return the value of ``fused_linear_aux``: divergences and both models' mass, (1, N) each."""
    mass = teacher.logps.detach().float().exp().sum(dim=-1)
    return _aux_class()(
        distillation_losses=divergence, student_mass=student_mass, teacher_mass=mass
    )
