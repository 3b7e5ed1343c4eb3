"""The registered ops (`grpo_kernels/ops`): torch's own checks of schema, fake, autograd and tracing."""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from grpo_kernels import LossConfig
from grpo_kernels.compiled.ops import linear_logprob, policy_loss
from grpo_kernels.objective.config import config_of
from tests.support.small_batch import OPTIONAL, small_batch

B, T, H, V = 2, 3, 4, 9
OPS = {name: getattr(torch.ops.grpo_kernels, name).default for name in ("policy_loss", "linear_logprob")}
OPS["linear_logprob_backward"] = torch.ops.grpo_kernels.linear_logprob_backward.default
ALL, HIDDEN, NONE = [True, True, True], [True, False, False], [False, False, False]
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


def permuted(x: Tensor) -> Tensor:
    """The same numbers, the dimensions in memory the other way round."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def tensors(dtype: torch.dtype) -> dict[str, Any]:
    others = {"completion_mask": MASK, "num_items_in_batch": torch.tensor(7)}
    return small_batch(B, T, H, V, OPTIONAL, dtype=dtype, **others)


def loss_arguments(
    *given: str,
    loss: dict[str, Any] | None = None,
    engine: str = "one_pass",
    wants: list[bool] = ALL,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    layout: str = "contiguous",
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Arguments of the op; of the optional tensors, those `given` by name."""
    named: dict[str, Any] = tensors(dtype)
    always = ("hidden", "weight", "completion_ids", "advantages")
    named = {name: x if name in (*always, *given) else None for name, x in named.items()}
    if layout == "permuted":
        named = {name: None if x is None else permuted(x) for name, x in named.items()}
    elif layout in ("packed", "empty"):
        n = B * T if layout == "packed" else 0
        for name, x in named.items():
            if x is not None and x.shape[:2] == (B, T):
                named[name] = x.flatten(0, 1)[:n]
        named["cu_seqlens"] = torch.tensor([0, 4, n]) if n else torch.tensor([0, 0, 0])
    elif layout == "no tokens":
        named["completion_mask"] = torch.zeros_like(MASK)
    config = LossConfig(**(loss or {"loss_type": "grpo"}))
    wants = [wants[0], wants[1], wants[2] and named["bias"] is not None]
    rest = (config.key, None, 1.0, "float32", engine, backend, None, compute or dtype, wants)
    return (
        *policy_loss.Arguments(
            **{"cu_seqlens": None, **named}, **dict(zip(policy_loss.Arguments._fields[12:], rest, strict=True))
        ),
    )


BOTH_TERMS = {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.01}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
MASKED, OLD, REF = "completion_mask", "old_per_token_logps", "ref_per_token_logps"
LOSSES: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "masked": {"given": (MASKED,)},
    "bias": {"given": (MASKED, "bias")},
    "permuted": {"given": (MASKED, "bias", OLD), "layout": "permuted"},
    "all-terms": {"given": (MASKED, OLD, REF), "loss": BOTH_TERMS},
    "num-items": {"given": (OLD, "num_items_in_batch"), "loss": {"loss_type": "dapo"}},
    "importance": {"given": (MASKED, OLD, "importance_sampling_ratio"), "loss": {"loss_type": "cispo"}},
    "sampled": {
        "given": (MASKED, OLD, "sampling_per_token_logps"),
        "loss": {"off_policy_mask_threshold": 0.1},
        "engine": "two_pass",
    },
    "vespo": {"given": (MASKED, OLD), "loss": {"loss_type": "vespo"}, "engine": "two_pass"},
    "two_pass-bonus": {"given": (MASKED, OLD, "bias"), "loss": SEQUENCE | {"entropy_coef": 0.1}, "engine": "two_pass"},
    "lean-permuted": {"given": (MASKED, OLD), "loss": SEQUENCE, "engine": "lean", "layout": "permuted"},
    "frozen": {"given": (MASKED, OLD), "loss": SEQUENCE, "engine": "frozen", "wants": HIDDEN},
    "frozen-head": {"given": (MASKED, "bias", OLD, REF), "loss": BOTH_TERMS, "wants": HIDDEN},
    "head-only": {"given": (MASKED, "bias"), "wants": [False, True, True]},
    "score": {"given": (MASKED, "bias", OLD), "engine": "score", "wants": NONE},
    "packed": {"given": (MASKED, OLD), "loss": {"loss_type": "gmpo"}, "engine": "two_pass", "layout": "packed"},
    # sapo: where there is no token the extremes of clipping are NaN, which opcheck takes for a difference
    "empty": {"given": (OLD,), "loss": {"loss_type": "sapo"}, "layout": "empty"},
    "no-tokens": {"given": (OLD, "bias"), "loss": {"loss_type": "sapo", "entropy_coef": 0.1}, "layout": "no tokens"},
    "autocast": {"given": (MASKED, OLD), "compute": torch.bfloat16},
    "bf16": {"given": (MASKED, OLD), "dtype": torch.bfloat16},
    "float64": {"given": (MASKED, OLD), "dtype": torch.float64},
    "triton": {"given": (MASKED, OLD, REF), "loss": BOTH_TERMS, "backend": "triton"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(name: str) -> None:
    options = dict(LOSSES[name])
    check("policy_loss", loss_arguments(*options.pop("given", ()), **options))


def logprob_arguments(
    *,
    outputs: tuple[str, ...] = ("entropy",),
    bias: bool = False,
    mask: bool = False,
    temperatures: bool = False,
    engine: str = "two_pass",
    wants: list[bool] = ALL,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    layout: str = "contiguous",
    backend: str = "auto",
    **head: Any,
) -> tuple[Any, ...]:
    given: list[Any] = [
        torch.randn(B, T, H, dtype=dtype),
        torch.randn(V, H, dtype=dtype),
        torch.randn(V, dtype=dtype) if bias else None,
        torch.randint(V, (B, T)),
        MASK if mask else None,
        torch.rand(B, T) + 0.5 if temperatures else None,
    ]
    if layout == "permuted":
        given = [None if x is None else permuted(x) for x in given]
    elif layout == "flat":
        given = [x if x is None or x.shape[:2] != (B, T) else x.flatten(0, 1) for x in given]
    elif layout == "empty":
        given = [x if x is None or x.shape[:2] != (B, T) else x[:0] for x in given]
    settings = linear_logprob.Settings(
        temperature=head.get("temperature", 1.0),
        final_logit_softcapping=head.get("final_logit_softcapping"),
        logit_scale=head.get("logit_scale", 1.0),
        logits_dtype=head.get("logits_dtype", "float32"),
        engine=engine,
        backend=backend,
        workspace_bytes=head.get("workspace_bytes"),
        dtype=compute or dtype,
        wants=[wants[0], wants[1], wants[2] and bias],
    )
    return (*given, list(outputs), *settings)


HEAD = {"temperature": 0.7, "final_logit_softcapping": 3.0, "logit_scale": 1.5}
LOGPROBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logps-only": {"outputs": ()},
    "bias": {"bias": True},
    "masked": {"mask": True, "bias": True},
    "permuted": {"mask": True, "bias": True, "layout": "permuted"},
    "flat": {"mask": True, "layout": "flat"},
    "empty": {"layout": "empty"},
    "temperatures": {"mask": True, "temperatures": True},
    "head": {"bias": True, **HEAD},
    "lean": {"engine": "lean", "mask": True, "workspace_bytes": 1000},
    "hidden-only": {"wants": HIDDEN, "mask": True},
    "head-only": {"wants": [False, True, True], "bias": True},
    "autocast": {"compute": torch.bfloat16, "mask": True},
    "rounded": {"dtype": torch.bfloat16, "logits_dtype": "input"},
    "fp16": {"dtype": torch.float16, "layout": "permuted"},
    "float64": {"dtype": torch.float64, "mask": True},
    "triton": {"backend": "triton", "mask": True, **HEAD},
}
SCORES: dict[str, dict[str, Any]] = {
    "score": {"engine": "score", "wants": NONE, "mask": True},
    "score-extras": {"engine": "score", "wants": NONE, "outputs": ("is_top1", "entropy", "log_sum_sq_probs")},
    "extras": {"outputs": ("mean_logits", "is_top1"), "mask": True},
    "frozen": {"engine": "frozen", "wants": HIDDEN, "outputs": (), "mask": True},
    "frozen-permuted": {"engine": "frozen", "wants": HIDDEN, "outputs": (), "layout": "permuted"},
    "frozen-empty": {"engine": "frozen", "wants": HIDDEN, "outputs": (), "layout": "empty"},
}


@pytest.mark.parametrize("name", LOGPROBS | SCORES)
def test_linear_logprob(name: str) -> None:
    check("linear_logprob", logprob_arguments(**(LOGPROBS | SCORES)[name]))


@pytest.mark.parametrize("upstream", ["both", "zero", "none"])
@pytest.mark.parametrize("name", LOGPROBS)
def test_linear_logprob_backward(name: str, upstream: str) -> None:
    """With a gradient of the entropies, with one that is 0 throughout, and without."""
    given = logprob_arguments(**LOGPROBS[name])
    done = linear_logprob.ScoreResults(*OPS["linear_logprob"](*given))
    d_logps, d_entropies = torch.randn_like(done.logps), torch.randn_like(done.logps)
    has_entropies = "entropy" in given[6] and upstream != "none"
    if upstream == "zero":
        d_logps[..., :1], d_entropies = 0.0, torch.zeros_like(d_entropies)
    elif name == "permuted":
        d_logps = permuted(d_logps)
    check(
        "linear_logprob_backward",
        (
            *given[:6],
            d_logps,
            d_entropies if has_entropies else None,
            done.logps,
            done.entropies if has_entropies else None,
            done.max_logit,
            done.log_sum,
            *given[7:],
        ),
    )


def check(op: str, arguments: tuple[Any, ...]) -> None:
    results = opcheck(OPS[op], arguments)
    assert len(results) == 4
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", OPS)
def test_schema_mutates_and_aliases_nothing(op: str) -> None:
    schema = OPS[op]._schema
    assert not schema.is_mutable
    assert all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
    assert torch.Tag.pt2_compliant_tag in OPS[op].tags
    assert torch.Tag.cudagraph_unsafe in OPS[op].tags  # row counts are read


def test_schemas_name_what_the_code_names() -> None:
    def names(values: Any) -> tuple[str, ...]:
        return tuple(x.name for x in values)

    schemas = {name: op._schema for name, op in OPS.items()}
    assert names(schemas["policy_loss"].arguments) == policy_loss.Arguments._fields
    assert names(schemas["policy_loss"].returns) == policy_loss.LossResults._fields
    assert names(schemas["linear_logprob"].returns) == linear_logprob.ScoreResults._fields
    for name in ("linear_logprob", "linear_logprob_backward"):
        assert names(schemas[name].arguments)[-9:] == linear_logprob.Settings._fields


def test_values_are_checked_inside() -> None:
    given = list(loss_arguments(MASKED))
    given[3] = given[3] + V
    with pytest.raises(ValueError, match="completion_ids: expected ids in"):
        OPS["policy_loss"](*given)
    with pytest.raises(ValueError, match="temperature: expected"):
        OPS["linear_logprob"](*logprob_arguments(temperature=0.0))


def test_config_survives_its_key() -> None:
    """Whatever types its values came in."""

    class Kind(str, Enum):
        GSPO = "sequence"

    for config in (
        LossConfig(),
        LossConfig(epsilon=numpy.float32(0.1), beta=numpy.float64(0.3), max_completion_length=numpy.int64(7)),
        LossConfig(importance_sampling_level=Kind.GSPO, delta=3, top_entropy_quantile=0.3),
        LossConfig(epsilon=random.random(), kl_estimator="k1", use_bias_correction_kl=False),
    ):
        assert config_of(config.key) == config
        assert config_of(config.key).key == config.key
