"""The results as markdown, each table with its conditions, and the goals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NOTES = (
    "Seconds of one loss, forward and backward (dapo, on-policy, trainable head), providers in turn in one process; "
    "the median, and the 20 and 80 % quantiles. Extra memory: peak beyond the inputs and the returned gradients, one "
    "step in a process of its own. Errors against float64: mean of the log-probabilities' absolute ones; of the "
    "gradients relative in norm, on samples of rows.",
    "`ours` and `trl` also give each token's entropy, the others do not. `ours@128`: with a workspace of 128 MiB, not "
    "the default of 512. `products`: ours' own matrix products alone, the same calls on memory that is already there.",
)


@dataclass(frozen=True)
class Goal:
    """A ratio of two providers' figures in one case, and its limit."""

    case: str
    figure: str  # "seconds" or "extra memory"
    over: str
    under: str
    limit: float
    at_least: bool = False


GOALS = (
    Goal("trainable", "seconds", "trl", "ours", 1.9, at_least=True),
    Goal("trainable", "seconds", "liger", "ours", 1.6, at_least=True),
    Goal("trainable", "seconds", "ours", "eager", 1.05),
    Goal("trainable", "seconds", "ours", "products", 1.08),
    Goal("trainable", "extra memory", "ours", "eager", 1 / 6),
    Goal("half_zero", "seconds", "trl", "ours", 2.5, at_least=True),
)


def judge(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a goal: what was wanted, what came, and "pass", "fail" or "not measured"."""
    found = []
    for goal in GOALS:
        providers = cases.get(goal.case, {}).get("providers", {})
        value = _ratio(*(_figure(providers.get(name, {}), goal.figure) for name in (goal.over, goal.under)))
        met = None if value is None else value >= goal.limit if goal.at_least else value <= goal.limit
        found.append(
            {
                "case": goal.case,
                "figure": f"{goal.figure}, {goal.over} / {goal.under}",
                "goal": f"{'>=' if goal.at_least else '<='} {goal.limit:.3g}",
                "value": None if value is None else round(value, 3),
                "verdict": "not measured" if met is None else "pass" if met else "fail",
            }
        )
    return found


def lines(data: dict[str, Any]) -> list[str]:
    """All of it."""
    machine = data["machine"]
    system, versions = machine["system"], machine["versions"]
    text = [
        f"{system['cpu']}, {system['cores']} cores, {data['threads']} threads, {system['torch cpu capability']}; "
        f"{system['os']}",
        ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "trl", "transformers", "liger-kernel"))
        + f"; grpo_kernels at {data['commit']}; {data['date']}",
        f'backend "auto": {machine["backend"]["cpu"]}; {data["repetitions"]} repetitions',
        "",
        *NOTES,
    ]
    for name, case in data["cases"].items():
        text += ["", *table(name, case)]
    if "goals" in data:
        text += ["", "| case | goal | wanted | measured | verdict |", "|---|---|---|---|---|"]
        text += ["| " + " | ".join(str(value) for value in goal.values()) + " |" for goal in data["goals"]]
    return text


def table(name: str, case: dict[str, Any]) -> list[str]:
    """A line for each provider."""
    providers = case["providers"]
    base = "ours" if "ours" in providers else next(iter(providers), "")
    others = case.get("cpu_of_others")
    text = [
        f"**{name}**: {case['dtype']}, N {case['n']} in sequences of {case['t']}, H {case['h']}, V {case['v']}, "
        f"{case['zero_share']:.0%} of the groups with advantage 0"
        + ("" if others is None else f"; other processes used {others:.0%} of the cores meanwhile"),
        "",
        f"| | seconds | 20 to 80 % | / {base} | / its products | extra MiB | logp | d hidden | d weight | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for provider, x in providers.items():
        if "ms" not in x:
            text.append(f"| {provider} | {x['status']} | | | | | {_errors(x)} | {x.get('reason', '')[:160]} |")
            continue
        ms, seconds = x["ms"], _figure(x, "seconds")
        products = providers.get(f"products{provider.removeprefix('ours')}", {}) if provider.startswith("ours") else {}
        text.append(
            f"| {provider} | {seconds:.4g} | {ms['p20'] / 1e3:.4g} to {ms['p80'] / 1e3:.4g} "
            f"| {_text(_ratio(seconds, _figure(providers[base], 'seconds')))} "
            f"| {_text(_ratio(seconds, _figure(products, 'seconds')))} | {_text(x.get('extra_mib'), '.0f')} "
            f"| {_errors(x)} | {x['note']} {x.get('memory_reason', '')[:160]} |"
        )
    return text


def _figure(provider: dict[str, Any], figure: str) -> float | None:
    """Of a provider that ran and was right; None: it has none."""
    if figure == "extra memory":
        return provider.get("extra_mib")
    median = provider.get("ms", {}).get("median") if provider.get("status") == "ok" else None
    return None if median is None else median / 1e3


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _text(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _errors(provider: dict[str, Any]) -> str:
    found = provider.get("errors", {})
    return " | ".join(_text(found.get(name), ".0e") for name in ("logp_mean", "d_hidden", "d_weight"))
