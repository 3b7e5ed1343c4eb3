"""The library on a `Case`: its arguments, its results, and which engines are exact for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import (
    Head,
    LoRA,
    LossConfig,
    LossOutput,
    Run,
    Scores,
    grpo_loss,
    linear_divergence,
    linear_logps,
    topk_divergence,
)  # fmt: skip
from tests.support.case_builder import PER_TOKEN, Case, seeded
from tests.support.flat import flat
from tests.support.reference import LEAVES, TERMS, settings
from tests.support.tolerance import assert_scores

CONSTANTS = ("final_logit_softcapping", "logit_scale", "logits_dtype")  # of a `Head`
KINDS = {1.0: {"divergence": "reverse_kl"}, 0.0: {"divergence": "forward_kl"}}
WHOLE = slice(None)
Gradients = dict[str, Tensor | None]


def config_of(case: Case) -> LossConfig:
    """The case's loss, where "dr_grpo" divides by TRL's default; soft-cap, scale and precision of
    the logits are the head's."""
    options = {name: x for name, x in case.config.items() if name not in CONSTANTS}
    by_length = {"max_completion_length": 512} if options.get("loss_type") == "dr_grpo" else {}
    return LossConfig(**{**by_length, **options})


def constants_of(case: Case) -> dict[str, object]:
    """What the case's head does to its product, as fields of a `Head`."""
    return {name: x for name, x in case.config.items() if name in CONSTANTS}


def leaves_of(case: Case, rows: slice = WHOLE) -> dict[str, Tensor | None]:
    """Every tensor that may want a gradient, as a leaf that wants one unless it is frozen; of the
    head these rows."""
    of_head, made = ("weight", "bias", "lora_b"), {}
    for name in LEAVES:
        x = getattr(case, name)
        if x is not None and rows != WHOLE and name in of_head:
            x = x[rows].clone()
        made[name] = None if x is None else x.detach().requires_grad_(name not in case.frozen)
    return made


def lora_of(case: Case, leaves: dict[str, Tensor | None]) -> LoRA | None:
    a, b = leaves["lora_a"], leaves["lora_b"]
    if a is None or b is None:
        return None
    return LoRA(a, b, settings(case).lora_scaling, leaves["lora_input"])


def arguments(case: Case, rows: slice = WHOLE) -> dict[str, Any]:
    """Keyword arguments of ``flat(grpo_loss)``, to go with `config_of`; every head tensor is a leaf
    that wants a gradient unless it is frozen."""
    return loss_arguments(case, leaves_of(case, rows), rows)


def loss_arguments(
    case: Case, leaves: dict[str, Tensor | None], rows: slice = WHOLE
) -> dict[str, Any]:
    names = ("completion_ids", "completion_mask", "advantages", *PER_TOKEN)
    names = (*names, "importance_sampling_ratio")
    if case.sampling_topk_ids is not None:
        names = (*names, "sampling_topk_ids", "sampling_topk_logps")
    given = {name: leaves[name] for name in ("hidden", "weight", "bias")}
    given |= {name: getattr(case, name) for name in (*names, "num_items_in_batch")}
    if case.lora_a is not None:
        given["lora"] = lora_of(case, leaves)
    return given | constants_of(case) | kept_of(case) | {"reference": reference_of(case, rows)}


def kept_of(case: Case) -> dict[str, Any]:
    if case.kept_ids is None:
        return {}
    return {"kept_ids": case.kept_ids, "on_missing_set": settings(case).on_missing_set}


def reference_of(case: Case, rows: slice = WHOLE) -> tuple[Tensor, Head] | None:
    """The case's other head, as the loss takes it; these rows of it."""
    if case.teacher_hidden is None or case.teacher_weight is None:
        return None
    o = settings(case)
    head = Head(
        case.teacher_weight[rows],
        None if case.teacher_bias is None else case.teacher_bias[rows],
        final_logit_softcapping=o.teacher_final_logit_softcapping,
        logit_scale=o.teacher_logit_scale,
        logits_dtype=o.logits_dtype,
    )
    return case.teacher_hidden, head


def gradients_of(leaves: dict[str, Tensor | None]) -> Gradients:
    return {name: None if x is None else x.grad for name, x in leaves.items()}


def run(
    case: Case,
    engine: str = "auto",
    scale: float = 1.0,
    backend: str = "auto",
    *,
    rows: slice = WHOLE,
    **options: Any,
) -> tuple[LossOutput, Gradients]:
    """The library's output, and its gradients under the upstream gradient `scale`; with these rows
    of the head."""
    leaves = leaves_of(case, rows)
    options |= {"engine": engine, "backend": backend, "workspace_bytes": case.workspace_bytes}
    options |= loss_arguments(case, leaves, rows)
    output = flat(grpo_loss)(config=config_of(case), **options)
    if output.loss.requires_grad:
        (output.loss * scale).backward()
    return output, gradients_of(leaves)


def upstream_of(case: Case) -> dict[str, Tensor]:
    """What arrives at each score, (B, T): at divergences what the case says, at others only if it
    says so.

    NaN where masked, of which nothing may get into a gradient.
    """
    g, shape = seeded(f"{case.name} upstream"), case.completion_mask.shape
    kind = torch.float64 if case.hidden.dtype == torch.float64 else torch.float32
    any_of = lambda: torch.randn(shape, generator=g).to(kind)  # noqa: E731
    nothing, o = torch.zeros(shape, dtype=kind), settings(case)
    c = {
        "same": torch.full(shape, 0.37, dtype=kind),
        "any": any_of(),
        "some": torch.where(torch.rand(shape, generator=g) < 0.5, 0.25, 0.0).to(kind),
        "none": nothing,
    }[o.arrives]
    more = o.more or not case.diverges
    up = {"divergences": c}
    up |= {name: any_of() if more else nothing for name in ("entropies", "logps")}
    return {name: torch.where(case.completion_mask != 0, x, torch.nan) for name, x in up.items()}


def scores(
    case: Case, leaves: dict[str, Tensor | None], engine: str, rows: slice, **options: Any
) -> Scores:
    """`linear_logps`, or one of the two divergences, with all that the case has."""
    o = settings(case)
    head = Head(
        leaves["weight"],
        leaves["bias"],
        lora_of(case, leaves),
        options.pop("process_group", None),
        **constants_of(case),
    )
    options["run"] = Run(engine, options.pop("backend", "auto"), case.workspace_bytes)
    options["completion_mask"] = case.completion_mask
    options["temperature"] = o.temperature if case.temperature is None else case.temperature
    if case.listed_ids is not None:
        names = ("divergence", "tail", "log_prob_min_clamp", "loss_max_clamp")
        options |= {name: getattr(o, name) for name in names}
        listed = case.listed_ids, case.listed_logps
        return topk_divergence(leaves["hidden"], head, *listed, **options)
    if case.teacher_hidden is not None:
        kind = KINDS.get(o.beta_of_divergence, {"divergence": "jsd", "beta": o.beta_of_divergence})
        given = {"completion_ids": case.completion_ids, "entropy": True, **kind}
        teacher = reference_of(case, rows)
        return linear_divergence(leaves["hidden"], head, teacher, **given, **options)
    options.setdefault("entropy", True if o.entropy_of == "the set" else "full")
    return linear_logps(leaves["hidden"], head, case.completion_ids, **kept_of(case), **options)


def run_scores(
    case: Case, engine: str = "auto", *, rows: slice = WHOLE, **options: Any
) -> tuple[dict[str, Tensor], Gradients]:
    """The library's results by name, and the gradients that `upstream_of` gives; with these rows of
    the head."""
    leaves = leaves_of(case, rows)
    found = scores(case, leaves, engine, rows, **options)
    results = {"divergences": found.divergence, "entropies": found.entropies, "logps": found.logps}
    results = {name: x for name, x in results.items() if x is not None}
    up = upstream_of(case)
    sent = [x for x in results if x == "divergences" or not case.diverges or settings(case).more]
    if any(results[name].requires_grad for name in sent):
        torch.autograd.backward([results[name] for name in sent], [up[name] for name in sent])
    return {name: x.detach() for name, x in results.items()}, gradients_of(leaves)


def engines_of(case: Case) -> tuple[str, ...]:
    """Engines that give the case's scores, of which kept sets have no choice."""
    if case.kept_ids is not None:
        return ("auto",)
    return ("auto", *(("one_pass",) if case.diverges else ()), "two_pass", "lean")


def check_scores(case: Case, number: int | None = None) -> None:
    """Results and gradients of every engine that serves the case, or of the default and another one
    in turn, within their bounds."""
    up, engines = upstream_of(case), engines_of(case)
    for engine in engines if number is None else {"auto", engines[number % len(engines)]}:
        results, grads = run_scores(case, engine)
        assert_scores(case.but(name=f"{case.name}, engine {engine}"), up, results, grads, engine)


def allowed_engines(case: Case) -> set[str]:
    """Which engines are exact for the case, from what each needs to know and when."""
    o = settings(case)
    if case.kept_ids is not None:
        return {"auto"}
    trains = {name for name in LEAVES if getattr(case, name) is not None} - case.frozen
    on_policy = case.old_per_token_logps is None
    full = o.beta != 0 and o.kl_estimator == "full"
    corrected = o.beta != 0 and o.use_bias_correction_kl and o.loss_type != "gmpo" and not full
    by_sequence = o.importance_sampling_level == "sequence"
    coupled = o.top_entropy_quantile < 1.0
    if o.off_policy_mask_threshold is not None:
        coupled |= not on_policy or case.sampling_per_token_logps is not None
    if on_policy:
        coupled |= corrected and by_sequence
    else:
        coupled |= by_sequence or TERMS[o.loss_type].per_sequence
    allowed = {"two_pass", "lean"} if coupled else {"two_pass", "lean", "one_pass"}
    frozen = case.lora_a is None and not trains & {"weight", "bias"} and not full
    if frozen and (o.entropy_coef == 0.0 or not trains):
        allowed.add("frozen")
    return allowed if trains else allowed | {"score"}


def packed(case: Case, given: dict) -> tuple[dict, Tensor]:
    """The batch with each sequence cut after its last counted token and laid end to end; which
    positions stayed."""
    counted = case.completion_mask != 0
    steps = torch.arange(counted.shape[1]) + 1
    lengths = (counted * steps).amax(1)
    stays = steps <= lengths[:, None]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    out = dict(given, cu_seqlens=bounds.to(torch.int32))
    for name, x in given.items():
        if isinstance(x, Tensor) and x.shape[:2] == counted.shape and name != "weight":
            out[name] = x[stays]
    if given["reference"] is not None:
        hidden, head = given["reference"]
        out["reference"] = hidden[stays], head
    lora = given.get("lora")
    if lora is not None and lora.input is not None:
        out["lora"] = replace(lora, input=lora.input[stays])
    return out, stays
