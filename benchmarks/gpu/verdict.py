"""Figures that follow from the times on a GPU, and whether the goals are met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import figures

FAMILIES = {  # the fastest of those that ran stands for all of a peer's
    "liger": ("liger_grpo", "liger_grpo/uncompiled", "liger_torch", "liger_ce", "liger_jsd", "liger_jsd/fused"),
    "verl": ("verl_triton", "verl_torch"),
}


@dataclass(frozen=True)
class Goal:
    """A ratio of two providers' times in one case, and its limit."""

    case: str
    over: str
    under: str
    limit: float
    at_least: bool = False


GOALS = (
    Goal("main", "ours", "products", 1.20),
    Goal("main", "trl", "ours", 1.25, at_least=True),
    Goal("main", "liger", "ours", 1.25, at_least=True),
    Goal("frozen", "ours", "products", 1.20),
    Goal("frozen", "trl", "ours", 1.7, at_least=True),
    Goal("frozen", "liger", "ours", 1.7, at_least=True),
    Goal("half_zero", "trl", "ours", 1.7, at_least=True),
    Goal("half_zero", "liger", "ours", 1.7, at_least=True),
)


def median(case: dict[str, Any], provider: str) -> float | None:
    """Milliseconds of a whole step of a provider that ran and was right, or of its scoring."""
    return figures.median(case, provider, "score" if case.get("score") else "full")


def over_ours(case: dict[str, Any], name: str) -> float | None:
    """How many times ours the provider takes: both from the rounds of its own turn, where it had one."""
    provider = figures.providers(case).get(name, {})
    anchor = (provider.get("anchors") or {}).get(figures.OURS, {})
    return figures.ratio(median(case, name), anchor.get("median") or median(case, figures.OURS))


def fastest(case: dict[str, Any], *providers: str) -> tuple[str, float] | None:
    """(name, times ours) of the fastest that ran."""
    timed = [(times, name) for name in providers if (times := over_ours(case, name)) is not None]
    return (min(timed)[1], min(timed)[0]) if timed else None


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Rates on the case's own count of operations, and ratios of ours to the others."""
    derived: dict[str, Any] = {}
    for name in case.get("providers", {}):
        ms = median(case, name)
        if ms:
            flops = case["products_nvh"] * case["counted"] * case["v"] * case["h"]
            derived.setdefault("tflops", {})[name] = round(flops / 1e9 / ms, 1)
    ours, products = median(case, figures.OURS), median(case, figures.PRODUCTS)
    if not ours:
        return derived
    if products:
        derived["ours_over_products"] = round(ours / products, 3)
    alone = [name for name in case["providers"] if not any(name in x for x in FAMILIES.values())]
    peers = {name: (name,) for name in alone if not figures.is_ours(name) and not figures.is_products(name)}
    for peer, names in {**peers, **FAMILIES}.items():
        best = fastest(case, *names)
        if best:
            derived[f"{peer}_over_ours"] = round(best[1], 3)
            if best[0] != peer:
                derived[f"{peer}_was"] = best[0]
    return derived


def judge(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a goal: what was wanted, what came, and "pass", "fail" or "not measured"."""
    found = []
    for goal in GOALS:
        case = cases.get(goal.case, {})
        value = _value(case, goal)
        met = None if value is None else value >= goal.limit if goal.at_least else value <= goal.limit
        found.append(
            {
                "case": goal.case,
                "figure": f"time, {goal.over} / {goal.under}",
                "goal": f"{'>=' if goal.at_least else '<='} {goal.limit:.3g}",
                "value": None if value is None else round(value, 3),
                "verdict": "not measured" if met is None else "pass" if met else "fail",
            }
        )
    return found


def _value(case: dict[str, Any], goal: Goal) -> float | None:
    if goal.under == figures.OURS:
        best = fastest(case, *FAMILIES.get(goal.over, (goal.over,)))
        return None if best is None else best[1]
    return figures.ratio(median(case, goal.over), median(case, goal.under))
