"""Claims that the results support, a sentence each: titles of the figures, and the summary of the benchmarks page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import figures, labels
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, OURS, Case, Scene, faster, ratio, scenes


def multiple(value: float) -> str:
    """A ratio in words: 1.6, 16, 1,600."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def step_claim(data: dict[str, Any]) -> str:
    """Stock TRL's time of a step over ours with default options; empty where one of them is missing."""
    scene = first_scene(data)
    found = faster(scene, DEFAULTS) if scene else None
    return "" if found is None else f"Stock TRL's training step takes {multiple(found[0])} times our CPU time"


def first_scene(data: dict[str, Any]) -> Scene | None:
    """The scene of the training step that its figure shows."""
    return next(iter(scenes(data).values()), None)


def memory_claim(data: dict[str, Any]) -> str:
    """The memory of the fullest peer over ours, at the most tokens that the peer could be measured with."""
    cases = memory_cases(data)
    if not cases:
        return ""
    found = []
    for name in ("trl", "eager"):
        line = dict(memory_along(cases, name))
        if line and (over := ratio(line[max(line)], dict(memory_along(cases, OURS)).get(max(line)))):
            found.append((max(line), over, f"{labels.brief_name(name)} {'takes' if name == 'trl' else 'take'}"))
    if not found:
        return f"Extra memory of one loss, up to {max(case['n'] for case in cases.values()):,} tokens"
    tokens, over, who = max(found, key=lambda x: x[:2])
    return f"At {tokens:,} tokens {who} {multiple(over)} times our memory"


def memory_cases(data: dict[str, Any]) -> dict[str, Case]:
    """The cases of the part, the fewest tokens first."""
    return dict(sorted(figures.of_part(data, "memory").items(), key=lambda item: item[1]["n"]))


def memory_along(cases: dict[str, Case], name: str) -> list[tuple[int, float]]:
    """(tokens, MiB) of a provider, where it was measured."""
    found = [(case["n"], figures.extra_mib(case, name)) for case in cases.values()]
    return [(n, mib) for n, mib in found if mib]


def time_claim(data: dict[str, Any]) -> str:
    """The time of TRL's head over ours in the main case; empty where there is no main case."""
    case = main_case(data)
    over = ratio(figures.median(case, "trl", "full"), figures.median(case, OURS, "full"))
    if over is None:
        return "Time of one loss" if case else ""
    return f"{labels.brief_name('trl')} takes {multiple(over)} times our time"


def main_case(data: dict[str, Any]) -> Case:
    """The first of the main part that has forward and backward."""
    cases = figures.of_part(data, "main").values()
    return next((x for x in cases if "full" in figures.timed_modes(x)), {})


CLAIMS: dict[str, Callable[[dict[str, Any]], str]] = {"step": step_claim, "memory": memory_claim, "time": time_claim}


def summary(data: dict[str, Any]) -> list[str]:
    """The page's first lines: each claim with its shape, and the cases in which ours is behind."""
    found = [_step(data), _memory(data), _time(data), _accuracy(data)]
    text = [f"- {line}" for line in found if line]
    if text and data.get("device") == "cpu":
        text.append("- All figures are of CPUs. No GPU has measured anything yet, and nothing is claimed for GPUs.")
    return text


def _step(data: dict[str, Any]) -> str:
    claim, scene = step_claim(data), first_scene(data)
    if not claim or scene is None:
        return ""
    most = faster(scene, ALL_OPTIONS)
    options = f", {multiple(most[0])} times with all options" if most else ""
    return f"**{claim}**{options} (generation left out; a small model; half of the groups with equal rewards)."


def _memory(data: dict[str, Any]) -> str:
    claim, cases = memory_claim(data), memory_cases(data)
    if not claim:
        return ""
    about = {key: x for key, x in labels.common(cases).items() if key != "model"}
    return f"**{claim}** ({labels.shape(about)}){_leaner(list(cases.values())[-1])}."


def _leaner(case: Case) -> str:
    """Peers that take less memory than ours in a case."""
    over = {x: ratio(figures.extra_mib(case, x), figures.extra_mib(case, OURS)) for x in _peers(case)}
    less = [f"{labels.brief_name(x)} takes {times:.1f} times ours" for x, times in over.items() if times and times < 1]
    return "".join(f"; {words}" for words in less)


def _peers(case: Case) -> list[str]:
    """The providers but ours and the limit."""
    return [x for x in figures.providers(case) if not figures.is_ours(x) and not figures.is_products(x)]


def _time(data: dict[str, Any]) -> str:
    """The main case, and those of its part in which a peer is faster than ours by more than 2 %."""
    case = main_case(data)
    if figures.median(case, "trl", "full") is None or figures.median(case, OURS, "full") is None:
        return ""
    text = f"**{time_claim(data)}** for one loss ({labels.shape(case)})."
    for title, other in figures.of_part(data, "main").items():
        over = {x: figures.over(other, x, OURS) for x in _peers(other)}
        ahead = [
            f"{labels.brief_name(x)} ({times:.2f} times our time)" for x, times in over.items() if (times or 1) < 0.98
        ]
        text += f" Faster than ours in the case `{title}`: {', '.join(ahead)}." if ahead else ""
    return text


def _accuracy(data: dict[str, Any]) -> str:
    """The largest mean error of a log-probability over the sizes of logits, ours and TRL's."""
    cases = figures.of_part(data, "accuracy")
    found = {x: [figures.error(case, x, "logp_mean") or 0.0 for case in cases.values()] for x in (OURS, "trl")}
    ours, theirs = (max(found[x], default=0.0) for x in (OURS, "trl"))
    if not ours or not theirs:
        return ""
    about = labels.common(cases)
    dtype, shape = labels.DTYPES.get(about.get("dtype", ""), ""), labels.shape({**about, "dtype": ""})
    return (
        f"**Log-probabilities of a {dtype} head: a mean error of at most {ours:.1e}**; with TRL's head, {theirs:.1e} "
        f"({shape}; the largest of {len(cases)} kinds of logits, against float64)."
    )
