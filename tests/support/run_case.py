"""The library on a `Case`: its arguments, its results, and which engines are exact for it."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import Head, LossConfig, LossOutput, grpo_loss
from grpo_kernels.head.head import CONSTANTS
from tests.support.case_builder import PER_TOKEN, Case
from tests.support.flat import flat
from tests.support.reference_terms import TERMS, settings


def config_of(case: Case) -> LossConfig:
    """The case's loss; soft-cap, scale and precision of the logits are the head's."""
    return LossConfig(**{name: x for name, x in case.config.items() if name not in CONSTANTS})


def constants_of(case: Case) -> dict[str, object]:
    """What the case's head does to its product, as fields of a `Head`."""
    return {name: x for name, x in case.config.items() if name in CONSTANTS}


def arguments(case: Case) -> dict[str, Tensor | float | None]:
    """Keyword arguments of ``flat(grpo_loss)``, to go with `config_of`; every head tensor is a leaf that wants a
    gradient unless it is frozen.
    """
    leaf = lambda name: getattr(case, name).detach().requires_grad_(name not in case.frozen)  # noqa: E731
    names = (
        "completion_ids",
        "completion_mask",
        "advantages",
        *PER_TOKEN,
        "importance_sampling_ratio",
        "num_items_in_batch",
    )
    head = {"hidden": leaf("hidden"), "weight": leaf("weight"), "bias": None if case.bias is None else leaf("bias")}
    given = head | {name: getattr(case, name) for name in names}
    return given | constants_of(case) | {"reference": reference_of(case)}


def reference_of(case: Case) -> tuple[Tensor, Head] | None:
    """The case's other head, as the loss takes it."""
    if case.teacher_hidden is None or case.teacher_weight is None:
        return None
    o = settings(case)
    head = Head(
        case.teacher_weight,
        case.teacher_bias,
        final_logit_softcapping=o.teacher_final_logit_softcapping,
        logit_scale=o.teacher_logit_scale,
        logits_dtype=o.logits_dtype,
    )
    return case.teacher_hidden, head


def run(
    case: Case, engine: str = "auto", scale: float = 1.0, backend: str = "auto"
) -> tuple[LossOutput, dict[str, Tensor | None]]:
    """The library's output, and its gradients under the upstream gradient `scale`."""
    given = arguments(case)
    options = {"engine": engine, "backend": backend, "workspace_bytes": case.workspace_bytes}
    output = flat(grpo_loss)(**given, config=config_of(case), **options)
    if output.loss.requires_grad:
        (output.loss * scale).backward()
    return output, {name: None if given[name] is None else given[name].grad for name in ("hidden", "weight", "bias")}


def allowed_engines(case: Case) -> set[str]:
    """Which engines are exact for the case, from what each needs to know and when."""
    o = settings(case)
    trains = {name for name in ("hidden", "weight", "bias") if getattr(case, name) is not None} - case.frozen
    on_policy = case.old_per_token_logps is None
    full = o.beta != 0 and o.kl_estimator == "full"
    corrected = o.beta != 0 and o.use_bias_correction_kl and o.loss_type != "gmpo" and not full
    by_sequence = o.importance_sampling_level == "sequence"
    coupled = o.top_entropy_quantile < 1.0
    if o.off_policy_mask_threshold is not None:
        coupled |= not on_policy or case.sampling_per_token_logps is not None
    coupled |= (corrected and by_sequence) if on_policy else by_sequence or TERMS[o.loss_type].per_sequence
    allowed = {"two_pass", "lean"} if coupled else {"two_pass", "lean", "one_pass"}
    if not trains & {"weight", "bias"} and (o.entropy_coef == 0.0 or not trains) and not full:
        allowed.add("frozen")
    return allowed if trains else allowed | {"score"}


def packed(case: Case, given: dict) -> tuple[dict, Tensor]:
    """The batch with each sequence cut after its last counted token and laid end to end; which positions stayed."""
    counted = case.completion_mask != 0
    steps = torch.arange(counted.shape[1]) + 1
    lengths = (counted * steps).amax(1)
    stays = steps <= lengths[:, None]
    out = dict(given, cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32))
    for name, x in given.items():
        if isinstance(x, Tensor) and x.shape[:2] == counted.shape and name != "weight":
            out[name] = x[stays]
    if given["reference"] is not None:
        hidden, head = given["reference"]
        out["reference"] = hidden[stays], head
    return out, stays
