"""verl's Megatron engine: replace its fused ``linear_cross_entropy``.

verl has three fused forwards: with Megatron's output processor, of a whole GPT model, and
overlapped. Each looks up the function in its module. It calls the function with the hidden states,
which are equal on all tensor parallel ranks, and with each rank's own rows of the head. No forward
passes on the configured `impl_backend`. So the engine marks the head's weight, and this module's
function runs for marked weights.

The engine's `forward_step` records the micro-batch. Context parallel ranks divide labels with
``preprocess_thd_engine``; the same function divides the numbers of the rows that count. The
overlapped schedule does not call it, so there all rows count.

The gradient of the hidden states is the full sum over the ranks' rows of the head, where verl's
kernel returns each rank's part. With sequence parallelism, the gather in front of the head sums
over ranks in its backward, so each rank returns an equal share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.head import Head
from grpo_kernels.patching import during, found_in, function_of
from grpo_kernels.verl.engine import BACKEND, OPTIONS, Changes, options_of
from grpo_kernels.verl.rows import HeadTask, Reorder, flag, head_task, score_rows

SCORE = "_grpo_kernels_score"  # attribute of a head's weight that holds the function to call

# Within a step: `head_task` of the micro-batch, still without the order of the rows; and, once the
# labels are divided, the result of that function.
_task_in: ContextVar[Callable[[Reorder], HeadTask] | None] = ContextVar("task_in", default=None)
_task: ContextVar[HeadTask] = ContextVar("task")


def function_changes(module: ModuleType) -> Changes:
    """Yield the replacement in `module`, a module of verl.models.mcore with a fused forward."""
    theirs = found_in(module, "linear_cross_entropy")
    parameters = "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"
    # the autograd Function whose `apply` this is
    function_of(getattr(theirs, "__self__", theirs), "forward", ("ctx", *parameters))

    def linear_cross_entropy(hidden: Tensor, weight: Tensor, *more: Any) -> Any:
        return getattr(weight, SCORE, theirs)(hidden, weight, *more)

    yield module, "linear_cross_entropy", linear_cross_entropy


def forward_changes(module: ModuleType) -> Changes:
    """Yield the replacements in verl.models.mcore.model_forward_fused."""
    yield from function_changes(module)
    parameters = (
        *("input_ids", "pre_process", "need_roll", "use_fp8_padding"),
        *("local_cp_size", "min_local_rows", "pad_to_length_bucket", "cp_layout"),
    )
    divide = function_of(module, "preprocess_thd_engine", parameters)

    @functools.wraps(divide)
    def preprocess_thd_engine(
        input_ids: Any, *args: Any, need_roll: bool = False, **options: Any
    ) -> Any:
        task_in = _task_in.get()
        if need_roll and task_in is not None:  # then `input_ids` are the labels

            def reorder(numbers: Tensor) -> Tensor:
                nested = torch.nested.nested_tensor_from_jagged(numbers, input_ids.offsets())
                divided: Tensor = divide(nested, *args, **options)[0]
                return divided.reshape(-1)

            _task.set(task_in(reorder))
        return divide(input_ids, *args, need_roll=need_roll, **options)

    yield module, "preprocess_thd_engine", preprocess_thd_engine


def engine_changes(module: ModuleType) -> Changes:
    """Yield the replacements for verl.workers.engine.megatron.transformer_impl."""
    engine = found_in(module, "MegatronEngine")
    with_head = found_in(module, "MegatronEngineWithLMHead")
    enable = function_of(engine, "_maybe_enable_fused_kernels", ("self",))
    of_step = "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"
    step = function_of(with_head, "forward_step", ("self", *of_step))

    @functools.wraps(enable)
    def _maybe_enable_fused_kernels(self: Any) -> None:
        enable(self)
        if not _is_ours(self):
            return
        options = self.model_config.fused_kernel_options
        options_of(options)
        for name, only in (("zero_advantage", "train"), ("layout", "padded")):
            if options.get(name, only) != only:
                raise ValueError(
                    f"{OPTIONS}.{name}: expected {only!r} with Megatron's engine, got "
                    f"{options[name]!r}"
                )
        from verl.models.mcore import model_forward_fused  # the import patches it

        vocab_size = self.model_config.hf_config.get_text_config().vocab_size
        for model in self.module:
            model = model_forward_fused._get_patching_model(model)
            if model is not None:
                _mark(model, vocab_size)

    @functools.wraps(step)
    def forward_step(
        self: Any,
        batch_iter: Any,
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        batch = next(batch_iter).to(module.get_device_id())
        task_in = None
        if _is_ours(self) and flag(batch, "use_fused_kernels", default=True):
            loss_function = postprocess_micro_batch_func.keywords["loss_function"]
            group = self.get_data_parallel_group()
            task_in = functools.partial(head_task, batch, loss_function, group)
        with during(_task_in, task_in), during(_task, HeadTask()):
            return step(
                self, iter([batch]), model, logits_processor_func, postprocess_micro_batch_func
            )

    yield engine, "_maybe_enable_fused_kernels", _maybe_enable_fused_kernels
    yield with_head, "forward_step", forward_step


def _is_ours(engine: Any) -> bool:
    options = engine.model_config.fused_kernel_options or {}
    return bool(engine.engine_config.use_fused_kernels and options.get("impl_backend") == BACKEND)


def _mark(model: Any, vocab_size: int) -> None:
    """Mark the head of Megatron's GPTModel, so that fused calls run `_score`."""
    divided = bool(model.config.sequence_parallel)
    ours = functools.partial(_score, sequence_parallel=divided, vocab_size=vocab_size)
    layers = [getattr(model, "output_layer", None)]
    if model.share_embeddings_and_output_weights:
        layers.append(getattr(getattr(model, "embedding", None), "word_embeddings", None))
    for layer in layers:
        weight = getattr(layer, "weight", None)
        if weight is not None:  # some pipeline stages have none
            setattr(weight, SCORE, ours)


def _score(
    hidden: Tensor,  # (N, H) or (S, B, H)
    weight: Tensor,  # (V / ranks, H)
    labels: Tensor,  # (N,) or (B, S)
    temperature: float = 1.0,
    reduction: str = "none",
    process_group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool,  # True: a gather over tensor parallel ranks precedes the head
    vocab_size: int,  # number of rows of the whole head without Megatron's padding
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (N,), and entropies (N,) if they are read."""
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', got {reduction!r}")
    if hidden.dim() == 3 and hidden.size(1) != 1 and hidden.shape[:2] != labels.shape:
        # (S, B, H) and (B, S) flatten in different orders
        raise ValueError(
            f"hidden: expected (S, 1, H), one packed sequence, got {tuple(hidden.shape)}"
        )
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    if ranks == 1:
        process_group = None
    elif sequence_parallel and hidden.requires_grad:
        hidden = hidden.view_as(hidden)  # the hook must not stay on the caller's tensor
        hidden.register_hook(lambda d_hidden: d_hidden / ranks)
    tokens = vocab_size if vocab_size < ranks * weight.size(0) else None
    return score_rows(
        hidden.reshape(-1, hidden.size(-1)),
        Head(weight, process_group=process_group, vocab_size=tokens),
        labels.reshape(-1),
        _task.get(HeadTask()),
        temperature,
    )
