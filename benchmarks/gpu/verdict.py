"""Figures that follow from the times, and whether the goals are met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LIGER = ("liger", "liger_torch", "liger_grpo")  # the fastest of those that ran stands for Liger


@dataclass(frozen=True)
class Goal:
    """Ours takes at most `products` times as long as the products, and is `faster` times as fast as each peer."""

    case: str
    products: float | None
    faster: float


GOALS = (Goal("trainable", 1.20, 1.25), Goal("frozen", 1.20, 1.7), Goal("half_zero", None, 1.7))


def median(case: dict[str, Any], provider: str) -> float | None:
    """Milliseconds of a provider that ran and was right."""
    found = case.get("providers", {}).get(provider, {})
    return found.get("ms", {}).get("median") if found.get("status") in ("ok", "partial") else None


def fastest(case: dict[str, Any], *providers: str) -> tuple[str, float] | None:
    """(name, milliseconds) of the fastest that ran."""
    timed = [(ms, name) for name in providers if (ms := median(case, name)) is not None]
    return (min(timed)[1], min(timed)[0]) if timed else None


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Rates on the case's own count of operations, and ratios of ours to the others."""
    derived: dict[str, Any] = {}
    for name in case.get("providers", {}):
        ms = median(case, name)
        if ms:
            derived.setdefault("tflops", {})[name] = round(case["flops"] / 1e9 / ms, 1)
    ours, products = median(case, "ours"), median(case, "products")
    if not ours:
        return derived
    if products:
        derived["ours_over_products"] = round(ours / products, 3)
    for peer, names in (
        ("trl", ("trl",)),
        ("liger", LIGER),
        ("eager", ("eager",)),
        ("verl", ("verl_triton", "verl_torch")),
    ):
        best = fastest(case, *names)
        if best:
            derived[f"{peer}_over_ours"] = round(best[1] / ours, 3)
            derived[f"{peer}_was"] = best[0]
    return derived


def judge(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a comparison: what was wanted, what came, and "pass", "fail" or "not measured"."""
    lines = []
    for goal in GOALS:
        derived = derive(cases.get(goal.case, {"flops": 0}))
        wanted = [("ours_over_products", goal.products, False)] if goal.products else []
        wanted += [("trl_over_ours", goal.faster, True), ("liger_over_ours", goal.faster, True)]
        for name, limit, at_least in wanted:
            value = derived.get(name)
            met = None if value is None else (value >= limit if at_least else value <= limit)
            lines.append(
                {
                    "case": goal.case,
                    "figure": name,
                    "goal": f"{'>=' if at_least else '<='} {limit:.2f}",
                    "value": value,
                    "verdict": "not measured" if met is None else "pass" if met else "fail",
                }
            )
    return lines
