"""Numbers out of the results, and ratios of them."""

from __future__ import annotations

import statistics
from typing import Any

OURS, PRODUCTS = "ours", "products"

Case = dict[str, Any]
Provider = dict[str, Any]


def is_ours(name: str) -> bool:
    return name.replace("@", "/").split("/")[0] == OURS


def providers(case: Case) -> dict[str, Provider]:
    return case.get("providers") or {}


def ran(provider: Provider) -> bool:
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


def ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def over(case: Case, name: str, other: str) -> float | None:
    """The time of a provider over that of another one, in its own turn where it had one."""
    beside = (providers(case).get(name, {}).get("anchors") or {}).get(other, {})
    return ratio(median(case, name), beside.get("median") or median(case, other))


def unit(cases: dict[str, Case]) -> tuple[str, float]:
    """Unit in which these cases' times read best, and its milliseconds: the typical one decides."""
    every = (median(case, name) for case in cases.values() for name in providers(case))
    ms = sorted(x for x in every if x is not None)
    return ("seconds", 1e3) if ms and ms[len(ms) // 2] >= 1e3 else ("ms", 1.0)


def of_part(data: dict[str, Any], *parts: str) -> dict[str, Case]:
    cases = (data.get("cases") or {}).items()
    return {name: case for part in parts for name, case in cases if case.get("part") == part}


def of_run(data: dict[str, Any], part: str) -> dict[str, Any]:
    """`data` with the conditions of the run that measured the part, if that was another."""
    return {**data, **(data.get("runs") or {}).get(part, {})}


def names(cases: dict[str, Case]) -> list[str]:
    return list(dict.fromkeys(name for case in cases.values() for name in providers(case)))


Scene = dict[str, Any]  # of the whole optimizer step, as `benchmarks.step` measures it
STOCK, DEFAULTS, ALL_OPTIONS = "stock TRL", "defaults", "skip"
UNGROUPED = "TRL's micro-batches"  # the defaults without regrouping
ONE_GROUP = "one group a micro-batch"  # the same, with other micro-batches


def scenes(data: dict[str, Any]) -> dict[str, Scene]:
    return (data.get("step") or {}).get("scenes") or {}


def faster(scene: Scene, name: str, than: str = STOCK) -> tuple[float, float, float] | None:
    """How many times as fast as `than` a variant is: median, least and most of the rounds."""
    timed = {x for x, y in scene["variants"].items() if y["status"] == "ok" and y.get("seconds")}
    if not {than, name} <= timed:
        return None
    rounds = zip(*(scene["variants"][x]["samples"] for x in (than, name)), strict=False)
    ratios = [statistics.fmean(slow) / statistics.fmean(fast) for slow, fast in rounds]
    return statistics.median(ratios), min(ratios), max(ratios)
