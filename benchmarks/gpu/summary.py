"""The results of a GPU in a few lines, with the figures that follow from the times, and whether the goals are met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import figures
from benchmarks.run import Results

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


def conclude(results: Results) -> bool:
    """Derive what follows from the results, save and print it; whether all is well."""
    data = results.data
    for case in data.get("cases", {}).values():
        case["derived"] = derive(case)
    if "cases" in data and not data.get("dry_run"):
        data["goals"] = judge(data["cases"])
    data["did_not_run"] = did_not_run(data)
    results.save()
    for line in lines(data):
        print(line)
    return is_well(data)


def is_well(data: dict[str, Any]) -> bool:
    """No failed check or test and some passed, no finding in our kernels, ours right in every case, no missed goal."""
    tests, sanitizer = data.get("tests", {}), data.get("sanitizer", {})
    bad_tests = any(tests.get("counts", {}).get(name, 0) for name in ("failed", "error"))
    bad_tests |= any(tests.get(name, {}).get("status") in ("error", "out of time") for name in ("together", "alone"))
    bad_tests |= bool(tests) and not data.get("dry_run") and not tests.get("counts", {}).get("passed")
    providers = [x.get("providers", {}) for _, x in _tables(data.get("cases"))]
    ours = {x["ours"].get("status") for x in providers if "ours" in x}
    found = any(isinstance(x, dict) and x.get("in_our_kernels") for x in sanitizer.values())
    missed = any(goal["verdict"] == "fail" for goal in data.get("goals", []))
    no_smoke = data.get("smoke", {}).get("status", "passed") != "passed"
    return not (no_smoke or bad_tests or found or missed or "failed_steps" in data) and ours <= {"ok", "partial"}


def lines(data: dict[str, Any]) -> list[str]:
    """A line for each thing worth knowing; what matters most comes last, since that is what stays on a screen."""
    about = data.get("machine", {})
    text = [f"{about.get('device')}, torch {about.get('torch')}, triton {about.get('triton')}, {about.get('commit')}"]
    for name, x in _tables(data.get("profile")):
        text.append(
            f"profile {name}: step {x.get('step_ms')} ms, kernels {x.get('kernels_ms')} ms {x.get('reason', '')}"
        )
        text += [f"  {k['ms']:9.3f} ms {k['calls']:4d} x {k['name'][:80]}" for k in x.get("kernels", [])[:8]]
    for name, x in _tables(data.get("ceilings")):
        text.append(f"ceiling {name}: {x.get('gb_per_s', x.get('tflops', x.get('reason')))}")
    for backend, runs in _tables(data.get("micro", {}).get("rows")):
        text.append(f"row kernels, {backend}, GB/s: {_rates(runs, 'gb_per_s')}")
    for shape, runs in _tables(data.get("micro", {}).get("scoring")):
        text.append(f"scoring {shape}, TFLOP/s: {_rates(runs, 'tflops')}")
    for name, case in _tables(data.get("cases")):
        text += _case_lines(name, case)
    tests = data.get("tests", {})
    for name, x in data.items():
        if isinstance(x, dict) and x.get("status") in ("error", "crashed", "hung", "absent", "skipped", "stopped"):
            text.append(f"{name}: {x['status']} {x.get('reason', '')}")
    checks = data.get("smoke", {}).get("checks", {}).items()
    text += [f"smoke, {name}: {x}" for name, x in checks if x["status"] not in ("ok", "absent")]
    for part in ("together", "alone"):
        text += [f"  {x['test']}: {x['text'][:160]!r}" for x in tests.get(part, {}).get("failures", [])]
        if part in tests:
            text.append(f"tests, {part}: {tests[part].get('status')} {tests[part].get('counts', '')}")
    for name, x in _tables(data.get("sanitizer")):
        text.append(f"{name}: {x.get('status')} {x.get('summary', '')} in our kernels: {x.get('in_our_kernels')}")
    text += [f"goal {x['case']}: {x['figure']} {x['goal']}: {x['value']} {x['verdict']}" for x in data.get("goals", [])]
    text += [f"step {name} failed: {why}" for name, why in data.get("failed_steps", {}).items()]
    return text + did_not_run(data)


def did_not_run(data: dict[str, Any]) -> list[str]:
    """What was asked for and did not run, each with the reason; of a dry run that it was one."""
    text = []
    if data.get("dry_run"):
        text.append(
            "NOTHING RAN ON A GPU: a dry run, at toy sizes on a CPU, whose times say nothing; no goal is judged"
        )
    counts = data.get("tests", {}).get("counts", {})
    if "tests" in data and not counts.get("passed") and not counts.get("failed"):
        text.append(f"not run: GPU tests, {counts.get('skipped', 0)} of them skipped: {_reasons(data['tests'])}")
    for what, x in (("compute-sanitizer", data.get("sanitizer", {})), *_tables(data.get("sanitizer"))):
        if x.get("status") in ("absent", "skipped", "out of time"):
            text.append(f"not run: {what}: {x['status']}, {x.get('reason', '')}")
    checks = data.get("smoke", {}).get("checks", {}).items()
    text += [
        f"not run: smoke, {name}: {x.get('reason', '')}" for name, x in checks if x["status"] in ("absent", "not run")
    ]
    cases = _tables(data.get("cases"))
    if late := data.get("not_begun"):
        text.append(f"not run: no time for {', '.join(late)}")
    text += [f"not run: {name} in any case: {reason}" for name, reason in _never_ran(cases).items()]
    return text


def _reasons(tests: dict[str, Any]) -> str:
    found: dict[str, int] = {}
    for _, part in _tables(tests):
        for reason, count in (part.get("skipped_for") or {}).items():
            found[reason] = found.get(reason, 0) + count
    return ", ".join(f"{reason!r} ({count})" for reason, count in found.items()) or "none was selected"


def _never_ran(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    """Why, for each provider that has a result in no case, by the last one that says."""
    providers = [(name, x) for _, case in cases for name, x in case.get("providers", {}).items()]
    ran = {name for name, x in providers if figures.ran(x) or x.get("status") == "wrong"}
    return {name: f"{x.get('status')}, {x.get('reason', '')[:200]}" for name, x in providers if name not in ran}


def _tables(found: Any) -> list[tuple[str, dict[str, Any]]]:
    """The entries that are dictionaries; an error may stand beside them."""
    return [(name, x) for name, x in (found or {}).items() if isinstance(x, dict)]


def _rates(runs: dict[str, Any], unit: str) -> str:
    found = [f"{name} {x[unit]}" for name, x in runs.items() if isinstance(x, dict) and unit in x]
    found += [
        f"{name} {x['status']}" for name, x in runs.items() if isinstance(x, dict) and unit not in x and "status" in x
    ]
    return ", ".join(found) or str(runs.get("reason", "none"))


def _case_lines(name: str, case: dict[str, Any]) -> list[str]:
    shape = f"N {case.get('n')}, H {case.get('h')}, V {case.get('v')}"
    text = [f"{name} ({shape}): {case.get('status')} {case.get('reason', '')[:200]}"]
    for provider, x in case.get("providers", {}).items():
        ms = x.get("ms", {}).get("full") or x.get("ms", {}).get("score") or {}
        if "median" not in ms:
            text.append(f"  {provider:13s} {x.get('status')}: {x.get('reason', '')[:140]} {_errors(x)}")
            continue
        rate = case.get("derived", {}).get("tflops", {}).get(provider, "")
        text.append(
            f"  {provider:13s} {ms['median']:9.3f} ms [{ms['p20']:.2f}, {ms['p80']:.2f}] {rate} TFLOP/s "
            f"{x.get('extra_mib')} MiB {x.get('note', '')[:48]} {_errors(x)}"
        )
    ratios = {k: x for k, x in case.get("derived", {}).items() if k != "tflops"}
    return [*text, f"  {ratios}"]


def _errors(provider: dict[str, Any]) -> str:
    errors = provider.get("errors") or {}
    return " ".join(f"{name} {x:.0e}" for name, x in errors.items() if isinstance(x, float))
