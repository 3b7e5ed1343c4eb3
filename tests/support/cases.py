"""Cases: `random_case(seed)` of a loss and `random_scores(seed)` without one.

They have any options, heads, shapes, masks and chunks, and garbage where masked. `fixed_cases()`
are those that chance would not meet: C long and wide, F extremes where counted, G layouts and
dtypes.
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
from tests.support.reference import CLIPPED, DEFAULTS, TERMS

# (loss type, level): GMPO has one level only.
LOSSES = [
    (x, level) for x in TERMS for level in ("token", "sequence")
    if (x, level) != ("gmpo", "sequence")
]  # fmt: skip
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
INPUTS = (*PER_TOKEN, "importance_sampling_ratio")
Options = dict[str, Any]


def loss(loss_type: str, level: str = "token") -> dict[str, str]:
    """The two config fields that name a loss."""
    return {"loss_type": loss_type, "importance_sampling_level": level}


def group_c() -> Iterator[Case]:
    long: Options = {"b": 2, "t": 160, "h": 12, "v": 80, "mask": "ragged", "workspace": 2**13}
    wide: Options = {"b": 2, "t": 6, "h": 20, "workspace": 2**15}
    yield make_case("C/long", beta=0.1, **long)
    yield make_case("C/long/bf16", dtype=torch.bfloat16, **long)
    yield make_case("C/wide", v=5000, dtype=torch.bfloat16, beta=0.1, **wide)
    yield make_case("C/wide/bias", v=700, bias=True, final_logit_softcapping=9.0, **wide)


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
        kind, tag = loss(x, level), f"{x}-{level[0]}"
        if x != "gmpo":
            yield extreme(f"overflow-zero-advantage/{tag}", -300.0, None, **kind)
        yield extreme(f"overflow-clipped/{tag}", -500.0, +1, **kind)
        yield extreme(f"underflow/{tag}", 300.0, -1 if level == "token" else +1, **kind)
    for x in CLIPPED:
        yield extreme(f"overflow-delta/{x}", -300.0, -1, delta=4.0, loss_type=x)
        yield extreme(f"overflow-delta-seq/{x}", -700.0, -1, delta=4.0, **loss(x, "sequence"))
    for x in ("dapo", "grpo"):
        yield extreme(f"overflow-unclipped/{x}", -300.0, -1, loss_type=x)
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


@cache
def fixed_cases() -> tuple[Case, ...]:
    """All fixed cases, in one order, each with a name of its own."""
    return (*group_c(), *group_f(), *group_g())


FROZEN = (("weight", "bias"), ("hidden",), ("bias",), ("weight",))
ADAPTER = ("weight", "lora_a", "lora_b")
FROZEN_BESIDE_AN_ADAPTER = (*FROZEN, ("weight", "lora_a"), ("weight", "lora_input"), ADAPTER)
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -200.0)
MASKED = ("ragged", "holes", "full", "left", "one", "first_empty", "none")


class Draw(random.Random):
    def sometimes(self, p: float, value: Any, other: Any = None) -> Any:
        return value if self.random() < p else other


def loss_options(draw: Draw) -> Options:
    """A loss: type, level, clip range, KL, entropy bonus, masks, ratios."""
    kind = draw.choice(tuple(TERMS))
    options: Options = {
        "loss_type": kind,
        "epsilon": draw.choice((0.0, 0.1, 0.2, 0.4)),
        "epsilon_high": draw.choice((None, 0.28, 1.5)),
        "beta": draw.sometimes(0.5, draw.choice((0.01, 0.2)), 0.0),
        "use_bias_correction_kl": draw.random() < 0.6,
        "kl_estimator": draw.choice(("k1", "k2", "k3", "k3", "full")),
        "top_entropy_quantile": draw.sometimes(0.2, draw.uniform(0.1, 0.9), 1.0),
        "max_completion_length": draw.choice((1, 33, 512)),
        "old": draw.random() < 0.7,
        "noise": draw.choice((0.25, 0.25, 0.6)),
        "zero_adv": draw.random() < 0.25,
        "num_items": draw.sometimes(0.3, draw.choice((0.0, 3.0, 50.5))),
    }
    names = [x for x in DEFAULTS if x.startswith(kind)]
    if names and draw.random() < 0.5:
        options |= {name: draw.uniform(0.4, 2.3) for name in names}
    if kind != "gmpo":
        options |= {
            "importance_sampling_level": draw.choice(("token", "sequence")),
            "adv": draw.sometimes(0.3, "token", "sequence"),
            "ratio": draw.sometimes(0.4, draw.choice(("token", "masked", "sequence", "batch"))),
            "entropy_coef": draw.sometimes(0.3, draw.choice((-0.01, 0.05, 1.0)), 0.0),
            "off_policy_mask_threshold": draw.sometimes(0.2, draw.choice((0.0, 0.1, 0.4))),
            "sampling": draw.random() < 0.3,
        }
    if kind in CLIPPED:
        options["delta"] = draw.sometimes(0.4, draw.choice((1.05, 1.5, 4.0)))
    return options


def head_options(draw: Draw, adapter: float = 0.0) -> Options:
    """A head: bias, soft-cap, scale, temperature, dtypes, spread of the logits, what is frozen;
    with probability `adapter` an adapter."""
    options: Options = {
        "bias": draw.random() < 0.3,
        "final_logit_softcapping": draw.sometimes(0.25, draw.choice((1.0, 5.0, 30.0))),
        "logit_scale": draw.sometimes(0.25, draw.choice((-0.5, 0.3, 2.0)), 1.0),
        "temperature": draw.sometimes(0.4, draw.choice((0.5, 0.9, 1.7)), 1.0),
        "dtype": DTYPES[draw.choice(("f32", "f32", "bf16", "f16", "f64"))],
        "spread": draw.choice((0.3, 2.0, 2.0, 8.0, 20.0)),
        "frozen": draw.sometimes(0.25, draw.choice(FROZEN), ()),
    }
    if draw.random() < adapter:
        options |= {"lora": 3, "lora_input": draw.random() < 0.4}
        options["frozen"] = draw.sometimes(0.5, draw.choice(FROZEN_BESIDE_AN_ADAPTER), ())
        if options["dtype"] != torch.float64:
            options["lora_dtype"] = draw.choice((torch.float32, torch.bfloat16))
    elif options["dtype"].itemsize == 2 and draw.random() < 0.1:
        options["logits_dtype"] = "input"
    return options


def shape_options(draw: Draw, b: tuple[int, ...], t: tuple[int, ...], fixed: Options) -> Options:
    """B, T, H 1-40, V 1-200, unless `fixed`; a mask; rows of a chunk: any, one, five,
    fifty, or too few for one."""
    shape = {"b": draw.choice(b), "t": draw.choice(t), "h": draw.choice((1, 3, 8, 16, 31, 40))}
    shape["v"] = draw.choice((1, 2, 7, 33, 64, 129, 200))
    if draw.random() < 0.8:
        shape = {k: max(x, 2) for k, x in shape.items()}
    shape |= fixed
    mask = draw.choice((*MASKED, "ragged", "holes", "full"))
    sizes = (2**29, 2**29, 1, 4 * shape["v"], 20 * shape["v"], 200 * shape["v"])
    more = {"mask": mask if shape["b"] * shape["t"] else "ragged", "workspace": draw.choice(sizes)}
    return shape | more


def teacher_options(draw: Draw) -> Options:
    """Another head: near the policy's, or of another width."""
    return {
        "teacher": draw.choice((0.0, 1e-3, 0.1, 1.0)),
        "teacher_h": draw.choice((None, None, 1, 8, 33)),
        "others": {
            "teacher_final_logit_softcapping": draw.choice((None, None, 2.0, 20.0)),
            "teacher_logit_scale": draw.choice((1.0, 1.0, 0.4, -1.0)),
        },
    }


def kept_options(draw: Draw, shape: Options, **others: Any) -> Options:
    """Sets of up to 14 ids, of one, or of all of them; maybe positions without one."""
    most = min(draw.choice((1, 9, 14, 14, shape["v"])), shape["v"])
    return {"kept": most, "others": {"on_missing_set": draw.choice(("error", "full")), **others}}


def random_case(seed: int, *, plain: bool = False, **sizes: int) -> Case:
    """A loss on any head; unless `plain` it may have an adapter or kept sets, and garbage where
    masked. `sizes` are b, t, h and v, if not any."""
    draw = Draw(f"grpo_kernels {seed}")
    shape = shape_options(draw, (0, 1, 2, 3, 4, 6), (0, 1, 2, 5, 7, 11, 14), sizes)
    options = shape | loss_options(draw) | head_options(draw, 0.0 if plain else 0.2)
    if not plain and min(shape["b"], shape["t"] - 1) > 0 and draw.random() < 0.1:
        options |= kept_options(draw, shape) | {"kl_estimator": "k3"}
    if options["kl_estimator"] == "full":
        options |= teacher_options(draw)
    case = make_case(f"random/{seed}", **options)
    if draw.random() < 0.05:
        case = case.but(advantages=torch.zeros_like(case.advantages))
    return with_garbage(case, draw) if not plain and draw.random() < 0.3 else case


def with_garbage(case: Case, draw: Draw) -> Case:
    """NaN, inf and ids out of range at the masked positions of every tensor that has one value per
    token."""
    masked = case.completion_mask == 0
    ids = case.completion_ids.masked_fill(masked, draw.choice((-100, -1, 10**6, 2**40)))
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


MEASURES: tuple[Options, ...] = (  # of a teacher's list
    {}, {"log_prob_min_clamp": -4.0, "loss_max_clamp": 0.4}, {"tail": True},
    {"divergence": "reverse_kl"}, {"divergence": "reverse_kl", "loss_max_clamp": 0.5},
)  # fmt: skip


def random_scores(seed: int, **sizes: int) -> Case:
    """Log-probabilities and entropies of any head, of the vocabulary or over kept sets; or its
    divergence from another head or a teacher's list. Often with garbage where masked."""
    draw = Draw(f"scores {seed}")
    kind = draw.choice(("whole", "kept", "listed", "teacher", "teacher"))
    shape = shape_options(draw, (1, 2, 3, 6), (1, 2, 5, 11), sizes)
    if kind in ("kept", "listed"):  # of which the first positions are special
        shape |= {"t": max(shape["t"], 3), "v": max(shape["v"], 33)}
    options = shape | head_options(draw, 0.2) | {"temperatures": draw.random() < 0.2}
    arrives = draw.choice(("same", "same", "any", "some", "none"))
    if kind == "kept":
        options |= kept_options(draw, shape, entropy_of=draw.choice(("the set", "all")))
    if kind == "listed":
        # of a certain policy the tail is what rounding leaves of 1
        options |= {"listed": draw.choice((3, 5)), "spread": draw.choice((0.3, 2.0))}
        options["others"] = {**draw.choice(MEASURES), "arrives": arrives}
    if kind == "teacher":
        beta, more = draw.choice((0.0, 1.0, 1.0, 0.5, 0.1, 0.9)), draw.random() < 0.3
        options |= teacher_options(draw) | {"beta": beta, "arrives": arrives, "more": more}
    make = diverging if kind == "teacher" else scored
    case = make(f"{kind}/{seed}", **options)
    if kind == "kept":
        integer = draw.choice((torch.int64, torch.int32, torch.int16))
        case = case.but(kept_ids=case.kept_ids.to(integer))
    return with_garbage(case, draw) if draw.random() < 0.3 else case
