"""The fixed cases, by group: `fixed_cases()`. The random ones: `random_case(seed)`.

A random and on-policy, B head and loss options, C shapes and chunk edges, D masks and counts, E
garbage where masked, F extremes where counted, G layouts and dtypes, H the KL term over the
vocabulary, from another head. Large vocabularies: `wide_cases()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.random_cases import random_case
from tests.support.reference_terms import CLIPPED, TERMS

__all__ = ["LOSSES", "Case", "fixed_cases", "random_case", "wide_cases"]

# (loss type, level): GMPO has one level only.
LOSSES = [
    (x, level)
    for x in TERMS
    for level in ("token", "sequence")
    if (x, level) != ("gmpo", "sequence")
]
SHORT = {"token": "t", "sequence": "s"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def loss(loss_type: str, level: str = "token") -> dict[str, str]:
    """The two config fields that name a loss."""
    return {"loss_type": loss_type, "importance_sampling_level": level}


def group_a() -> Iterator[Case]:
    for x, level in LOSSES:
        for short in ("f32", "bf16"):
            kind = loss(x, level) | {"dtype": DTYPES[short]}
            cap = {"epsilon_high": 1.2} if x == "cispo" else {"epsilon_high": 0.28}
            yield make_case(
                f"A/{x}-{SHORT[level]}/off-policy/{short}", b=5, noise=0.4, **kind, **cap
            )
            yield make_case(
                f"A/{x}-{SHORT[level]}/on-policy/{short}", old=False, zero_adv=True, **kind, **cap
            )


def group_b() -> Iterator[Case]:
    """One option at a time for a token-level and a sequence-level loss, then many at once for every
    loss."""
    heads = {
        "temperature": {"temperature": 0.7}, "softcap": {"final_logit_softcapping": 3.0},
        "bias": {"bias": True},
        "scale": {"logit_scale": 0.25}, "negative-scale": {"logit_scale": -1.5},
        "hot": {"temperature": 1.8, "bias": True},
        "head": {
            "bias": True, "final_logit_softcapping": 4.0, "logit_scale": 1.7, "temperature": 0.8,
        },
    }  # fmt: skip
    for name, options in heads.items():
        for short in ("f32", "bf16", "f16"):
            yield make_case(
                f"B/{name}/{short}", dtype=DTYPES[short], beta=0.05, entropy_coef=0.01, **options
            )
    options = {
        "delta": {"delta": 1.1, "epsilon_high": 0.3}, "delta-wide": {"delta": 1.6},
        "epsilons": {"epsilon_high": 0.05},
        "no-epsilon": {"epsilon": 0.0}, "kl": {"beta": 0.04},
        "kl-uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
        "k1": {"beta": 0.1, "kl_estimator": "k1"}, "k2": {"beta": 0.1, "kl_estimator": "k2"},
        "k1-uncorrected": {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
        "k2-uncorrected": {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False},
        "kl-on-policy": {"beta": 0.1, "old": False}, "entropy": {"entropy_coef": 0.05},
        "malus": {"entropy_coef": -0.02},
        "entropy-on-policy": {"entropy_coef": 0.05, "old": False, "zero_adv": True},
        "top-entropy": {"top_entropy_quantile": 0.37},
        "off-policy-mask": {"off_policy_mask_threshold": 0.03},
        "top-entropy-bonus": {"top_entropy_quantile": 0.53, "entropy_coef": 0.1},
        "sampling-mask": {"off_policy_mask_threshold": 0.05, "sampling": True},
        "ratio-token": {"ratio": "token"},
        "ratio-masked": {"ratio": "masked"}, "ratio-sequence": {"ratio": "sequence"},
        "ratio-batch": {"ratio": "batch", "beta": 0.1}, "token-advantages": {"adv": "token"},
        "token-advantages-mask": {"adv": "token", "off_policy_mask_threshold": 0.05},
    }  # fmt: skip
    for name, option in options.items():
        for x, level in (("dapo", "token"), ("grpo", "sequence")):
            yield make_case(
                f"B/{name}/{x}-{SHORT[level]}", b=4, noise=0.35, **loss(x, level), **option
            )
    everything = {
        "beta": 0.05, "entropy_coef": 0.02, "bias": True, "final_logit_softcapping": 6.0,
        "temperature": 0.9,
        "delta": 1.5,
    }  # fmt: skip
    coupled = {
        "ratio": "token",
        "adv": "token",
        "off_policy_mask_threshold": 0.08,
        "sampling": True,
    }
    for x, level in LOSSES:
        extra = {"beta": 0.1, "top_entropy_quantile": 0.47} if x == "gmpo" else everything | coupled
        yield make_case(f"B/everything/{x}-{SHORT[level]}", b=4, t=9, **loss(x, level), **extra)
    vespo = {
        "vespo_k_pos": 1.3,
        "vespo_lambda_pos": 0.7,
        "vespo_k_neg": 0.4,
        "vespo_lambda_neg": 2.2,
    }
    for ratio in (None, "token", "masked", "sequence", "batch"):
        yield make_case(
            f"B/vespo-shape/{ratio}", loss_type="vespo", ratio=ratio, num_items=11.0, **vespo
        )
    yield make_case(
        "B/sapo-shape", loss_type="sapo", sapo_temperature_pos=0.6, sapo_temperature_neg=2.3
    )
    for short in ("bf16", "f16"):
        yield make_case(
            f"B/input-logits/{short}", dtype=DTYPES[short], logits_dtype="input", beta=0.1
        )


def group_c() -> Iterator[Case]:
    shapes = [
        (1, 1, 1, 1), (1, 1, 1, 2), (2, 3, 1, 5), (1, 2, 3, 1), (8, 1, 7, 31), (1, 40, 8, 33),
        (5, 13, 33, 127),
        (3, 6, 70, 600), (2, 9, 64, 513), (4, 5, 17, 255), (4, 5, 17, 256), (4, 5, 17, 257),
        (3, 17, 5, 64),
        (7, 11, 12, 90), (2, 31, 24, 129),
    ]  # fmt: skip
    for b, t, h, v in shapes:
        for x, level in (("dapo", "token"), ("sapo", "sequence")):
            yield make_case(
                f"C/{b}x{t}x{h}x{v}/{x}",
                b=b,
                t=t,
                h=h,
                v=v,
                mask="ragged",
                beta=0.02,
                **loss(x, level),
            )
    for b, t in ((0, 5), (3, 0), (0, 0)):
        for x, level in (
            ("dapo", "token"),
            ("luspo", "sequence"),
            ("vespo", "token"),
            ("gmpo", "token"),
        ):
            yield make_case(f"C/{b}x{t}/{x}", b=b, t=t, beta=0.1, **loss(x, level))
    # Rows of the workspace: a budget that no row fits, one, a few, one less and one more than all
    # of them.
    for rows in (0.01, 1, 2, 5, 27, 28, 29):
        for x, level in (("dapo", "token"), ("luspo", "sequence"), ("grpo", "token")):
            size = {
                "b": 4,
                "t": 7,
                "h": 9,
                "v": 40,
                "mask": "full",
                "workspace": round(rows * 40 * 4),
            }
            yield make_case(f"C/workspace-{rows}/{x}", entropy_coef=0.01, **size, **loss(x, level))
    yield make_case("C/long", b=2, t=160, h=12, v=80, mask="ragged", workspace=2**13, beta=0.1)
    yield make_case(
        "C/long/bf16", b=2, t=160, h=12, v=80, dtype=torch.bfloat16, mask="ragged", workspace=2**13
    )
    yield make_case(
        "C/wide", b=2, t=6, h=20, v=5000, dtype=torch.bfloat16, workspace=2**15, beta=0.1
    )
    yield make_case(
        "C/wide/bias",
        b=2,
        t=6,
        h=20,
        v=700,
        bias=True,
        workspace=2**15,
        final_logit_softcapping=9.0,
    )


def group_d() -> Iterator[Case]:
    for mask in ("full", "holes", "left", "none", "one", "first_empty"):
        for x, level in (
            ("dapo", "token"),
            ("grpo", "sequence"),
            ("luspo", "token"),
            ("vespo", "token"),
            ("gmpo", "token"),
        ):
            yield make_case(f"D/{mask}/{x}", b=4, mask=mask, beta=0.05, **loss(x, level))
    for items in (0, 0.25, 1, 7.5, 1e4):
        for x in ("dapo", "cispo", "vespo", "bnpo"):
            yield make_case(f"D/items-{items}/{x}", num_items=items, loss_type=x)
    yield make_case("D/items-tensor").but(num_items_in_batch=torch.tensor(13))
    yield make_case("D/max-length", loss_type="dr_grpo", max_completion_length=9)
    for x in ("dapo", "grpo"):
        case = make_case(f"D/all-zero-advantages/{x}", loss_type=x)
        yield case.but(advantages=torch.zeros(3))


def poison(case: Case, name: str, value: float | int) -> Case:
    """`value` in every masked position of one tensor."""
    tensor = getattr(case, name).clone()
    tensor[case.completion_mask == 0] = value
    return case.but(**{name: tensor})


def group_e() -> Iterator[Case]:
    full = {
        "b": 4,
        "beta": 0.1,
        "sampling": True,
        "ratio": "token",
        "adv": "token",
        "off_policy_mask_threshold": 0.2,
    }
    names = ("hidden", *PER_TOKEN, "importance_sampling_ratio", "advantages")
    for name in names:
        for value in (math.nan, math.inf, -math.inf, 1e30):
            yield poison(make_case(f"E/{name}/{value}", entropy_coef=0.01, **full), name, value)
    for value in (-100, -1, 50, 2**40):
        yield poison(make_case(f"E/ids/{value}", **full), "completion_ids", value)
    for x, level in LOSSES:
        options = {"b": 4, "beta": 0.1} if x == "gmpo" else full
        case = make_case(
            f"E/everything/{x}-{SHORT[level]}", mask="first_empty", **options, **loss(x, level)
        )
        for name in names:
            tensor = getattr(case, name)
            if tensor is not None and (name != "advantages" or tensor.dim() == 2):
                case = poison(case, name, math.nan)
        yield poison(case, "completion_ids", -100)
    yield poison(
        make_case("E/entropy-mask", top_entropy_quantile=0.41, entropy_coef=0.1), "hidden", math.nan
    )


def extreme(name: str, by: float, sign: int | None, every: int = 2, **options) -> Case:
    """Old logps moved by `by` at every second counted token; advantages all positive, all negative,
    or 0 there."""
    case = make_case(f"F/{name}", b=4, mask="full", noise=0.1, shift=0.05, **options)
    old = case.old_per_token_logps.clone()
    hit = (torch.arange(old.shape[1]) % every == 0).expand_as(old)
    adv = case.advantages.abs() + 0.1
    adv = adv * sign if sign is not None else torch.zeros_like(adv)
    return case.but(old_per_token_logps=torch.where(hit, old + by, old), advantages=adv)


def group_f_ratios() -> Iterator[Case]:
    for x, level in LOSSES:
        kind, tag = loss(x, level), f"{x}-{SHORT[level]}"
        if x not in ("gmpo",):
            yield extreme(f"overflow-zero-advantage/{tag}", -300.0, None, **kind)
        yield extreme(f"overflow-clipped/{tag}", -700.0, +1, **kind)
        yield extreme(f"underflow/{tag}", 300.0, -1 if level == "token" else +1, **kind)
    for x in CLIPPED:
        yield extreme(f"overflow-delta/{x}", -300.0, -1, delta=4.0, loss_type=x)
        yield extreme(f"overflow-delta-seq/{x}", -700.0, -1, delta=4.0, **loss(x, "sequence"))
    for x in ("dapo", "grpo"):
        yield extreme(f"overflow-unclipped/{x}", -300.0, -1, loss_type=x)
    yield extreme("old-minus-inf", -math.inf, +1)
    yield extreme("old-plus-inf", math.inf, -1)
    yield extreme("large-ratio", -60.0, -1, delta=None)
    dropped = extreme(
        "overflow-off-policy-masked",
        -300.0,
        -1,
        sampling=True,
        off_policy_mask_threshold=0.5,
        every=1,
    )
    yield dropped.but(sampling_per_token_logps=dropped.sampling_per_token_logps + 5.0)


def group_f() -> Iterator[Case]:
    yield from group_f_ratios()
    for name, by in (("below", -300.0), ("above", 30.0), ("overflow", 300.0)):
        for estimator in ("k1", "k2", "k3"):
            case = make_case(f"F/ref-{name}/{estimator}", beta=0.1, kl_estimator=estimator)
            # log-probabilities are not all above 0
            some = torch.arange(case.ref_per_token_logps.shape[1]) % 3 > 0
            yield case.but(ref_per_token_logps=case.ref_per_token_logps + by * some)
    for spread in (15.0, 40.0, 100.0):
        for short in ("f32", "bf16"):
            yield make_case(
                f"F/confident-{spread:g}/{short}",
                spread=spread,
                dtype=DTYPES[short],
                entropy_coef=0.1,
                beta=0.01,
            )
    for short in ("f32", "f16", "bf16"):
        yield make_case(
            f"F/logits-1e5-capped/{short}",
            spread=3e4,
            dtype=DTYPES[short],
            final_logit_softcapping=9.0,
        )
        yield make_case(
            f"F/tiny-cap/{short}",
            spread=5.0,
            dtype=DTYPES[short],
            final_logit_softcapping=0.3,
            old=False,
        )
    yield make_case("F/logits-1e5/f16", spread=3e4, dtype=torch.float16, old=False)
    for temperature in (0.02, 50.0):
        yield make_case(
            f"F/temperature-{temperature}", temperature=temperature, entropy_coef=0.1, beta=0.01
        )
    for scale in (1e-4, 1e4):
        case = make_case(f"F/advantages-{scale:g}", loss_type="cispo", epsilon_high=2.0)
        yield case.but(advantages=case.advantages * scale)
    for short in ("f32", "bf16"):
        case = make_case(
            f"F/banned-lanes/{short}", bias=True, dtype=DTYPES[short], entropy_coef=0.1
        )
        lanes = ~torch.isin(torch.arange(50), case.completion_ids)
        yield case.but(bias=case.bias.masked_fill(lanes & (torch.arange(50) % 3 == 0), -math.inf))
    for x in ("dapo", "grpo"):
        case = make_case(f"F/uniform/{x}", loss_type=x, beta=0.1, entropy_coef=0.1)
        yield case.but(weight=torch.zeros_like(case.weight), old_per_token_logps=None)
        case = make_case(f"F/nan-counted/{x}", loss_type=x, mask="full")
        hidden = case.hidden.clone()
        hidden[1, 2, 3] = math.nan
        yield case.but(hidden=hidden)
    options = {"sampling": True, "off_policy_mask_threshold": 0.05, "b": 5}
    for level in ("token", "sequence"):
        case = make_case(f"F/sampling-nan/{level}", **options, **loss("grpo", level))
        sampling = case.sampling_per_token_logps.clone()
        sampling[::2, ::2] = math.nan
        yield case.but(sampling_per_token_logps=sampling)


def group_g() -> Iterator[Case]:
    for x, level in LOSSES[::2]:
        for short in ("f64", "f16"):
            options = (
                {}
                if x == "gmpo"
                else {"entropy_coef": 0.02, "ratio": "token", "final_logit_softcapping": 5.0}
            )
            yield make_case(
                f"G/{short}/{x}",
                dtype=DTYPES[short],
                beta=0.05,
                bias=True,
                **options,
                **loss(x, level),
            )
    for x, level in (("dapo", "token"), ("grpo", "sequence")):
        base = {
            "beta": 0.1,
            "ratio": "token",
            "sampling": True,
            "off_policy_mask_threshold": 0.3,
        } | loss(x, level)
        case = make_case(f"G/transposed/{x}", **base)
        flip = lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
        names = (
            "hidden",
            "weight",
            "completion_ids",
            "completion_mask",
            "importance_sampling_ratio",
            *PER_TOKEN,
        )
        yield case.but(**{name: flip(getattr(case, name)) for name in names})
        case = make_case(f"G/sliced/{x}", b=6, t=9, h=20, **base)
        cut = {
            "hidden": case.hidden[::2, 1:, 2:18],
            "weight": case.weight[:, 2:18],
            "advantages": case.advantages[::2],
        }
        names = ("completion_ids", "completion_mask", "importance_sampling_ratio", *PER_TOKEN)
        yield case.but(**cut, **{name: getattr(case, name)[::2, 1:] for name in names})
        case = make_case(f"G/expanded/{x}", **base)
        cut = {
            "advantages": case.advantages[:1].expand(3),
            "completion_ids": case.completion_ids[:1].expand(3, -1),
        }
        yield case.but(hidden=case.hidden[:1].expand(3, -1, -1), **cut)
        for kind in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
            case = make_case(f"G/mask-{str(kind)[6:]}/{x}", **base)
            yield case.but(completion_mask=case.completion_mask.to(kind))
        case = make_case(f"G/mask-values/{x}", **base)
        yield case.but(
            completion_mask=case.completion_mask
            * torch.tensor([0.25, 3.0, -1.0, 1.0, 1e-6, 2.0, 7.0])
        )
        case = make_case(f"G/int32-ids/{x}", **base)
        yield case.but(completion_ids=case.completion_ids.to(torch.int32))
        case = make_case(f"G/16-bit-inputs/{x}", dtype=torch.bfloat16, **base)
        yield case.but(
            **{
                k: getattr(case, k).bfloat16()
                for k in ("advantages", "importance_sampling_ratio", *PER_TOKEN)
            }
        )


def full_kl(name: str, teacher: float = 0.3, **options) -> Case:
    """A case whose KL term is the divergence from another head."""
    return make_case(f"H/{name}", kl_estimator="full", teacher=teacher, **{"beta": 0.3} | options)


def group_h() -> Iterator[Case]:
    for x, level in LOSSES:
        yield full_kl(f"{x}-{SHORT[level]}", b=4, bias=True, **loss(x, level))
    options = {
        "on-policy": {"old": False, "zero_adv": True}, "entropy": {"entropy_coef": 0.05},
        "on-policy-entropy": {"old": False, "entropy_coef": 0.05},
        "uncorrected": {"use_bias_correction_kl": False},
        "top-entropy": {"top_entropy_quantile": 0.37},
        "other-width": {"teacher_h": 33, "bias": True},
        "caps": {
            "final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 2.0},
        },
        "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}, "temperature": 0.7},
        "scales": {"logit_scale": -0.5, "others": {"teacher_logit_scale": 1.3}, "temperature": 1.6},
        "garbage": {"mask": "left"},
        "same": {"teacher": 0.0}, "near": {"teacher": 1e-4},
        "far": {"teacher": 3.0, "teacher_h": 8},
        "workspace": {"workspace": 3 * 50 * 4, "b": 6}, "none": {"mask": "none"},
        "one": {"mask": "one"},
        "input-logits": {"logits_dtype": "input", "dtype": torch.bfloat16}, "beta-0": {"beta": 0.0},
    }  # fmt: skip
    for name, option in options.items():
        case = full_kl(f"{name}", **{"b": 4} | option)
        yield poison(case, "teacher_hidden", math.nan) if name == "garbage" else case
    for short, kind in DTYPES.items():
        yield full_kl(f"{short}", dtype=kind, teacher_h=24, bias=True)


def wide_cases() -> tuple[Case, ...]:
    """A dozen with vocabularies of several steps of a kernel's tile, for a GPU: in the interpreter
    they take long."""
    kinds: dict[str, dict[str, Any]] = {
        "on-policy": {"old": False, "zero_adv": True, "dtype": torch.bfloat16},
        "everything": {
            "beta": 0.05, "entropy_coef": 0.02, "bias": True, "final_logit_softcapping": 6.0,
            "temperature": 0.9,
        },
        "frozen": {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "dtype": torch.float16,
            "frozen": ("weight",),
        },
    }  # fmt: skip
    shape = {"b": 2, "t": 5, "mask": "ragged"}
    return tuple(
        case
        for v in (9001, 8192, 4096)
        for case in (
            *(make_case(f"wide/{v}/{name}", v=v, **shape, **kind) for name, kind in kinds.items()),
            full_kl(f"wide/{v}/full-kl", v=v, **shape),
        )
    )


@cache
def fixed_cases() -> tuple[Case, ...]:
    """All fixed cases, in one order, each with a name of its own."""
    groups = (group_a, group_b, group_c, group_d, group_e, group_f, group_g, group_h)
    return tuple(case for group in groups for case in group())
