"""verl's FSDP engines, distilling from a teacher's top-k log-probabilities (`loss_mode=forward_kl_topk`).

verl's own fused heads have no logits for that loss. But its engine reads the field ``fused_linear_aux`` of a model's
output, if there is one: the loss of each token, and both models' mass on the listed ids. So we let the engine pass the
teacher's ids and log-probabilities to the model's forward, which is ours (`forward`) and returns that field.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from grpo_kernels.integrations.patching import function_of

BACKEND = "grpo_kernels"
ARGUMENT = "grpo_kernels_teacher"  # argument of our forward
MODE = "forward_kl_topk"


class TeacherLogprobs:
    """Teacher's log-probabilities for a forward. No dataclass: FSDP rounds the tensors of a dataclass on the way in.

    Attributes:
        ids, logps: (1, N, K), for the packed tokens of this rank.
        log_prob_min_clamp: as in `topk_divergence_with`.
        alone: True if only the divergence is wanted, without log-probabilities and entropies.
    """

    def __init__(self, ids: Tensor, logps: Tensor, log_prob_min_clamp: float | None, *, alone: bool) -> None:
        self.ids, self.logps, self.log_prob_min_clamp, self.alone = ids, logps, log_prob_min_clamp, alone


def engine_changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.workers.engine.fsdp.transformer_impl.

    Raises:
        LookupError: the engine has no ``prepare_model_inputs`` and ``forward_step`` as we know them.
    """
    engine = getattr(module, "FSDPEngineWithLMHead", None)
    if engine is None:
        raise LookupError(f"{module.__name__} has no FSDPEngineWithLMHead")
    prepare = function_of(engine, "prepare_model_inputs", ("self", "micro_batch"))
    step = function_of(engine, "forward_step", ("self", "micro_batch", "loss_function", "forward_only"))

    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = prepare(self, micro_batch)
        if _asks(self, micro_batch):
            model_inputs[ARGUMENT] = _teacher(self, micro_batch)
        return model_inputs, output_args

    @functools.wraps(step)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: Any) -> Any:
        config = getattr(loss_function, "keywords", {}).get("distillation_config")
        self._grpo_kernels_distillation = None if config is None else config.distillation_loss
        return step(self, micro_batch, loss_function, forward_only)

    yield engine, "prepare_model_inputs", prepare_model_inputs
    yield engine, "forward_step", forward_step


def _flag(micro_batch: Any, name: str, default: bool = False) -> bool:
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    return bool(tensordict_utils.get_non_tensor_data(data=micro_batch, key=name, default=default))


def _asks(engine: Any, micro_batch: Any) -> bool:
    options = engine.model_config.fused_kernel_options or {}
    ours = options.get("impl_backend") == BACKEND and _flag(micro_batch, "use_fused_kernels")
    return ours and _flag(micro_batch, "distillation_use_topk")


def _teacher(engine: Any, micro_batch: Any) -> TeacherLogprobs:
    """Return the teacher's part of the micro-batch, for the tokens of this rank.

    Raises:
        ValueError: another loss than `MODE`, or a batch that keeps its padding.
    """
    loss = getattr(engine, "_grpo_kernels_distillation", None)
    if loss is None or loss.loss_mode != MODE:
        got = None if loss is None else loss.loss_mode
        raise ValueError(f"distillation.distillation_loss.loss_mode: expected {MODE!r}, got {got!r}")
    if not _flag(micro_batch, "use_remove_padding", default=True):
        raise ValueError(
            "actor_rollout_ref.model.use_remove_padding: expected True for distillation with fused kernels, got False"
        )
    ids, logps = (micro_batch[name].values().unsqueeze(0) for name in ("teacher_ids", "teacher_logprobs"))
    if engine.use_ulysses_sp:
        ulysses = importlib.import_module("verl.utils.ulysses")
        ids, logps = (ulysses.slice_input_tensor(x, dim=1, padding=True) for x in (ids, logps))
    alone = _flag(micro_batch, "distillation_only") and not _flag(micro_batch, "calculate_entropy")
    return TeacherLogprobs(ids, logps, loss.log_prob_min_clamp, alone=alone)


@functools.cache
def with_aux(output: Any) -> Any:
    """Return a subclass of `output`, a model's output class, with the field that the engine reads."""
    names = {"__annotations__": {"fused_linear_aux": Any}, "fused_linear_aux": None, "__module__": output.__module__}
    return dataclasses.dataclass(type(output.__name__, (output,), names))


@functools.cache
def _aux_class() -> Any:
    from transformers.utils import ModelOutput  # FSDP2 finds the tensors in it

    fields = ("distillation_losses", "student_mass", "teacher_mass")
    names = {"__annotations__": dict.fromkeys(fields, Any), **dict.fromkeys(fields), "__module__": __name__}
    return dataclasses.dataclass(type("DistillationOutput", (ModelOutput,), names))


def aux_of(divergence: Tensor, student_mass: Tensor, teacher: TeacherLogprobs) -> Any:
    """Return the value of ``fused_linear_aux``: divergences and both models' mass, (1, N) each."""
    mass = teacher.logps.detach().float().exp().sum(dim=-1)
    return _aux_class()(distillation_losses=divergence, student_mass=student_mass, teacher_mass=mass)
