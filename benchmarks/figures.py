"""Numbers out of the results, and ratios of them: whoever shows or judges results reads them here."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

OURS, PRODUCTS = "ours", "products"

Case = dict[str, Any]
Provider = dict[str, Any]


def is_ours(name: str) -> bool:
    """Return True for any variant of this library: ours, ours@128, ours/torch."""
    return name.replace("@", "/").split("/")[0] == OURS


def providers(case: Case) -> dict[str, Provider]:
    """The case's providers, in the order they were run in."""
    return case.get("providers") or {}


def ran(provider: Provider) -> bool:
    """Return True if it ran and was right."""
    return provider.get("status") == "ok"


def measured(case: Case, name: str, *keys: str) -> Any:
    """A value, by its keys, of a provider that ran and was right; None where there is none."""
    value: Any = providers(case).get(name, {})
    if not ran(value):
        return None
    for key in keys:
        value = (value or {}).get(key)
    return value


def mode(case: Case) -> str:
    return "score" if case.get("score") else "full"


def median(case: Case, name: str) -> float | None:
    value: float | None = measured(case, name, "ms", mode(case), "median")
    return value


def extra_mib(case: Case, name: str) -> float | None:
    """Memory of a provider beyond the inputs and the returned gradients."""
    value: float | None = measured(case, name, "extra_mib")
    return value


def ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def over(case: Case, name: str, other: str) -> float | None:
    """The time of a provider over that of another one, in its own turn where it had one."""
    beside = (providers(case).get(name, {}).get("anchors") or {}).get(other, {})
    return ratio(median(case, name), beside.get("median") or median(case, other))


def mib_over(case: Case, name: str) -> float | None:
    """The memory of a provider over ours."""
    return ratio(extra_mib(case, name), extra_mib(case, OURS))


def in_seconds(cases: dict[str, Case]) -> bool:
    """Return True if these cases' times read better in seconds: the typical one takes a second or more."""
    ms = sorted(
        x
        for case in cases.values()
        for name in providers(case)
        if (x := median(case, name)) is not None
    )
    return bool(ms) and ms[len(ms) // 2] >= 1e3


def of_part(data: dict[str, Any], *parts: str) -> dict[str, Case]:
    """The cases of some parts, by name."""
    cases = (data.get("cases") or {}).items()
    return {name: case for part in parts for name, case in cases if case.get("part") == part}


def of_run(data: dict[str, Any], part: str) -> dict[str, Any]:
    """`data` with the conditions of the run that measured the part, if that was another."""
    return {**data, **(data.get("runs") or {}).get(part, {})}


def names(cases: dict[str, Case]) -> list[str]:
    return list(dict.fromkeys(name for case in cases.values() for name in providers(case)))


def series(data: dict[str, Any]) -> Iterator[tuple[str, list[Case]]]:
    """(axis, its cases from the smallest value to the largest)."""
    for axis in ("n", "v", "share"):
        cases = [
            x for x in (data.get("cases") or {}).values() if axis in (x.get("series") or "").split()
        ]
        if cases:
            yield axis, sorted(cases, key=lambda case: along(case, axis))


def along(case: Case, axis: str) -> float:
    """Where the case stands on the axis: N, V, or the share of rows that carry gradient."""
    return 1.0 - case.get("zero_share", 0.0) if axis == "share" else case[axis]


# The whole optimizer step, as `benchmarks.step` measures it.

Scene = dict[str, Any]
# Variants: whole steps, each trained in its own way.
STOCK, DEFAULTS, REGROUPED, ALL_OPTIONS = "stock TRL", "defaults", "regrouped", "skip, regrouped"
ONE_GROUP = "one group a micro-batch"  # the defaults, with other micro-batches


def scenes(data: dict[str, Any]) -> dict[str, Scene]:
    return (data.get("step") or {}).get("scenes") or {}


def step_seconds(scene: Scene) -> dict[str, float]:
    """CPU seconds of a step of each variant that ran and was right."""
    variants = scene["variants"].items()
    return {name: x["seconds"] for name, x in variants if x["status"] == "ok" and x.get("seconds")}


def faster(scene: Scene, name: str, than: str = STOCK) -> tuple[float, float, float] | None:
    """How many times as fast as `than` a variant is: the median, the least and the most of the rounds' ratios."""
    timed = step_seconds(scene)
    if than not in timed or name not in timed:
        return None
    rounds = zip(*(scene["variants"][x]["samples"] for x in (than, name)), strict=False)
    ratios = [statistics.fmean(slow) / statistics.fmean(fast) for slow, fast in rounds]
    return statistics.median(ratios), min(ratios), max(ratios)
