"""verl's FSDP engines: what they tell our forward about a micro-batch.

verl's engine has the whole micro-batch and the loss at hand when it calls the model, but hands on ids and positions
alone. So `prepare_model_inputs` gets one argument more for a model with our forward (`forward`): the rows that count,
with the gradient to expect there (`rows`), and the teacher of a distillation (`distillation`). `forward_step` notes the
loss for it, and runs micro-batches without gradient in its own way (`zero_advantage`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.host import KnownRows, during, function_of
from grpo_kernels.verl import zero_advantage
from grpo_kernels.verl.distillation import TeacherLogprobs, teacher_of
from grpo_kernels.verl.rows import flag, numbers_of, packed_rows

BACKEND = "grpo_kernels"
ARGUMENT = "grpo_kernels_task"  # argument of our forward
MARK = "_verl_fused_kernels_backend"  # verl's own mark of a model whose forward it has replaced

STEP = ("self", "micro_batch", "loss_function", "forward_only")
RUN = ("self", "data", "loss_function", "forward_only")
DIVIDE = (
    "data",
    "dp_group",
    "num_batches_divided_by",
    "same_micro_num_in_dp",
    "min_num_micro_batch",
    "use_dynamic_bsz_balance",
)

_loss_function: ContextVar[Any] = ContextVar("loss_function", default=None)
_live: ContextVar[Tensor | None] = ContextVar(
    "live", default=None
)  # (B,) bool of the batch in hand


class HeadTask:
    """Request of a micro-batch to the head. No dataclass: FSDP rounds the tensors of a dataclass on the way in.

    Attributes:
        rows: those of the call, as its labels lie; None: all count.
        teacher: of a distillation.
    """

    def __init__(
        self, rows: KnownRows | None = None, teacher: TeacherLogprobs | None = None
    ) -> None:
        self.rows, self.teacher = rows, teacher


def changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.workers.engine.fsdp.transformer_impl.

    Raises:
        LookupError: the engine or ``prepare_micro_batches`` is not as we know it.
    """
    engine = getattr(module, "FSDPEngineWithLMHead", None)
    if engine is None:
        raise LookupError(f"{module.__name__} has no FSDPEngineWithLMHead")
    prepare = function_of(engine, "prepare_model_inputs", ("self", "micro_batch"))
    step = function_of(engine, "forward_step", STEP)
    run = function_of(engine, "forward_backward_batch", RUN)
    divide = function_of(module, "prepare_micro_batches", DIVIDE)
    function_of(engine, "_get_packed_pad_size", ("self", "packed_length"))

    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = prepare(self, micro_batch)
        if _is_ours(self, micro_batch):
            model_inputs[ARGUMENT] = _task(self, micro_batch)
        return model_inputs, output_args

    @functools.wraps(step)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: Any) -> Any:
        def run_with(function: Any) -> Any:
            return step(self, micro_batch, function, forward_only)

        with during(_loss_function, loss_function):
            if flag(micro_batch, zero_advantage.DEAD):
                group = self.get_data_parallel_group()
                return zero_advantage.score(run_with, micro_batch, loss_function, group)
            return run_with(loss_function)

    @functools.wraps(run)
    def forward_backward_batch(
        self: Any, data: Any, loss_function: Any, forward_only: Any = False
    ) -> Any:
        live = None
        if _is_ours(self, data) and zero_advantage.is_asked_for(
            self.model_config.fused_kernel_options
        ):
            live = None if forward_only else zero_advantage.live_sequences(data, loss_function)
        with during(_live, live):
            return run(self, data, loss_function, forward_only)

    @functools.wraps(divide)
    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        live = _live.get()
        if live is None:
            return divide(data, dp_group, **options)

        def theirs(part: Any) -> Any:
            return divide(part, dp_group, **options)

        return zero_advantage.divide(theirs, data, live, dp_group, module.get_device_id())

    yield engine, "prepare_model_inputs", prepare_model_inputs
    yield engine, "forward_step", forward_step
    yield engine, "forward_backward_batch", forward_backward_batch
    yield module, "prepare_micro_batches", prepare_micro_batches


def _is_ours(engine: Any, data: Any) -> bool:
    """Return True if the model has our forward, and `data` asks for it."""
    return bool(flag(data, "use_fused_kernels")) and getattr(engine.module, MARK, None) == BACKEND


def _task(engine: Any, micro_batch: Any) -> HeadTask:
    loss_function = _loss_function.get()
    rows = packed_rows(micro_batch, loss_function, engine.get_data_parallel_group())
    here = None if rows is None else rows.at(_laid_out(engine, micro_batch, numbers_of(rows)) - 1)
    return HeadTask(here, teacher_of(engine, micro_batch, loss_function))


def _laid_out(engine: Any, micro_batch: Any, numbers: Tensor) -> Tensor:
    """Return `numbers` of the packed tokens (N,) as `prepare_model_inputs` lays out the labels; 0 where it pads."""
    if not flag(micro_batch, "use_remove_padding", default=True):
        offsets = micro_batch["input_ids"].offsets()
        nested = torch.nested.nested_tensor_from_jagged(numbers, offsets)
        size = len(offsets) - 1, int(offsets.diff().max())
        return torch.nested.to_padded_tensor(nested, 0, output_size=size)
    numbers = F.pad(numbers, (0, engine._get_packed_pad_size(len(numbers))))[None]
    if engine.use_ulysses_sp:
        ulysses = importlib.import_module("verl.utils.ulysses")
        numbers = ulysses.ulysses_pad_and_slice_inputs(
            numbers, None, engine.ulysses_sequence_parallel_size
        )[0]
    return numbers
