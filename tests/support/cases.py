"""The fixed cases, by group: `fixed_cases()`. The random ones: `random_case(seed)`.

A random and on-policy, B head and loss options, C shapes and chunk edges, D masks and counts, E
garbage where masked, F extremes where counted, G layouts and dtypes, H the KL term over the
vocabulary, from another head. Beside them `head_cases()`: I heads with an adapter, J kept sets; and
`score_cases()`, without a loss: of the whole vocabulary, kept sets, a teacher's list, another head.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.reference import CLIPPED, TERMS

# (loss type, level): GMPO has one level only.
LOSSES = [
    (x, level) for x in TERMS for level in ("token", "sequence")
    if (x, level) != ("gmpo", "sequence")
]  # fmt: skip
SHORT = {"token": "t", "sequence": "s"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
INPUTS = (*PER_TOKEN, "importance_sampling_ratio")
Options = dict[str, Any]


def loss(loss_type: str, level: str = "token") -> dict[str, str]:
    """The two config fields that name a loss."""
    return {"loss_type": loss_type, "importance_sampling_level": level}


def each_loss(pattern: str, losses: Any = LOSSES, **options: Any) -> Iterator[Case]:
    """A case for each of `losses`, which `pattern` names by {}."""
    for x, level in losses:
        name = pattern.format(f"{x}-{SHORT[level]}")
        yield make_case(name, **loss(x, level) | options)


def group_a() -> Iterator[Case]:
    for (x, level), short in product(LOSSES, ("f32", "bf16")):
        kind = loss(x, level) | {"dtype": DTYPES[short]}
        kind |= {"epsilon_high": 1.2 if x == "cispo" else 0.28}
        name = f"A/{x}-{SHORT[level]}"
        yield make_case(f"{name}/off-policy/{short}", b=5, noise=0.4, **kind)
        yield make_case(f"{name}/on-policy/{short}", old=False, zero_adv=True, **kind)


OF_HEADS: dict[str, Options] = {
    "temperature": {"temperature": 0.7}, "softcap": {"final_logit_softcapping": 3.0},
    "bias": {"bias": True}, "scale": {"logit_scale": 0.25}, "negative-scale": {"logit_scale": -1.5},
    "hot": {"temperature": 1.8, "bias": True},
    "head": {"bias": True, "final_logit_softcapping": 4.0, "logit_scale": 1.7, "temperature": 0.8},
}  # fmt: skip
OF_LOSSES: dict[str, Options] = {
    "delta": {"delta": 1.1, "epsilon_high": 0.3}, "delta-wide": {"delta": 1.6},
    "epsilons": {"epsilon_high": 0.05}, "no-epsilon": {"epsilon": 0.0}, "kl": {"beta": 0.04},
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
    "ratio-token": {"ratio": "token"}, "ratio-masked": {"ratio": "masked"},
    "ratio-sequence": {"ratio": "sequence"}, "ratio-batch": {"ratio": "batch", "beta": 0.1},
    "token-advantages": {"adv": "token"},
    "token-advantages-mask": {"adv": "token", "off_policy_mask_threshold": 0.05},
}  # fmt: skip
EVERYTHING: Options = {
    "beta": 0.05, "entropy_coef": 0.02, "bias": True, "final_logit_softcapping": 6.0,
    "temperature": 0.9, "delta": 1.5, "ratio": "token", "adv": "token",
    "off_policy_mask_threshold": 0.08, "sampling": True,
}  # fmt: skip


def group_b() -> Iterator[Case]:
    """One option at a time for a token-level and a sequence-level loss, then many at once for every
    loss."""
    for (name, options), short in product(OF_HEADS.items(), ("f32", "bf16", "f16")):
        more = {"dtype": DTYPES[short], "beta": 0.05, "entropy_coef": 0.01}
        yield make_case(f"B/{name}/{short}", **more, **options)
    for name, options in OF_LOSSES.items():
        both = ("dapo", "token"), ("grpo", "sequence")
        yield from each_loss(f"B/{name}/{{}}", both, b=4, noise=0.35, **options)
    for x, level in LOSSES:
        more = {"beta": 0.1, "top_entropy_quantile": 0.47} if x == "gmpo" else EVERYTHING
        yield from each_loss("B/everything/{}", [(x, level)], b=4, t=9, **more)
    vespo: Options = {"vespo_k_pos": 1.3, "vespo_lambda_pos": 0.7}
    vespo |= {"vespo_k_neg": 0.4, "vespo_lambda_neg": 2.2, "loss_type": "vespo"}
    for ratio in (None, "token", "masked", "sequence", "batch"):
        yield make_case(f"B/vespo-shape/{ratio}", ratio=ratio, num_items=11.0, **vespo)
    sapo = {"sapo_temperature_pos": 0.6, "sapo_temperature_neg": 2.3}
    yield make_case("B/sapo-shape", loss_type="sapo", **sapo)
    for short in ("bf16", "f16"):
        more = {"dtype": DTYPES[short], "logits_dtype": "input", "beta": 0.1}
        yield make_case(f"B/input-logits/{short}", **more)


SHAPES = (  # B, T, H, V
    (1, 1, 1, 1), (1, 1, 1, 2), (2, 3, 1, 5), (1, 2, 3, 1), (8, 1, 7, 31), (1, 40, 8, 33),
    (5, 13, 33, 127), (3, 6, 70, 600), (2, 9, 64, 513), (4, 5, 17, 255), (4, 5, 17, 256),
    (4, 5, 17, 257), (3, 17, 5, 64), (7, 11, 12, 90), (2, 31, 24, 129),
)  # fmt: skip


def group_c() -> Iterator[Case]:
    """Shapes, empty ones, and rows of the workspace: a budget that no row fits, one, a few, one
    less and one more than all of them."""
    for b, t, h, v in SHAPES:
        for kind in (loss("dapo"), loss("sapo", "sequence")):
            size = {"b": b, "t": t, "h": h, "v": v, "mask": "ragged", "beta": 0.02}
            yield make_case(f"C/{b}x{t}x{h}x{v}/{kind['loss_type']}", **size, **kind)
    for b, t in ((0, 5), (3, 0), (0, 0)):
        yield from each_loss(f"C/{b}x{t}/{{}}", b=b, t=t, beta=0.1, entropy_coef=0.1)
    for rows, x in product((0.01, 1, 2, 5, 27, 28, 29), ("dapo", "luspo", "grpo")):
        level = "sequence" if x == "luspo" else "token"
        size = {"b": 4, "t": 7, "h": 9, "v": 40, "mask": "full", "bias": True}
        more = {"entropy_coef": 0.01, "workspace": round(rows * 160)} | loss(x, level)
        yield make_case(f"C/workspace-{rows}/{x}", **size, **more)
    long: Options = {"b": 2, "t": 160, "h": 12, "v": 80, "mask": "ragged", "workspace": 2**13}
    wide: Options = {"b": 2, "t": 6, "h": 20, "workspace": 2**15}
    yield make_case("C/long", beta=0.1, **long)
    yield make_case("C/long/bf16", dtype=torch.bfloat16, **long)
    yield make_case("C/wide", v=5000, dtype=torch.bfloat16, beta=0.1, **wide)
    yield make_case("C/wide/bias", v=700, bias=True, final_logit_softcapping=9.0, **wide)


def group_d() -> Iterator[Case]:
    for mask in ("full", "holes", "left", "none", "one", "first_empty"):
        for x in ("dapo", "grpo", "luspo", "vespo", "gmpo"):
            kind = loss(x, "sequence" if x == "grpo" else "token")
            yield make_case(f"D/{mask}/{x}", b=4, mask=mask, beta=0.05, **kind)
    for items, x in product((0, 0.25, 1, 7.5, 1e4), ("dapo", "cispo", "vespo", "bnpo")):
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
    full: Options = {"b": 4, "beta": 0.1, "sampling": True, "ratio": "token", "adv": "token"}
    full["off_policy_mask_threshold"] = 0.2
    names = ("hidden", *INPUTS, "advantages")
    for name, value in product(names, (math.nan, math.inf, -math.inf, 1e30)):
        yield poison(make_case(f"E/{name}/{value}", entropy_coef=0.01, **full), name, value)
    for value in (-100, -1, 50, 2**40):
        yield poison(make_case(f"E/ids/{value}", **full), "completion_ids", value)
    for x, level in LOSSES:
        options = {"b": 4, "beta": 0.1} if x == "gmpo" else full
        (case,) = each_loss("E/everything/{}", [(x, level)], mask="first_empty", **options)
        for name in names:
            tensor = getattr(case, name)
            if tensor is not None and (name != "advantages" or tensor.dim() == 2):
                case = poison(case, name, math.nan)
        yield poison(case, "completion_ids", -100)
    top = make_case("E/entropy-mask", top_entropy_quantile=0.41, entropy_coef=0.1)
    yield poison(top, "hidden", math.nan)


def extreme(name: str, by: float, sign: int | None, every: int = 2, **options: Any) -> Case:
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
        if x != "gmpo":
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
    masked = {"sampling": True, "off_policy_mask_threshold": 0.5, "every": 1}
    dropped = extreme("overflow-off-policy-masked", -300.0, -1, **masked)
    yield dropped.but(sampling_per_token_logps=dropped.sampling_per_token_logps + 5.0)


def group_f() -> Iterator[Case]:
    yield from group_f_ratios()
    for name, by in (("below", -300.0), ("above", 30.0), ("overflow", 300.0)):
        for estimator in ("k1", "k2", "k3"):
            case = make_case(f"F/ref-{name}/{estimator}", beta=0.1, kl_estimator=estimator)
            # log-probabilities are not all above 0
            some = torch.arange(case.ref_per_token_logps.shape[1]) % 3 > 0
            yield case.but(ref_per_token_logps=case.ref_per_token_logps + by * some)
    terms = {"entropy_coef": 0.1, "beta": 0.01}
    for spread, short in product((15.0, 40.0, 100.0), ("f32", "bf16")):
        name = f"F/confident-{spread:g}/{short}"
        yield make_case(name, spread=spread, dtype=DTYPES[short], **terms)
    for short in ("f32", "f16", "bf16"):
        large: Options = {"spread": 3e4, "dtype": DTYPES[short], "final_logit_softcapping": 9.0}
        yield make_case(f"F/logits-1e5-capped/{short}", **large)
        tiny = large | {"spread": 5.0, "final_logit_softcapping": 0.3}
        yield make_case(f"F/tiny-cap/{short}", old=False, **tiny)
    yield make_case("F/logits-1e5/f16", spread=3e4, dtype=torch.float16, old=False)
    for temperature in (0.02, 50.0):
        yield make_case(f"F/temperature-{temperature}", temperature=temperature, **terms)
    for scale in (1e-4, 1e4):
        case = make_case(f"F/advantages-{scale:g}", loss_type="cispo", epsilon_high=2.0)
        yield case.but(advantages=case.advantages * scale)
    for short in ("f32", "bf16"):
        name = f"F/banned-lanes/{short}"
        case = make_case(name, bias=True, dtype=DTYPES[short], entropy_coef=0.1)
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


MASKS = torch.tensor([0.25, 3.0, -1.0, 1.0, 1e-6, 2.0, 7.0])


def group_g() -> Iterator[Case]:
    more: Options = {"entropy_coef": 0.02, "ratio": "token", "final_logit_softcapping": 5.0}
    for (x, level), short in product(LOSSES[::2], ("f64", "f16")):
        options = {} if x == "gmpo" else more
        kind = {"dtype": DTYPES[short], "beta": 0.05, "bias": True} | loss(x, level)
        yield make_case(f"G/{short}/{x}", **options, **kind)
    for x, level in (("dapo", "token"), ("grpo", "sequence")):
        base: Options = {"beta": 0.1, "ratio": "token", "sampling": True}
        base |= {"off_policy_mask_threshold": 0.3} | loss(x, level)

        def named(kind: str, base: Options = base, x: str = x, **options: Any) -> Case:
            return make_case(f"G/{kind}/{x}", **base | options)

        def changed(case: Case, how: Any, *names: str) -> Case:
            return case.but(**{name: how(getattr(case, name)) for name in names})

        def flip(tensor: Tensor) -> Tensor:
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)

        of_tokens = ("completion_ids", "completion_mask", *INPUTS)
        yield changed(named("transposed"), flip, "hidden", "weight", *of_tokens)
        case = named("sliced", b=6, t=9, h=20)
        cut = {"hidden": case.hidden[::2, 1:, 2:18], "weight": case.weight[:, 2:18]}
        cut["advantages"] = case.advantages[::2]
        yield changed(case, lambda tensor: tensor[::2, 1:], *of_tokens).but(**cut)
        case = named("expanded").but(advantages=named("expanded").advantages[:1].expand(3))
        yield changed(case, lambda tensor: tensor[:1].expand_as(tensor), "completion_ids", "hidden")
        for kind in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
            case = named(f"mask-{str(kind)[6:]}")
            yield case.but(completion_mask=case.completion_mask.to(kind))
        yield changed(named("mask-values"), lambda mask: mask * MASKS, "completion_mask")
        yield changed(named("int32-ids"), lambda ids: ids.to(torch.int32), "completion_ids")
        case = named("16-bit-inputs", dtype=torch.bfloat16)
        yield changed(case, lambda tensor: tensor.bfloat16(), "advantages", *INPUTS)


def full_kl(name: str, teacher: float = 0.3, **options: Any) -> Case:
    """A case whose KL term is the divergence from another head."""
    return make_case(f"H/{name}", kl_estimator="full", teacher=teacher, **{"beta": 0.3} | options)


OF_TEACHERS: dict[str, Options] = {
    "on-policy": {"old": False, "zero_adv": True}, "entropy": {"entropy_coef": 0.05},
    "on-policy-entropy": {"old": False, "entropy_coef": 0.05},
    "uncorrected": {"use_bias_correction_kl": False},
    "top-entropy": {"top_entropy_quantile": 0.37}, "other-width": {"teacher_h": 33, "bias": True},
    "caps": {
        "final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 2.0},
    },
    "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}, "temperature": 0.7},
    "scales": {"logit_scale": -0.5, "others": {"teacher_logit_scale": 1.3}, "temperature": 1.6},
    "garbage": {"mask": "left"}, "same": {"teacher": 0.0}, "near": {"teacher": 1e-4},
    "far": {"teacher": 3.0, "teacher_h": 8}, "workspace": {"workspace": 3 * 50 * 4, "b": 6},
    "none": {"mask": "none"}, "one": {"mask": "one"},
    "input-logits": {"logits_dtype": "input", "dtype": torch.bfloat16}, "beta-0": {"beta": 0.0},
}  # fmt: skip


def group_h() -> Iterator[Case]:
    for x, level in LOSSES:
        yield full_kl(f"{x}-{SHORT[level]}", b=4, bias=True, **loss(x, level))
    for name, option in OF_TEACHERS.items():
        case = full_kl(name, **{"b": 4} | option)
        yield poison(case, "teacher_hidden", math.nan) if name == "garbage" else case
    for short, kind in DTYPES.items():
        yield full_kl(short, dtype=kind, teacher_h=24, bias=True)


def group_i() -> Iterator[Case]:
    """An adapter: every loss, all of a head, an input of its own, dtypes."""
    for i, (x, level) in enumerate(LOSSES):
        kind = loss(x, level) | {"dtype": DTYPES["f32" if i % 3 else "f64"], "b": 4, "lora": 3}
        frozen = tuple({"weight", "bias"} if i % 2 else ())
        yield make_case(f"I/{x}-{SHORT[level]}", bias=True, frozen=frozen, **kind)
    options: dict[str, Options] = {
        "on-policy": {"old": False, "zero_adv": True}, "sequence": loss("grpo", "sequence"),
        "input": {"lora_input": True},
        "input-frozen": {"lora_input": True, "frozen": ("lora_input", "weight")},
        "hidden-frozen": {"frozen": ("hidden", "weight")},
        "only-b": {"frozen": ("hidden", "weight", "lora_a")},
        "factors-frozen": {"frozen": ("weight", "lora_a", "lora_b")},
        "head": {
            "bias": True, "final_logit_softcapping": 4.0, "logit_scale": -1.7, "temperature": 0.8,
        },
        "entropy": {"entropy_coef": 0.05},
        "full-kl": {"kl_estimator": "full", "teacher": 0.3, "beta": 0.3},
        "workspace": {"workspace": 3 * 50 * 4, "b": 6},
        "garbage": {"lora_input": True, "mask": "left"},
    }  # fmt: skip
    for (name, option), short in product(options.items(), ("f64", "f32")):
        option = {"b": 4, "lora": 3, "dtype": DTYPES[short]} | option
        case = make_case(f"I/{name}/{short}", **option)
        if name == "garbage":
            case = poison(poison(case, "lora_input", math.nan), "hidden", math.nan)
        yield case
    for short, kind in DTYPES.items():
        for adapter in ("f32", "bf16") if short != "f64" else ("f64",):
            dtypes: Options = {"b": 4, "lora": 3, "dtype": kind, "lora_dtype": DTYPES[adapter]}
            yield make_case(f"I/{adapter}-on-{short}/plain", **dtypes)
            own = {"lora_input": True, "frozen": ("weight",)}
            yield make_case(f"I/{adapter}-on-{short}/input", **own, **dtypes)


def group_j() -> Iterator[Case]:
    """Losses over kept sets, with and without positions that have none."""
    head: Options = {"bias": True, "final_logit_softcapping": 4.0, "logit_scale": 1.6}
    head |= {"temperature": 1.3, "b": 4, "kept": 14}
    for (i, (x, level)), without in product(enumerate(LOSSES), ("error", "full")):
        kind: Options = {"dtype": DTYPES["f32" if i % 2 else "f64"]} | loss(x, level)
        kind |= {"others": {"on_missing_set": without}}
        kind |= {} if x == "gmpo" else {"entropy_coef": 0.02}
        yield make_case(f"J/{x}-{SHORT[level]}/{without}", **head, **kind)
    full: Options = {"others": {"on_missing_set": "full"}, "b": 4, "kept": 9}
    yield make_case("J/kl", beta=0.1, **full)
    yield make_case("J/on-policy", old=False, zero_adv=True, **full)
    yield make_case("J/top-entropy", top_entropy_quantile=0.6, entropy_coef=0.02, **full)
    yield make_case("J/lora", lora=3, lora_input=True, dtype=torch.float64, **full)
    yield make_case("J/bf16", dtype=torch.bfloat16, **full)
    yield poison(make_case("J/garbage", **full), "kept_ids", 10**6)


@cache
def head_cases() -> tuple[Case, ...]:
    """Groups I and J, which run on a CPU alone."""
    return (*group_i(), *group_j())


@cache
def fixed_cases() -> tuple[Case, ...]:
    """All fixed cases, in one order, each with a name of its own."""
    groups = (group_a, group_b, group_c, group_d, group_e, group_f, group_g, group_h)
    return tuple(case for group in groups for case in group())


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
        "dtype": DTYPES[draw.choice(("f32", "f32", "bf16", "f16", "f64"))],
        "spread": draw.choice((0.3, 2.0, 2.0, 8.0, 20.0)),
        "frozen": sometimes(0.25, draw.choice(FROZEN), ()),
    }


def case_options(draw: random.Random) -> dict[str, object]:
    """What `make_case` takes: shapes B 0-6, T 0-14, H 1-40, V 1-200, any loss, any head."""
    shape = {"b": draw.choice((0, 1, 2, 3, 4, 6)), "t": draw.choice((0, 1, 2, 5, 7, 11, 14))}
    shape["h"] = draw.choice((1, 3, 8, 16, 31, 40))
    shape["v"] = draw.choice((1, 2, 7, 33, 64, 129, 200))
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


# Scores without a loss

BETAS = (0.0, 1.0, 0.5, 0.1)
HEADS: dict[str, Options] = {
    "plain": {}, "bias": {"bias": True}, "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "cap": {"final_logit_softcapping": 3.0}, "negative scale": {"logit_scale": -0.8, "bias": True},
    "all": {"temperature": 1.3, "final_logit_softcapping": 4.0, "logit_scale": 1.6, "bias": True},
    "temperatures": {"temperatures": True, "final_logit_softcapping": 6.0}, "lora": {"lora": 3},
    "lora, input": {
        "lora": 3, "lora_input": True, "frozen": ("weight",), "temperatures": True,
        "logit_scale": 1.6,
    },
}  # fmt: skip


def scored(name: str, **options: Any) -> Case:
    """A case that is never made a loss of: nothing old, nothing of a reference."""
    return make_case(name, **{"old": False} | options)


def whole() -> Iterator[Case]:
    """Log-probabilities and entropies of the whole vocabulary."""
    for i, (name, options) in enumerate(HEADS.items()):
        for short in ("f64", ("f32", "bf16", "f16")[i % 3]):
            yield scored(f"scores/{name}/{short}", dtype=DTYPES[short], **options)


def kept() -> Iterator[Case]:
    """Over kept sets: every head in every dtype, in turn with positions without a set and the whole
    entropy."""
    for (i, (name, head)), (j, short) in product(enumerate(HEADS.items()), enumerate(DTYPES)):
        others = {"on_missing_set": ("error", "full")[(i + j) % 2]}
        others["entropy_of"] = ("the set", "all")[(i + j) // 2 % 2]
        options: Options = {"workspace": (2**29, 2_000, 1)[(i + j) % 3], "dtype": DTYPES[short]}
        options["frozen"] = (("hidden",), (), ("weight",), ("bias",))[(i + 2 * j) % 4]
        case = scored(f"kept/{name}/{short}", kept=14, t=9, others=others, **options | head)
        kind = (torch.int64, torch.int32, torch.int16)[(i + j) % 3]
        yield case.but(kept_ids=case.kept_ids.to(kind))
    rounded: Options = {"dtype": torch.bfloat16, "logits_dtype": "input", "temperature": 0.7}
    yield scored("kept/input-logits", kept=14, **rounded)
    yield scored("kept/whole vocabulary", kept=50, bias=True)
    yield scored("kept/one id", kept=1)


def listed() -> Iterator[Case]:
    """From a teacher's list."""
    measures: dict[str, Options] = {
        "forward": {}, "clamped": {"log_prob_min_clamp": -4.0, "loss_max_clamp": 0.4},
        "tail": {"tail": True}, "reverse": {"divergence": "reverse_kl"},
        "reverse, clamped": {"divergence": "reverse_kl", "loss_max_clamp": 0.5},
    }  # fmt: skip
    arrives = ("any", "same", "some", "any", "none")
    for i, (name, measure) in enumerate(measures.items()):
        for j, (of_head, head) in enumerate([*HEADS.items()][i % 2 :: 2]):
            options: Options = {"t": 13, "listed": 5, "workspace": (2**29, 2_000)[j % 2]}
            options["mask"] = ("holes", "full")[j // 2 % 2]
            options["others"] = {**measure, "arrives": arrives[(i + j) % 5]}
            options |= head
            if of_head == "plain":
                options |= {"frozen": ("weight", "bias"), "bias": True}
            for short in ("f64", "f32"):
                yield scored(f"listed/{name}/{of_head}/{short}", dtype=DTYPES[short], **options)
    yield scored("listed/all are listed", listed=50, others={"divergence": "reverse_kl"})


def diverging(
    name: str, *, beta: float = 1.0, arrives: str = "same", more: bool = False, **options: Any
) -> Case:
    """A divergence from another head, and what arrives: the same for all, "any", "some" or "none"
    of it.

    With `more` something arrives at the entropies and log-probabilities, too.
    """
    others = {"beta_of_divergence": beta, "arrives": arrives, "more": more}
    others |= options.pop("others", {})
    return scored(name, others=others, **{"teacher": 0.3} | options)


TEACHERS: dict[str, Options] = {
    "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}},
    "caps": {
        "final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 1.0},
        "bias": True,
    },
    "scales": {"logit_scale": -0.7, "others": {"teacher_logit_scale": 1.4}},
    "other-width": {"teacher_h": 33}, "narrow": {"teacher_h": 1, "bias": True},
    "same": {"teacher": 0.0}, "near": {"teacher": 1e-4}, "far": {"teacher": 4.0, "teacher_h": 8},
    "confident": {"spread": 20.0}, "wide": {"v": 300, "b": 2}, "one-row": {"b": 1, "t": 1},
    "two-ids": {"v": 2}, "none": {"mask": "none"}, "full": {"mask": "full"},
    "workspace": {"workspace": 3 * 50 * 4, "b": 6},
    "frozen": {"frozen": ("weight", "bias"), "bias": True},
    "frozen-any": {"frozen": ("weight",), "arrives": "any"}, "only-head": {"frozen": ("hidden",)},
    "any": {"arrives": "any"}, "some": {"arrives": "some"},
    "more": {"more": True, "arrives": "any"},
}  # fmt: skip


def from_teacher() -> Iterator[Case]:
    """From another head."""
    for i, (name, options) in enumerate((HEADS | TEACHERS).items()):
        for beta in BETAS[i % 2 :: 2]:
            yield diverging(f"teacher/{name}/{beta}", beta=beta, **options)
    wide: Options = {"teacher_h": 24, "bias": True, "arrives": "any"}
    for beta, (short, dtype) in product(BETAS, DTYPES.items()):
        yield diverging(f"teacher/{short}/{beta}", beta=beta, dtype=dtype, **wide)


@cache
def score_cases() -> tuple[Case, ...]:
    """All of them, each with a name of its own; every second with garbage where the mask is 0."""
    cases = [case for group in (whole, kept, listed, from_teacher) for case in group()]
    return tuple(
        with_garbage(case, random.Random(case.name)) if i % 2 else case
        for i, case in enumerate(cases)
    )


def random_divergence_case(seed: int) -> Case:
    """Any head, teacher and divergence, often with garbage where masked."""
    draw = random.Random(f"divergence {seed}")
    options: Options = {"b": draw.choice((1, 2, 3, 6)), "t": draw.choice((1, 2, 5, 11))}
    options |= {"h": draw.choice((1, 3, 16, 31)), "v": draw.choice((2, 7, 33, 64, 129, 200))}
    options["beta"] = draw.choice((0.0, 1.0, 1.0, 0.5, 0.1, 0.9))
    options["arrives"] = draw.choice(("same", "same", "any", "some", "none"))
    options["more"] = draw.random() < 0.3
    options["mask"] = draw.choice(("ragged", "holes", "full", "left", "one", "none"))
    options["workspace"] = draw.choice((2**29, 4 * options["v"], 50 * options["v"]))
    options |= head_options(draw) | teacher_options(draw)
    case = diverging(f"divergence/{seed}", **options)
    return with_garbage(case, draw) if draw.random() < 0.3 else case
