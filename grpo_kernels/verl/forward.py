"""verl's FSDP engines: the forward that a model gets for `impl_backend=grpo_kernels`.

verl puts a forward of its own on the model's class, which returns log-probabilities and entropies
instead of logits. Ours runs the same body and takes the same labels, in the order `shift_labels`,
rolled `labels`, rolled `input_ids`. The head differs. verl reads ``lm_head.weight``: under FSDP2
that is a shard if the head is a unit of its own (as verl wraps it), or its ``full_tensor()``, whose
gradient is never summed over the ranks. We hand the module to `linear_logprob`: FSDP2 runs it with
the weight whole, and reduces its gradient. Our head also applies the bias, soft-cap and scale of
the logits, which verl's fused heads leave out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, make_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.head import Head
from grpo_kernels.module import check_module
from grpo_kernels.patching import KnownRows, Patches, function_of
from grpo_kernels.scores import linear_logprob, topk_divergence
from grpo_kernels.verl.engine import ARGUMENT, BACKEND, MARK, HeadTask, TeacherLogprobs

# of verl's patch_forward_with_backends
PARAMETERS = ("model", "use_fused_kernels", "fused_kernels_backend")
NOT_THE_BODYS = ("self", "labels", "temperature", "shift_labels", "logits_to_keep")
KEPT = ("past_key_values", "hidden_states", "attentions")  # of the body, returned too


@dataclass(frozen=True)
class Family:
    """Names of verl's functions for one family of models, with their parameters."""

    module: str  # below verl.models.transformers
    output: str  # the class that a forward returns
    forward: str  # the parameters of verl's ``forward_with_torch_backend``, which ours replaces
    # the function that runs all but the head, and its parameters; "": ``model.model`` itself does
    body: tuple[str, str] = ("", "")


_FORWARD = "self input_ids labels temperature shift_labels kwargs"
_BODY = (
    "self input_ids attention_mask position_ids pixel_values pixel_values_videos image_grid_thw "
    "video_grid_thw kwargs"
)
DENSE = Family(
    "dense_common",
    "CausalLMOutputForPPO",
    "self input_ids attention_mask position_ids past_key_values inputs_embeds labels use_cache "
    "output_attentions output_hidden_states return_dict cache_position logits_to_keep temperature "
    "shift_labels loss_kwargs",
    (
        "forward_base_model",
        "self input_ids attention_mask position_ids past_key_values inputs_embeds use_cache "
        "output_attentions output_hidden_states return_dict cache_position",
    ),
)
QWEN2_VL = Family("qwen2_vl", "Qwen2VLCausalLMOutputForPPO", _FORWARD, ("qwen2_vl_forward", _BODY))
GLM4V = Family("glm4v", "Glm4vCausalLMOutputForPPO", _FORWARD, ("glm4v_forward", _BODY))
QWEN3_VL = Family("qwen3_vl", "Qwen3VLCausalLMOutputForPPO", _FORWARD)
QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3_5CausalLMOutputForPPO",
    "self input_ids labels temperature shift_labels cu_seqlens cu_seqlens_cpu kwargs",
)
# model type -> family, as in verl's patch_forward_with_backends; every other one is dense
FAMILIES = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "glm4v": GLM4V,
}

# All that we have replaced in verl: functions of its modules, forwards of models' classes.
patches = Patches("verl")
_own: dict[type, Callable[..., Any]] = {}  # class of a model -> its forward before ours


def changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.models.transformers.monkey_patch."""
    theirs = function_of(module, "patch_forward_with_backends", PARAMETERS)

    @functools.wraps(theirs)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        _keep_own_forward(type(model))
        if use_fused_kernels and fused_kernels_backend == BACKEND:
            use(model)
        else:
            theirs(model, use_fused_kernels, fused_kernels_backend)

    yield module, "patch_forward_with_backends", patch_forward_with_backends


def use(model: Any) -> None:
    """Give the class of `model` the forward with our head, as verl does with its own."""
    from grpo_kernels.transformers.head import describe_head  # slow: not for a bare `import verl`

    family = FAMILIES.get(model.config.model_type, DENSE)
    forward = _forward(family)
    _keep_own_forward(type(model))
    _own_forward(type(model))
    # an unknown kind of head is refused here, not within the first step
    check_module(describe_head(model).weight)
    setattr(model, MARK, BACKEND)
    patches.replace(type(model), "forward", forward)
    # where verl says the same
    print(f"Using {BACKEND} backend for fused kernels in {type(model).__name__}")


@functools.cache
def _forward(family: Family) -> Callable[..., Any]:
    module = importlib.import_module(f"verl.models.transformers.{family.module}")
    theirs = function_of(module, "forward_with_torch_backend", family.forward.split())
    signature = inspect.signature(theirs)
    open_ended = family.forward.split()[-1]  # the name of its **kwargs
    name, parameters = family.body
    body = function_of(module, name, parameters.split()) if name else None
    output = getattr(module, family.output, None)
    known = set() if output is None else {field.name for field in fields(output)}
    if output is None or not {"log_probs", "entropy", *KEPT} <= known:
        raise LookupError(f"{family.output} has no log_probs and entropy")

    from grpo_kernels.transformers.call import measured_head

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        others = dict(given.pop(open_ended, {}))
        task = others.pop(ARGUMENT, None) or HeadTask()
        head = measured_head(self, functools.partial(_own_forward(type(self)), self))
        of_body = {key: x for key, x in given.items() if key not in NOT_THE_BODYS}
        with _in_layout(self, task, given.get("input_ids")):
            if body is None:
                outputs = self.model(**of_body, **others)
            elif open_ended in parameters:
                outputs = body(self, **of_body, **others)
            else:  # arguments that the dense body does not take are dropped, as in verl
                outputs = body(self, **of_body)
        hidden = outputs[0]
        ids = _labels(given.get("shift_labels"), given.get("labels"), given.get("input_ids"))
        temperature = given.get("temperature", 1.0)
        results = {key: getattr(outputs, key, None) for key in KEPT}
        teacher = task.teacher
        if not (teacher and teacher.alone):
            results["log_probs"], results["entropy"] = _logprobs(
                head, hidden, ids, task.rows, temperature
            )
        if teacher:
            distilled = _distilled(head, hidden, teacher, task.rows, temperature)
            return _with_aux(output)(fused_linear_aux=distilled, **results)
        return output(**results)

    return forward


def _in_layout(model: Any, task: HeadTask, input_ids: Tensor | None) -> AbstractContextManager[Any]:
    """Inside, the body of `model` computes what `task` needs of the batch, in its layout."""
    if task.layout == "padded" or input_ids is None:
        return nullcontext()
    from grpo_kernels.body.trunk import live_trunk

    whole = torch.ones_like(input_ids, dtype=torch.bool)
    needed = whole if task.rows is None else task.rows.counted.view(input_ids.shape)
    return live_trunk(model, task.layout, None, needed)


def _keep_own_forward(cls: Any) -> None:
    if not cls.forward.__module__.startswith("verl."):  # which ours has, too
        _own[cls] = cls.forward


def _own_forward(cls: type) -> Callable[..., Any]:
    """The forward that a model's class had before verl's and ours: it shows the head's
    constants."""
    for x in cls.__mro__:
        found = _own.get(x) or vars(x).get("forward")
        if found in (None, nn.Module.forward) or found.__module__.startswith("verl."):
            continue
        return found
    raise LookupError(
        f"verl has replaced the forward of {cls.__name__} already; call patch_verl before verl does"
    )


def _labels(shift_labels: Tensor | None, labels: Tensor | None, input_ids: Tensor | None) -> Tensor:
    """The id that each position predicts."""
    if shift_labels is not None:
        return shift_labels
    ids = input_ids if labels is None else labels
    if ids is None:
        raise ValueError("shift_labels: expected them, or labels, or input_ids, got none of them")
    ulysses = importlib.import_module("verl.utils.ulysses")
    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    if ranks > 1:  # the last label of a shard is the first id of the next one
        raise ValueError(
            f"shift_labels: expected them, since a sequence is divided over {ranks} ranks, got None"
        )
    return torch.roll(ids, -1, -1)


def _logprobs(
    head: Head, hidden: Tensor, ids: Tensor, rows: KnownRows | None, temperature: Any
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies, shaped like the ids, in fp32 (fp64 for fp64 models)."""
    if ids.shape != hidden.shape[:-1]:
        raise ValueError(
            f"shift_labels: expected {tuple(hidden.shape[:-1])}, one a position, got "
            f"{tuple(ids.shape)}"
        )
    options: dict[str, Any] = {}
    if rows is not None:
        options = {"mask": rows.counted, "expected": rows.expected, "entropy": rows.entropy}
    found = linear_logprob(hidden, head, ids, temperature=temperature, **options)
    return found.logps if rows is None else rows.filled(found.logps), found.entropies


def _distilled(
    head: Head, hidden: Tensor, teacher: TeacherLogprobs, rows: KnownRows | None, temperature: Any
) -> Any:
    """The value of ``fused_linear_aux``: the forward KL on the teacher's ids, and both masses.

    (1, N) each; 0 but at `rows`.
    """
    if teacher.ids.shape[:-1] != hidden.shape[:-1]:
        got = tuple(teacher.ids.shape)
        raise ValueError(
            f"teacher_ids: expected {(*hidden.shape[:-1], 'K')}, K a position, got {got}"
        )
    found = topk_divergence(
        hidden,
        head,
        teacher.ids,
        teacher.logps,
        log_prob_min_clamp=teacher.log_prob_min_clamp,
        mask=None if rows is None else rows.counted,
        temperature=temperature,
    )
    mass = teacher.logps.detach().float().exp().sum(dim=-1)
    return _aux_class()(
        distillation_losses=found.divergence, student_mass=found.student_mass, teacher_mass=mass
    )


@functools.cache
def _with_aux(output: Any) -> Any:
    """A subclass of `output`, a model's output class, with the field that the engine reads."""
    return _output_class(output.__name__, output, ("fused_linear_aux",), output.__module__)


@functools.cache
def _aux_class() -> Any:
    from transformers.utils import ModelOutput  # FSDP2 finds the tensors in it

    names = ("distillation_losses", "student_mass", "teacher_mass")
    return _output_class("DistillationOutput", ModelOutput, names, __name__)


def _output_class(name: str, base: Any, names: tuple[str, ...], module: str) -> Any:
    optional = [(x, Any, None) for x in names]
    return make_dataclass(name, optional, bases=(base,), namespace={"__module__": module})
