"""What one rank of a group may do that does not go with what the others do: one table, and what each kind must raise.

Every kind must raise TypeError or ValueError on every rank, in words that name what differs, and leave the group fit
for the next call. Of what one rank refuses alone, the others' error says which rank that was. `FITTING` is what ranks
may well differ in.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from grpo_kernels import LoRA, LossConfig, token_level
from tests.support.rank_kinds import Mismatch, alone, config, differs, fits

NAN = math.nan
OLD = {"old_per_token_logps": torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.25, -3.0]])}
HALF = {
    "hidden": torch.ones(2, 3, 4, dtype=torch.bfloat16),
    "weight": torch.ones(10, 4, dtype=torch.bfloat16),
}
REF = {"config": LossConfig(beta=0.1), "ref_per_token_logps": -torch.ones(2, 3)}
BIAS = torch.linspace(-1.0, 1.0, 10)
ADAPTER = LoRA(torch.ones(2, 4), torch.ones(10, 2), 0.5)
PACKED = {
    "hidden": torch.ones(6, 4, requires_grad=True), "completion_ids": torch.arange(6), "completion_mask": torch.ones(6),
    "cu_seqlens": torch.tensor([0, 2, 6]),
}  # fmt: skip
PER_TOKEN = (
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


@token_level
def surrogate(tokens: Any) -> torch.Tensor:
    """An objective of one's own."""
    return -tokens.advantages * tokens.logps


@token_level
def broken(tokens: Any) -> torch.Tensor:
    """One of another shape."""
    return surrogate(tokens)[:0]


broken.__qualname__ = surrogate.__qualname__  # the ranks' are of one name


def as_dtype(name: str, dtype: torch.dtype) -> Any:
    """The rank's own tensor in another dtype."""
    return lambda own: own[name].detach().to(dtype).requires_grad_(own[name].requires_grad)


def ones_like(name: str, dims: int = 2) -> Any:
    """Ones of the shape of the rank's own tensor, of its first dimensions."""
    return lambda own: torch.ones(own[name].shape[:dims])


def frozen(name: str) -> Any:
    """The rank's own tensor without gradient."""
    return lambda own: own[name].detach()


def longer(name: str, dim: int) -> Any:
    """The rank's own tensor, one entry longer."""
    return lambda own: (
        torch.cat([own[name], own[name].narrow(dim, 0, 1)], dim)
        .detach()
        .requires_grad_(own[name].requires_grad)
    )


CONFIGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5}, {"loss_type": "grpo"}, {"loss_type": "vespo"}, {"importance_sampling_level": "sequence"},
    {"epsilon": 0.3}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}, {"off_policy_mask_threshold": 0.5},
)  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "final_logit_softcapping": 5.0,
    "logit_scale": 0.5,
    "logits_dtype": "input",
}  # of a head


def of_a_loss(call: str) -> list[Mismatch]:
    """What a loss has, whichever group its ranks share."""
    other, bad = functools.partial(differs, call=call), functools.partial(alone, call=call)
    kinds = [config(call, **fields) for fields in CONFIGS]
    kinds += [other(name, **{name: value}) for name, value in CONSTANTS.items()]
    kinds += [
        other(f"presence of {name}", name, **{name: ones_like("completion_ids")})
        for name in PER_TOKEN
    ]
    kinds += [
        other("absence of old_per_token_logps", both=OLD, old_per_token_logps=None),
        other("advantages 0", "advantages|graded", advantages=torch.zeros(2)),
        other("advantages a token", advantages=ones_like("completion_ids")),
        other("engine", engine="lean"),
        other("num_items_in_batch", both={"num_items_in_batch": 4.0}, num_items_in_batch=5.0),
        other("presence of num_items_in_batch", num_items_in_batch=5.0),
        other("objective", objective=lambda own: surrogate),
        other("vocab_size", r"vocab_size|\[0, V\) = \[0, 7\)", vocab_size=7),
        other("dtype of hidden", both=HALF, hidden=as_dtype("hidden", torch.float16)),
        other(
            "dtype of hidden and weight",
            "hidden|weight",
            hidden=as_dtype("hidden", torch.float64),
            weight=as_dtype("weight", torch.float64),
        ),
        other("dtype of weight", "weight", weight=as_dtype("weight", torch.float64)),
        other(
            "dtype of old_per_token_logps",
            both=OLD,
            old_per_token_logps=as_dtype("old_per_token_logps", torch.float64),
        ),
        other("hidden is frozen", "hidden|gradients", hidden=frozen("hidden")),
        other("weight is frozen", "weight|gradients", weight=frozen("weight")),
        Mismatch("no_grad", {}, "hidden|weight|gradients", call, no_grad=True),
        other(
            "H of hidden and weight",
            "hidden|weight|H",
            hidden=longer("hidden", 2),
            weight=longer("weight", 1),
        ),
        other(
            "one more sequence",
            "hidden|completion_ids|sequences|positions|shape",
            hidden=longer("hidden", 0),
            completion_ids=longer("completion_ids", 0),
            completion_mask=None,
            advantages=torch.ones(3),
        ),
        bad("completion_ids a list", completion_ids=[[1, 2, 3], [4, 5, 6]]),
        bad("completion_ids out of range", completion_ids=lambda own: own["completion_ids"] + 100),
        bad(
            "completion_ids of another shape",
            completion_ids=lambda own: own["completion_ids"].flatten(),
        ),
        bad("completion_mask a list", completion_mask=[[1, 1, 1], [1, 1, 0]]),
        bad("completion_mask NaN", completion_mask=lambda own: own["completion_mask"] * NAN),
        bad("completion_mask of another shape", completion_mask=torch.ones(2, 9)),
        bad("hidden (H,)", hidden=torch.ones(4)),
        bad("hidden a list", hidden=[1.0]),
        bad("weight of integers", weight=lambda own: own["weight"].detach().long()),
        bad("weight None", weight=None),
        bad("reference a string", reference="x"),
        bad("bias of another shape", bias=torch.ones(3)),
        bad("lora a string", lora="adapter"),
        bad("advantages of another shape", advantages=torch.ones(5)),
        bad("advantages None", advantages=None),
        bad("old_per_token_logps of another shape", old_per_token_logps=torch.ones(9, 9)),
        bad("old_per_token_logps a list", both=OLD, old_per_token_logps=[1.0]),
        bad("ref_per_token_logps missing", both=REF, ref_per_token_logps=None),
        bad("num_items_in_batch NaN", num_items_in_batch=NAN),
        bad("num_items_in_batch -1", both={"num_items_in_batch": 4.0}, num_items_in_batch=-1),
        bad("config a dict", config={"beta": 0.1}),
        bad("engine unknown", engine="fast"),
        bad("backend unknown", backend="fortran"),
        bad("workspace_bytes a string", workspace_bytes="much"),
        bad("vocab_size 0", vocab_size=0),
        bad("gather a string", gather="all"),
        bad("objective a string", objective="ppo"),
    ]
    return kinds


def of_a_sharded_head() -> list[Mismatch]:
    """process_group: all but the head's rows is the same on every rank."""
    counted = "mask|counted"
    return [
        *of_a_loss("loss"),
        differs(
            "completion_mask counts one less",
            counted,
            completion_mask=torch.tensor([[1, 1, 0], [1, 1, 0]]),
        ),
        differs(
            "completion_mask counts others",
            f"{counted}|ids|checksum",
            completion_mask=torch.tensor([[1, 1, 1], [1, 0, 1]]),
        ),
        differs("completion_mask None", counted, completion_mask=None),
        differs(
            "completion_ids", "ids", completion_ids=lambda own: (own["completion_ids"] + 1) % 10
        ),
        differs("one advantage 0", "advantages|graded", advantages=torch.tensor([1.0, 0.0])),
        differs("bias", bias=lambda own: BIAS[: len(own["weight"])]),
        differs(
            "bias is frozen",
            "bias|gradients",
            both={"bias": BIAS.clone().requires_grad_()},
            bias=frozen("bias"),
        ),
        differs("lora", lora=lambda own: LoRA(torch.ones(2, 4), torch.ones(len(own["weight"]), 2))),
        differs(
            "lora.scaling",
            "lora",
            both={"lora": ADAPTER},
            lora=lambda own: LoRA(own["lora"].a, own["lora"].b, 0.25),
        ),
        differs("backend", backend="torch", both={"backend": "cpp"}),
        differs("workspace_bytes", workspace_bytes=4000),
        differs(
            "shape (3, 2)",
            "completion_ids|shape|sequences|hidden",
            advantages=torch.ones(3),
            completion_mask=None,
            hidden=lambda own: own["hidden"].view(3, 2, 4),
            completion_ids=lambda own: own["completion_ids"].view(3, 2),
        ),
        differs("packed", "cu_seqlens|shape|completion_ids", advantages=torch.ones(2), **PACKED),
        differs(
            "cu_seqlens",
            "cu_seqlens|sequences|checksum",
            both=PACKED | {"advantages": torch.ones(6)},
            cu_seqlens=torch.tensor([0, 3, 6]),
        ),
        Mismatch(
            "another function", {}, "function|call|linear_logprob|grpo_loss", other_call="logprob"
        ),
        differs("extras", call="logprob", extras=("is_top1",)),
        differs("no entropy", "entropy", "logprob", entropy=False),
        differs("mask", "mask|counted", "logprob", mask=torch.tensor([[1, 1, 1], [1, 1, 0]])),
        differs("ids", call="logprob", ids=lambda own: (own["ids"] + 1) % 10),
        differs("expected", call="logprob", expected=torch.ones(2, 3)),
        *[kind for call in ("logprob", "divergence", "topk") for kind in of_logits(call)],
        differs("divergence", "beta", "divergence", divergence="forward_kl"),
        differs("teacher_logit_scale", "reference", "divergence", teacher_logit_scale=2.0),
        differs("teacher_logps", call="topk", teacher_logps=lambda own: own["teacher_logps"] - 0.5),
        alone("ids out of range", "logprob", ids=torch.full((2, 3), 99)),
        alone("mask NaN", "logprob", mask=torch.full((2, 3), NAN)),
        alone("temperature 0", "logprob", temperature=0.0),
        alone("extras unknown", "logprob", extras=("surprise",)),
        alone("expected of another shape", "logprob", expected=torch.ones(5)),
    ]


def of_logits(call: str) -> list[Mismatch]:
    """Options of the logits, and the dtype of what they are made of."""
    each = torch.linspace(0.5, 2.0, 6).view(2, 3)
    return [
        differs("temperature", call=call, temperature=0.5),
        differs("a temperature a token", "temperature", call, temperature=torch.full((2, 3), 0.5)),
        differs(
            "other temperatures",
            "temperature",
            call,
            both={"temperature": each},
            temperature=each.flip(0),
        ),
        differs("soft-cap", "softcapping", call, final_logit_softcapping=5.0),
        differs("logit_scale", call=call, logit_scale=2.0),
        differs("logits_dtype", call=call, logits_dtype="input"),
        differs("dtype of hidden", "hidden", call, hidden=as_dtype("hidden", torch.bfloat16)),
    ]


MISMATCHES = {
    "process_group": of_a_sharded_head(),
}
FITTING = {
    "process_group": [
        fits("types of numbers", both={"num_items_in_batch": 4}, num_items_in_batch=4.0),
        fits(
            "types of a config's numbers",
            both={"config": LossConfig(temperature=1)},
            config=LossConfig(temperature=1.0),
        ),
        fits(
            "strides of hidden",
            hidden=lambda own: own["hidden"].mT.contiguous().mT.detach().requires_grad_(),
        ),
        fits("a mask of bool", completion_mask=lambda own: own["completion_mask"].bool()),
    ],
}
