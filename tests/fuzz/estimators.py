"""Advantages against Python loops over lists, one number at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from grpo_kernels import advantages as adv
from tests.fuzz.harness import Category, Options
from tests.support.advantage_loops import (
    loop_gae,
    loop_group,
    loop_process,
    loop_reinforce,
    loop_rloo,
    mean_std,
    random_rewards,
    random_tokens,
    weighted,
    z_scores,
)

NAN = math.nan


def draw(random_: random.Random) -> Options:
    sometimes = lambda p, value: value if random_.random() < p else None  # noqa: E731
    options: Options = {
        "estimator": random_.choice([*ESTIMATORS]),
        "seed": random_.randrange(10**6),
        "rows": random_.choice((0, 1, 2, 5, 8, 13)),
        "columns": sometimes(0.4, random_.choice((1, 3))),
        "length": random_.choice((1, 2, 7, 33)),
        "nan_share": random_.choice((0.0, 0.2, 0.6, 1.0)),
        "double": sometimes(0.5, True),
        "shift": sometimes(0.3, random_.choice((-1e4, 1e6))),
        "consecutive": sometimes(0.4, True),
        "scale": random_.choice(("group", "batch", "none")),
        "std": random_.choice(("sample", "population")),
        "aggregation": random_.choice(("sum_then_normalize", "normalize_then_sum")),
        "epsilon": random_.choice((1e-4, 0.1)),
        "normalize": sometimes(0.5, True),
        "gamma": random_.choice((1.0, 0.9, 0.0)),
        "lam": random_.choice((1.0, 0.95, 0.0)),
    }
    return {name: x for name, x in options.items() if x is not None}


class Batch:
    """The tensors and lists of a trial."""

    def __init__(self, options: Options) -> None:
        draw = random.Random(options.get("seed", 0))
        self.option = lambda name, otherwise: options.get(name, otherwise)
        rows, columns = options.get("rows", 4), options.get("columns")
        self.dtype = torch.float64 if "double" in options else torch.float32
        table = random_rewards(options.get("seed", 0), rows, columns, options.get("nan_share", 0.0), self.dtype)
        self.rewards = table + options.get("shift", 0.0)
        self.table = self.rewards.double().reshape(rows, columns or 1).tolist()
        self.weights = [draw.uniform(-1, 2) for _ in range(columns)] if columns else [1.0]
        self.totals = [weighted(row, self.weights) for row in self.table]
        sizes = [x for x in range(2, max(rows, 2) + 1) if rows % x == 0]  # none of one row, which has no group
        if "consecutive" in options and sizes:
            size = draw.choice(sizes)
            self.groups: dict[str, Any] = {"num_generations": size}
            self.ids = [row // size for row in range(rows)]
        else:
            self.ids = [draw.choice([-7, 0, 3, 10**12]) for _ in range(rows)]
            self.groups = {"group_ids": self.ids}
        self.given = self.groups | ({"reward_weights": self.weights} if columns else {})
        self.values, self.mask = random_tokens(options.get("seed", 0), max(rows, 2), options.get("length", 5))
        self.values, self.mask = self.values[:rows], self.mask[:rows]
        # What is rounded to the result's dtype; sums of shifted rewards lose what the shift pushes out of float64.
        lost = abs(options.get("shift", 0.0)) * 1e-13 / options.get("epsilon", 1e-4)
        if options.get("aggregation") == "normalize_then_sum":  # a rounding, divided by epsilon, and once more
            lost += 1e-15 / options.get("epsilon", 1e-4) ** 2
        self.tolerance = (1e-9 if self.dtype == torch.float64 else 1e-6) + lost

    def same(self, result: torch.Tensor, want: Any, what: str = "") -> None:
        """Close, and of the dtype of the rewards."""
        assert result.dtype == self.dtype, f"{what} dtype {result.dtype}"
        want = torch.tensor(want, dtype=torch.float64).reshape(result.shape)
        off = (result.double() - want).abs()
        wrong = ~(off <= self.tolerance * (1 + want.abs()))
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(f"{what}{list(where)}: got {result[where]:.9g}, want {want[where]:.9g}")


def group(x: Batch) -> None:
    options = {name: x.option(name, otherwise) for name, otherwise in (
        ("scale", "group"), ("std", "sample"), ("aggregation", "sum_then_normalize"), ("epsilon", 1e-4)
    )}  # fmt: skip
    x.same(adv.group_advantages(x.rewards, **x.given, **options), loop_group(x.table, x.ids, x.weights, **options))


def rloo(x: Batch) -> None:
    options = {"normalize": x.option("normalize", False), "epsilon": x.option("epsilon", 1e-4)}
    x.same(adv.rloo_advantages(x.rewards, **x.given, **options), loop_rloo(x.totals, x.ids, **options))


def others(x: Batch, row: int) -> list[float]:
    """The scored totals of the row's group, without the row."""
    same = [i for i, own in enumerate(x.ids) if own == x.ids[row] and i != row]
    return [x.totals[i] for i in same if not math.isnan(x.totals[i])]


def passk(x: Batch) -> None:
    want = []
    for row, total in enumerate(x.totals):
        rest = others(x, row)
        gain = 0.0 if math.isnan(total) or not rest else max(0.0, total - max(rest))
        if x.option("scale", "group") == "group" and gain:
            gain /= mean_std([total, *rest], int(x.option("std", "sample") == "sample"))[1] + x.option("epsilon", 1e-4)
        want.append(gain)
    scale = "group" if x.option("scale", "group") == "group" else "none"
    options = {"std": x.option("std", "sample"), "epsilon": x.option("epsilon", 1e-4)}
    x.same(adv.passk_advantages(x.rewards, **x.given, scale=scale, **options), want)


def opo(x: Batch) -> None:
    lengths, want = x.mask.sum(1).tolist(), []
    for row, total in enumerate(x.totals):
        members = [i for i, own in enumerate(x.ids) if own == x.ids[row] and not math.isnan(x.totals[i])]
        weight = sum(lengths[i] for i in members)
        if math.isnan(total):
            want.append(0.0)
        elif weight:
            want.append(total - math.fsum(lengths[i] * x.totals[i] for i in members) / weight)
        else:  # nobody has a token: what is left is above the group's least
            want.append(total - min(x.totals[i] for i in members))
    x.same(adv.opo_advantages(x.rewards, x.mask, **x.given), want)


def gpg(x: Batch) -> None:
    centred = z_scores(x.totals, x.ids, 0, 0.0, "none")
    scored = [row for row, total in enumerate(x.totals) if not math.isnan(total)]
    moving = [row for row in scored if any(other != x.totals[row] for other in others(x, row))]
    alpha = len(scored) / max(len(moving), 1)
    want = [0.0 if math.isnan(a) or row not in moving else alpha * a for row, a in enumerate(centred)]
    x.same(adv.gpg_advantages(x.rewards, **x.given), want)


def process(x: Batch) -> None:
    rows, length = x.mask.shape
    steps = random_rewards(x.option("seed", 0) + 1, rows, 3, x.option("nan_share", 0.0), x.dtype)
    ends = torch.randint(length, (rows, 3), generator=torch.Generator().manual_seed(x.option("seed", 0)))
    options = {"std": x.option("std", "sample"), "epsilon": x.option("epsilon", 1e-4)}
    result = adv.process_advantages(steps, ends, **x.groups, completion_mask=x.mask, **options)
    correction = int(options["std"] == "sample")
    x.same(result, loop_process(steps.tolist(), ends.tolist(), x.ids, x.mask.tolist(), correction, options["epsilon"]))


def gae(x: Batch) -> None:
    mask, values = x.mask.tolist(), x.values.to(x.dtype)
    rewards = (x.values.flip(1) * 0.5).to(x.dtype)
    last = [0.3 * row for row in range(len(mask))]
    gamma, lam = x.option("gamma", 1.0), x.option("lam", 0.95)
    dirty = [y.masked_fill(~x.mask, NAN) for y in (rewards, values)]
    got = adv.gae(*dirty, x.mask, gamma, lam, torch.tensor(last, dtype=x.dtype))
    want = loop_gae(rewards.tolist(), values.tolist(), mask, gamma, lam, torch.tensor(last, dtype=x.dtype).tolist())
    for name, result, numbers in zip(("advantages", "returns"), got, want, strict=True):
        x.same(result, numbers, name)


def reinforce(x: Batch) -> None:
    baseline = x.option("normalize", False)
    totals = z_scores(x.totals, x.ids, 0, 0.0, "none") if baseline else x.totals
    raw = loop_reinforce(totals, x.mask.tolist(), x.values.tolist(), 0.2, x.option("gamma", 1.0))
    kept = [a for row in raw for a in row if a is not None]
    mean, spread = mean_std(kept, 0) if kept else (0.0, 0.0)
    if spread < 1e-6 * (1 + abs(mean)):
        return  # all alike: what is left of them is rounding, here and there
    want = [[0.0 if a is None else (a - mean) / (spread + 1e-8) for a in row] for row in raw]
    weights = {k: w for k, w in x.given.items() if k == "reward_weights"}
    options = {"beta": 0.2, "gamma": x.option("gamma", 1.0), **weights, **(x.groups if baseline else {})}
    kl = x.values.masked_fill(~x.mask, NAN)
    x.same(adv.reinforce_plus_plus(x.rewards, x.mask, per_token_kl=kl, **options), want)


def whiten(x: Batch) -> None:
    numbers = x.values.to(x.dtype).masked_fill(~x.mask, NAN)
    mean, spread = mean_std(numbers.flatten().tolist(), int(x.option("std", "sample") == "sample"))
    spread = 0.0 if math.isnan(spread) else spread
    shift = mean if x.option("normalize", False) else 0.0
    want = torch.where(x.mask, (numbers.double() - shift) / (spread + x.option("epsilon", 1e-4)), 0.0).tolist()
    options = {"std": x.option("std", "sample"), "epsilon": x.option("epsilon", 1e-4)}
    x.same(adv.whiten(numbers, x.mask, shift_mean=x.option("normalize", False), **options), want)


ESTIMATORS: dict[str, Callable[[Batch], None]] = {
    f.__name__: f for f in (group, rloo, passk, opo, gpg, process, gae, reinforce, whiten)
}


def check(options: Options) -> None:
    ESTIMATORS[options.get("estimator", "group")](Batch(options))


ADVANTAGES = Category("advantages", draw, check)
