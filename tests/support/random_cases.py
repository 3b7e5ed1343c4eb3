"""A random case from a seed: `random_case(seed)` is the same one on every machine."""

from __future__ import annotations

import random

import torch

from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.reference_terms import CLIPPED, TERMS

# Twice as often float32 as any other.
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
FROZEN = (("weight", "bias"), ("hidden",), ("bias",), ("weight",))
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -200.0)


def loss_options(draw: random.Random) -> dict[str, object]:
    """A loss: type, level, clip range, KL, entropy bonus, masks, ratios."""
    kind = draw.choice(tuple(TERMS))
    sometimes = lambda p, value, other: value if draw.random() < p else other  # noqa: E731
    options: dict[str, object] = {
        "loss_type": kind,
        "epsilon": draw.choice((0.0, 0.1, 0.2, 0.4)),
        "epsilon_high": draw.choice((None, 0.28, 1.5)),
        "beta": sometimes(0.5, draw.choice((0.01, 0.2)), 0.0),
        "use_bias_correction_kl": draw.random() < 0.6,
        "kl_estimator": draw.choice(("k1", "k2", "k3", "k3", "full")),
        "top_entropy_quantile": sometimes(0.2, draw.uniform(0.1, 0.9), 1.0),
        "max_completion_length": draw.choice((1, 33, 512)),
        "old": draw.random() < 0.7,
        "zero_adv": draw.random() < 0.25,
        "num_items": sometimes(0.3, draw.choice((0.0, 3.0, 50.5)), None),
    }
    if kind != "gmpo":
        options |= {
            "importance_sampling_level": draw.choice(("token", "sequence")),
            "adv": sometimes(0.3, "token", "sequence"),
            "ratio": sometimes(0.4, draw.choice(("token", "masked", "sequence", "batch")), None),
            "entropy_coef": sometimes(0.3, draw.choice((-0.01, 0.05, 1.0)), 0.0),
            "off_policy_mask_threshold": sometimes(0.2, draw.choice((0.0, 0.1, 0.4)), None),
            "sampling": draw.random() < 0.3,
        }
        if kind in CLIPPED:
            options["delta"] = sometimes(0.25, draw.choice((1.05, 1.5, 4.0)), None)
    return options


def head_options(draw: random.Random) -> dict[str, object]:
    """A head: bias, soft-cap, scale, temperature, dtype, spread of the logits, what is frozen."""
    sometimes = lambda p, value, other: value if draw.random() < p else other  # noqa: E731
    return {
        "bias": draw.random() < 0.3,
        "final_logit_softcapping": sometimes(0.25, draw.choice((1.0, 5.0, 30.0)), None),
        "logit_scale": sometimes(0.25, draw.choice((-0.5, 0.3, 2.0)), 1.0),
        "temperature": sometimes(0.4, draw.choice((0.5, 0.9, 1.7)), 1.0),
        "dtype": draw.choice(DTYPES),
        "spread": draw.choice((0.3, 2.0, 2.0, 8.0, 20.0)),
        "frozen": sometimes(0.25, draw.choice(FROZEN), ()),
    }


def case_options(draw: random.Random) -> dict[str, object]:
    """What `make_case` takes: shapes B 0-6, T 0-14, H 1-40, V 1-200, any loss, any head."""
    shape = {"b": draw.choice((0, 1, 2, 3, 4, 6)), "t": draw.choice((0, 1, 2, 5, 7, 11, 14))}
    shape |= {
        "h": draw.choice((1, 3, 8, 16, 31, 40)),
        "v": draw.choice((1, 2, 7, 33, 64, 129, 200)),
    }
    if draw.random() < 0.8:
        shape = {k: max(x, 2) for k, x in shape.items()}
    masks = ("ragged", "holes", "full", "left", "one", "first_empty", "none")
    mask = draw.choice((*masks[:1], *masks[:2], *masks[1:]))
    mask = mask if shape["b"] * shape["t"] else "ragged"
    workspace = draw.choice((2**29, 2**29, 4 * shape["v"], 20 * shape["v"], 200 * shape["v"]))
    options = {"mask": mask, "workspace": workspace, **shape}
    options |= loss_options(draw) | head_options(draw)
    return options | (teacher_options(draw) if options["kl_estimator"] == "full" else {})


def teacher_options(draw: random.Random) -> dict[str, object]:
    """Another head: near the policy's, or of another width."""
    return {
        "teacher": draw.choice((0.0, 1e-3, 0.1, 1.0)),
        "teacher_h": draw.choice((None, None, 1, 8, 33)),
        "others": {
            "teacher_final_logit_softcapping": draw.choice((None, None, 2.0, 20.0)),
            "teacher_logit_scale": draw.choice((1.0, 1.0, 0.4, -1.0)),
        },
    }


def random_case(seed: int) -> Case:
    """Any loss and head, often with garbage where masked."""
    draw = random.Random(f"grpo_kernels {seed}")
    case = make_case(f"random/{seed}", **case_options(draw))
    if draw.random() < 0.3:
        case = with_garbage(case, draw)
    return case


def with_garbage(case: Case, draw: random.Random) -> Case:
    """NaN, inf and ids out of range at the masked positions of every tensor that has one value per
    token."""
    masked = case.completion_mask == 0
    ids = case.completion_ids.masked_fill(masked, draw.choice((-100, -1, 10**6)))
    changes = {"completion_ids": ids}
    for name in ("kept_ids", "listed_ids"):
        if getattr(case, name) is not None:
            changes[name] = getattr(case, name).masked_fill(masked[..., None], 30_000)
    names = ("hidden", "teacher_hidden", "lora_input", "temperature", "listed_logps", "advantages")
    for name in (*names, "importance_sampling_ratio", *PER_TOKEN):
        tensor = getattr(case, name)
        if tensor is not None and tensor.shape[:2] == masked.shape:
            value = torch.nan if tensor.dtype == torch.float16 else draw.choice(GARBAGE)
            where = masked[..., None] if tensor.dim() == 3 else masked
            changes[name] = tensor.masked_fill(where, value)
    return case.but(**changes)
