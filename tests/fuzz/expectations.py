"""`linear_logprob` that expects anything: its gradient has to be that of what came, in float64 from
full logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import Expectation, linear_logprob
from tests.fuzz.draws import Options
from tests.support.case_builder import Case, make_case, seeded
from tests.support.flat import flat
from tests.support.reference import head, on_grid


def some(x: Tensor, g: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=g) < 0.3


# How what is expected comes to be wrong, from what will come; each takes the generator too.
HOSTILE: dict[str, Any] = {
    "right": lambda x, g: x,
    "scaled": lambda x, g: x * -0.37,
    "all NaN": lambda x, g: x * math.nan,
    "some NaN": lambda x, g: x.masked_fill(some(x, g), math.nan),
    "some inf": lambda x, g: x.masked_fill(some(x, g), math.inf),
    "one -inf": lambda x, g: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 1, -math.inf),
    "zeros": lambda x, g: x * 0,
    "-0.0": lambda x, g: x * -0.0,
    "some zeros": lambda x, g: x.masked_fill(torch.rand(x.shape, generator=g) < 0.5, 0.0),
    "some rows wrong": lambda x, g: torch.where(some(x, g), -2 * x + 0.3, x),
    "some rows huge": lambda x, g: torch.where(some(x, g), 1e37, x),
    "random": lambda x, g: torch.randn(x.shape, generator=g),
    "subnormal": lambda x, g: x * 1e-41,
    "tiny": lambda x, g: x * 1e-30,
    "huge": lambda x, g: x * 1e30,
    "largest": lambda x, g: x.sign() * torch.finfo(torch.float32).max,
    "of integers": lambda x, g: (4 * x).long(),
    "in bfloat16": lambda x, g: x.bfloat16(),
    "in float64": lambda x, g: x.double() * 7,
}
SENT: dict[str, Any] = {
    "normal": lambda x, g: x,
    "some zeros": HOSTILE["some zeros"],
    "zeros": HOSTILE["zeros"],
    "tiny": lambda x, g: x * 1e-12,
    "large": lambda x, g: x * 1e6,
}
FORMS = (
    "tensor", "pair", "pair with None", "function", "function of pairs", "expectation", "live",
    "no coefficients",
)  # fmt: skip
OF_HEAD = ("temperature", "logit_scale", "final_logit_softcapping")


def draw(random_: Any) -> Options:
    sometimes = lambda p, value: value if random_.random() < p else None  # noqa: E731
    options: Options = {
        "name": f"expected/{random_.getrandbits(40)}",
        "n": random_.choice((1, 2, 5, 17, 40)),
        "h": random_.choice((1, 3, 8, 16)),
        "v": random_.choice((1, 2, 7, 33, 130)),
        "mask": sometimes(0.5, random_.choice(("ragged", "holes", "left", "one", "none"))),
        "a": random_.choice([*HOSTILE]),
        "b": sometimes(0.5, random_.choice([*HOSTILE])),
        "form": random_.choice(FORMS),
        "sent": random_.choice([*SENT]),
        "sent_entropy": sometimes(0.4, random_.choice([*SENT])),
        "no_entropy": sometimes(0.2, True),
        "backend": random_.choice(("torch", "cpp")),
        "one_pass": sometimes(0.5, True),
        "frozen": sometimes(0.3, random_.choice((("weight", "bias"), ("hidden",)))),
        "bias": sometimes(0.3, True),
        "dtype": sometimes(0.3, torch.float64),
        "temperature": sometimes(0.3, 0.7),
        "logit_scale": sometimes(0.2, -0.5),
        "final_logit_softcapping": sometimes(0.2, 3.0),
        "workspace": sometimes(0.4, 4 * 33 * 5),
    }
    return {name: x for name, x in options.items() if x is not None}


def build(options: Options) -> Case:
    """A case of one sequence of n tokens; the loss in it plays no part."""
    names = ("bias", "dtype", "workspace", "frozen", "mask", *OF_HEAD)
    given = {name: options[name] for name in names if name in options}
    shape = {"b": 1, "t": options.get("n", 5), "h": options.get("h", 3), "v": options.get("v", 7)}
    return make_case(options.get("name", "expected"), **{"mask": "full", **given, **shape})


def expectation(options: Options, g: Tensor, h: Tensor, random_: torch.Generator) -> Any:
    """What `linear_logprob` is told to expect where g and h will come."""
    a, b = HOSTILE[options.get("a", "right")](g, random_), None
    if "b" in options and "no_entropy" not in options:
        b = HOSTILE[options["b"]](h, random_)
    form = options.get("form", "tensor")
    if form.startswith("pair"):
        return a, b if form == "pair" else None
    rows = lambda index, logps, entropies: a.flatten()[index]  # noqa: E731

    def pairs(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Any:
        return a.flatten()[index], None if b is None else b.flatten()[index]

    live = torch.rand(g.shape, generator=random_) < 0.5
    return {
        "tensor": a,
        "function": rows,
        "function of pairs": pairs,
        "expectation": Expectation(pairs, has_entropy_gradient=False),
        "live": Expectation(pairs, live=live),
        "no coefficients": Expectation(None, live=live),
    }[form]


def check(options: Options) -> None:
    """Values and gradients. Wrong ones of the first product's rows show in every gradient."""
    case = build(options)
    random_ = seeded(case.name + "/sent")
    g, h = torch.randn(2, *case.completion_ids.shape, generator=random_)
    g = SENT[options.get("sent", "normal")](g, random_)
    asks_entropy = "no_entropy" not in options
    sends_entropy = "sent_entropy" in options and asks_entropy
    h = SENT[options["sent_entropy"]](h, random_) if sends_entropy else h * 0
    leaves = {
        name: None if x is None else x.detach().requires_grad_(name not in case.frozen)
        for name, x in (("hidden", case.hidden), ("weight", case.weight), ("bias", case.bias))
    }
    config = {k: case.config[k] for k in OF_HEAD if k in case.config}
    expected = expectation(options, g, h, random_)
    one_pass = "one_pass" in options and options.get("form") != "no coefficients"
    scores = flat(linear_logprob)(
        leaves["hidden"], leaves["weight"], case.completion_ids, bias=leaves["bias"],
        completion_mask=case.completion_mask, entropy=asks_entropy, expected=expected,
        engine="one_pass" if one_pass else "auto", backend=options.get("backend", "auto"),
        workspace_bytes=case.workspace_bytes, **config,
    )  # fmt: skip
    total = (scores.logps * g).sum()
    total = total + ((scores.entropies * h).sum() if sends_entropy else 0.0)
    if total.requires_grad:
        total.backward()
    compare(case, leaves, scores.logps, g.double(), h.double())


def compare(
    case: Case, leaves: dict[str, Tensor | None], logps: Tensor, g: Tensor, h: Tensor
) -> None:
    """Each entry within some roundings of the absolute values that it is the sum of.

    What was stored for an expectation may be 8 times what came, in every row: its rounding stays.
    """
    want = head(case)
    counted, unit = want.counted, 1e-10 if case.hidden.dtype == torch.float64 else 1e-4
    exact = (on_grid(want.logps, counted) * g).sum() + (on_grid(want.entropies, counted) * h).sum()
    bases = {"hidden": want.hidden, "weight": want.weight, "bias": want.bias}
    p, a, b = want.log_probs.detach().exp(), g[counted][:, None].abs(), h[counted][:, None].abs()
    away = want.log_probs.detach().abs() + want.entropies.detach()[:, None]
    hot = torch.nn.functional.one_hot(want.ids, p.shape[1])
    largest = 8 * torch.maximum(g.abs().max(), h.abs().max()) if g.numel() else 0.0
    scale = abs(case.config.get("logit_scale", 1.0)) / case.config.get("temperature", 1.0)
    # 2^-23 in float32
    size = scale * (a * (hot + p) + b * p * away + 0.0012 * largest * (hot + p + p * away))
    sizes = {
        "hidden": on_grid(size @ want.weight.detach().abs(), counted),
        "weight": size.T @ want.hidden.detach().abs(),
        "bias": size.sum(0),
    }
    off = (logps.detach() - on_grid(want.logps, counted)).abs()
    most = float(want.raw.abs().max()) if want.raw.numel() else 0.0
    assert float(off.max()) <= unit * (1 + most), "logps"
    for name, leaf in leaves.items():
        if leaf is None or not leaf.requires_grad:
            continue
        (grad,) = torch.autograd.grad(exact, bases[name], retain_graph=True)
        grad = on_grid(grad, counted) if name == "hidden" else grad
        got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        wrong = ~((got - grad).abs() <= unit * sizes[name] + 1e-35)  # NaN is wrong, too
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            both = f"got {got[where]:.6g}, want {grad[where]:.6g}"
            raise AssertionError(f"d {name}{list(where)}: {both}")
