"""verl's FSDP engines: the forward that models get with `impl_backend=grpo_kernels`.

verl replaces the forward of a model's class by one that returns log-probabilities and entropies
instead of logits. The forward here runs the same body and reads the same labels, in the order
`shift_labels`, rolled `labels`, rolled `input_ids`. The head differs. verl reads
``lm_head.weight``. Under FSDP2, that is a shard if the head is a separate unit (as verl wraps it),
or its ``full_tensor()``, whose gradient is never summed over ranks. This forward passes the module
to `linear_logps`, so FSDP2 gathers the weight and reduces its gradient. It also applies the bias,
soft-cap and scale of the logits, which verl's fused heads leave out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import make_dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import warn_once
from grpo_kernels.head_module import check_module
from grpo_kernels.patching import Patches, found_in, function_of
from grpo_kernels.scores import topk_divergence
from grpo_kernels.verl.engine import BACKEND, MARK, OPTIONS, Changes
from grpo_kernels.verl.rows import HeadTask, score_rows

# Model type -> verl's module below verl.models.transformers, and its function that runs everything
# but the head ("": ``model.model``), as in verl's patch_forward_with_backends
FAMILIES = {
    "qwen2_vl": ("qwen2_vl", "qwen2_vl_forward"),
    "qwen2_5_vl": ("qwen2_vl", "qwen2_vl_forward"),
    "qwen3_vl": ("qwen3_vl", ""),
    "qwen3_vl_moe": ("qwen3_vl", ""),
    "qwen3_5": ("qwen3_5", ""),
    "qwen3_5_moe": ("qwen3_5", ""),
    "glm4v": ("glm4v", "glm4v_forward"),
}
DENSE = ("dense_common", "forward_base_model")  # for all other model types

# Everything that is replaced in verl: functions of its modules, and forwards of model classes
patches = Patches("verl")
_own: dict[type, Callable[..., Any]] = {}  # model class -> its original forward


def changes(module: ModuleType) -> Changes:
    """Yield the replacements for verl.models.transformers.monkey_patch."""
    parameters = "model", "use_fused_kernels", "fused_kernels_backend"
    theirs = function_of(module, "patch_forward_with_backends", parameters)

    @functools.wraps(theirs)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        cls = type(model)
        if not cls.forward.__module__.startswith("verl."):  # not one from `_forward`, either
            _own[cls] = cls.forward
        if use_fused_kernels and fused_kernels_backend == BACKEND:
            _use(model)
            return
        if fused_kernels_backend == BACKEND:
            warn_once(
                f"{OPTIONS}.impl_backend={BACKEND} has no effect without use_fused_kernels=True"
            )
        theirs(model, use_fused_kernels, fused_kernels_backend)

    yield module, "patch_forward_with_backends", patch_forward_with_backends


def _use(model: Any) -> None:
    """Replace the forward of `model`'s class by the one from `_forward`."""
    from grpo_kernels.transformers.head import describe_head  # slow, so not on `import verl`

    forward = _forward(*FAMILIES.get(model.config.model_type, DENSE))
    _own_forward(type(model))
    # an unknown kind of head raises here rather than in the first step
    check_module(describe_head(model).weight)
    setattr(model, MARK, BACKEND)
    patches.replace(type(model), "forward", forward)
    # verl prints the same for its own backends
    print(f"Using {BACKEND} backend for fused kernels in {type(model).__name__}")


@functools.cache
def _forward(family: str, body_name: str) -> Callable[..., Any]:
    """Make a replacement for verl's ``forward_with_torch_backend``."""
    from grpo_kernels.body.trunk import live_trunk
    from grpo_kernels.transformers.head import measured_head

    module = importlib.import_module(f"verl.models.transformers.{family}")
    body = found_in(module, body_name) if body_name else _body
    of_body = inspect.signature(body).parameters
    takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in of_body.values())
    ending = "CausalLMOutputForPPO"
    output = found_in(module, next((x for x in vars(module) if x.endswith(ending)), ending))
    with_aux = make_dataclass(  # the engine reads the added field in distillation
        output.__name__,
        [("fused_linear_aux", Any, None)],
        bases=(output,),
        namespace={"__module__": output.__module__},
    )

    @functools.wraps(found_in(module, "forward_with_torch_backend"))
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        temperature: Any = 1.0,
        logits_to_keep: Any = 0,  # ignored, as in verl
        grpo_kernels_task: HeadTask | None = None,
        **inputs: Any,
    ) -> Any:
        dropped = [] if takes_all else sorted(inputs.keys() - of_body.keys())
        if dropped:
            raise NotImplementedError(
                f"{', '.join(dropped)}: expected text, since verl's fused "
                f"forward of {type(self).__name__} drops other inputs; set "
                "actor_rollout_ref.model.use_fused_kernels=False"
            )
        task = grpo_kernels_task or HeadTask()
        head = measured_head(self, functools.partial(_own_forward(type(self)), self))
        ids = _labels(shift_labels, labels, input_ids)
        needed = task.counted
        if needed is None:
            needed = torch.ones_like(ids, dtype=torch.bool)
        with live_trunk(self, task.layout, None, needed):
            outputs = body(self, input_ids=input_ids, **inputs)
        hidden = outputs[0]
        if ids.shape != hidden.shape[:-1]:
            raise ValueError(
                f"shift_labels: expected {tuple(hidden.shape[:-1])}, one per position, got "
                f"{tuple(ids.shape)}"
            )
        names = ("past_key_values", "hidden_states", "attentions")
        results = {name: getattr(outputs, name, None) for name in names}
        if not task.only_teacher:
            results["log_probs"], results["entropy"] = score_rows(
                hidden, head, ids, task, temperature
            )
        if task.teacher is None:
            return output(**results)
        of_teacher, logps = task.teacher
        found = topk_divergence(
            hidden,
            head,
            of_teacher,
            logps,
            divergence="forward_kl",
            log_prob_min_clamp=task.log_prob_min_clamp,
            completion_mask=task.counted,
            temperature=temperature,
        )
        mass = logps.detach().float().exp().sum(dim=-1)
        distilled = Distilled(found.divergence, found.student_mass, mass)
        return with_aux(fused_linear_aux=distilled, **results)

    return forward


def _body(model: Any, **inputs: Any) -> Any:
    return model.model(**inputs)


def _own_forward(cls: type) -> Callable[..., Any]:
    """The original forward of a model's class, which reveals the head's constants."""
    for x in cls.__mro__:
        found = _own.get(x) or vars(x).get("forward")
        if found in (None, nn.Module.forward) or found.__module__.startswith("verl."):
            continue
        return found
    raise LookupError(
        f"verl has already replaced the forward of {cls.__name__}; call patch_verl earlier"
    )


def _labels(shift_labels: Tensor | None, labels: Tensor | None, input_ids: Tensor | None) -> Tensor:
    if shift_labels is not None:
        return shift_labels
    ids = input_ids if labels is None else labels
    if ids is None:
        raise ValueError("shift_labels, labels, input_ids: expected one, got none of them")
    ulysses = importlib.import_module("verl.utils.ulysses")
    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    if ranks > 1:  # the last label of a shard is the first id of the next shard
        raise ValueError(
            f"shift_labels: expected a tensor, since sequences span {ranks} ranks, got None"
        )
    return torch.roll(ids, -1, -1)


class Distilled(NamedTuple):
    """Fields that verl's engine reads in distillation, (1, N) each; 0 in rows that do not count."""

    distillation_losses: Tensor
    student_mass: Tensor
    teacher_mass: Tensor
