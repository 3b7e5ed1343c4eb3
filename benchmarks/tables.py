"""The results as markdown, each table with its conditions, read from the JSON and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import claims, figures, labels, step_tables
from benchmarks.cells import markdown, number, small, times
from benchmarks.figures import OURS, PRODUCTS, Case, Provider, ratio
from benchmarks.labels import share

NOTES = (
    "**Time**: the median of the rounds, providers in turn, and the 20 and 80 % quantiles (of two or three rounds: the "
    "least and the most).",
    "**/ ours**: the provider's time over that of `ours`. At 2, ours is twice as fast.",
    "**/ products**: its time over that of `products`, the matrix products of the case without any other work. No "
    'provider that does all of these products can be faster. "Within noise": these products were '
    "measured as slower than a provider that does more than them.",
    "**FLOPs**: counted by `torch.utils.flop_counter`, in NVH (one product of the N tokens that count with a head of "
    "V x H is 2); blank where it does not see them all.",
    "**Extra memory**: the peak beyond the inputs and the returned gradients.",
    "**logp**: the mean error of the log-probabilities against float64.",
    "More: [how it is measured](measuring.md).",
)
READING = "[How to read the tables](#how-to-read-the-tables), [conditions](#conditions-of-the-main-run)."
WRITTEN = "Written by `python -m benchmarks`; do not edit."
TIMED = {"main": "Main cases", "edges": "Cases of users", "distill": "Distillation"}
AXES = {"n": "N", "v": "V", "share": "rows with gradient"}
COMPARED = (PRODUCTS, "eager", "trl")  # with ours, over all cases
GOAL = {"case": "case", "figure": "figure", "goal": "goal", "value": "measured", "verdict": "verdict"}
CONDITIONS = ("products_nvh", "cpu_of_others", "rounds", "counted", "status")  # of a case, beside what is computed
NOISE = "within noise"  # a limit that was measured as slower than what does more
Section = tuple[str, str, list[str]]  # title, the part that has its plot and perhaps a run of its own, its lines
Column = tuple[str, Callable[[str, Case, Provider], str]]  # its head, and the text of a provider's cell in a case


def lines(data: dict[str, Any]) -> list[str]:
    """All of it: the summary, each part, then how to read the tables, and the conditions."""
    text = claims.summary(data)
    for title, _, body in _sections(data):
        text += ["", f"## {title}", "", *body]
    return [*text, *_end(data)]


def write(data: dict[str, Any], path: Path, plots: Sequence[Path] = ()) -> None:
    """Write a markdown page; each of `plots` (as `plots.render` returns them) stands above the table of its figures."""
    text = ["# Benchmarks", "", *claims.summary(data), "", f"{READING} {WRITTEN}"]
    for title, part, body in _sections(data):
        text += ["", f"## {title}", ""]
        for plot in plots:
            if plot.stem == part:
                place = Path(os.path.relpath(plot.resolve(), path.resolve().parent)).as_posix()
                text += [f"![{claims.CLAIMS[part](data)}]({place})", ""]
        text += [*body, "", f"Conditions: {labels.footer(figures.of_run(data, part))}."]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*text, *_end(data)]) + "\n", encoding="utf-8")


def of_products(value: float | None) -> str:
    """The products' time over that of ours."""
    return NOISE if value is not None and value > 1 else times(value)


def _end(data: dict[str, Any]) -> list[str]:
    """The meaning of the columns, the provider behind each name, and the conditions of the main run."""
    known = [[f"`{name}`", labels.label(name, data.get("versions"))] for name in figures.names(data.get("cases") or {})]
    text = ["", "## How to read the tables", ""]
    for note in NOTES:
        text += [f"- {note}"]
    text += ["", *markdown(["provider", "which is"], known)]
    return [*text, "", "## Conditions of the main run", "", *(f"- {line}" for line in labels.conditions(data))]


def _sections(data: dict[str, Any]) -> list[Section]:
    """The sections of which there are results."""
    found: list[Section] = []
    if figures.scenes(data):
        found.append(("A whole training step", "step", step_tables.lines(data["step"])))
    if peaks := figures.of_part(data, "memory"):
        found.append(("Memory against tokens", "memory", _memory(peaks, data)))
    if len(compared := figures.compared(data)) > 1:
        found.append(("All cases", "", _overview(compared)))
    for part, title in TIMED.items():
        if cases := figures.of_part(data, part):
            found.append((title, "time" if part == "main" else "", _timed(cases)))
    if series := dict(figures.series(data)):
        found.append(("Scaling", "", _scaling(series)))
    if accuracy := figures.of_part(data, "accuracy"):
        found.append(("Accuracy", "", _accuracy(accuracy)))
    if data.get("goals"):
        found.append(("Goals", "", markdown(list(GOAL.values()), [_goal(goal) for goal in data["goals"]])))
    return found


def _timed(cases: dict[str, Case]) -> list[str]:
    """The shape of each case, and a row for each provider that ran; the others in words."""
    in_seconds = figures.in_seconds(cases)
    scale, unit = (1e3, "seconds") if in_seconds else (1.0, "ms")
    columns: list[Column] = [
        ("provider", lambda name, *_: f"`{name}`"),
        (unit, lambda name, case, _: number(_over(figures.median(case, name, figures.mode(case)), scale))),
        ("20 to 80 %", lambda _, case, x: _quantiles(figures.timing(x, figures.mode(case)), scale)),
        ("/ ours", _over_ours),
        ("/ products", _over_products),
        ("FLOPs, NVH", lambda *given: number(given[2].get("flops_nvh"))),
        ("extra MiB", lambda name, _, x: "" if figures.is_products(name) else number(x.get("extra_mib"))),
        ("logp", _error("logp_mean")),
        ("mean divergence", lambda *given: "" if given[1].get("divergence") is None else _error("loss")(*given)),
        ("note", lambda *given: labels.tidy(given[2].get("note") or "")),
    ]
    cells = []
    for title, case in cases.items():
        ran = {name: x for name, x in figures.providers(case).items() if figures.ran(x)}
        for i, (name, x) in enumerate(ran.items()):
            cells.append([title if i == 0 else "", *(cell(name, case, x) for _, cell in columns)])
    text = [*labels.about_all(cases), "", *markdown(["case", *(head for head, _ in columns)], cells)]
    return [*text, *_missing(cases)]


def _missing(cases: dict[str, Case]) -> list[str]:
    """A line for each reason not to have run, with the providers and the cases."""
    found: dict[str, list[str]] = {}
    for title, case in cases.items():
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                reason = ": ".join(str(y) for y in (x.get("status", "not run"), x.get("reason")) if y)
                found.setdefault(f"`{name}`: {labels.tidy(reason)}", []).append(title)
    lines = [f"- {what}" + (f" ({', '.join(titles)})" if len(cases) > 1 else "") for what, titles in found.items()]
    return ["", *lines] if lines else []


def _over(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _quantiles(found: dict[str, Any] | None, scale: float) -> str:
    if not found or found.get("p20") is None or found.get("p80") is None:
        return ""
    return f"{number(found['p20'] / scale)} to {number(found['p80'] / scale)}"


def _over_ours(name: str, case: Case, _: Provider) -> str:
    """How many times faster ours is."""
    found = figures.over(case, name, OURS)
    return of_products(found) if figures.is_products(name) else times(found)


def _over_products(name: str, case: Case, _: Provider) -> str:
    """The provider's time over that of the case's products: nobody who does more is faster than they are."""
    found = figures.over(case, name, PRODUCTS)
    return NOISE if found is not None and found < 1 else times(found)


def _error(which: str) -> Callable[[str, Case, Provider], str]:
    """One of the errors, absolute or relative as it is."""
    return lambda _name, _case, x: small((x.get("errors") or {}).get(which))


def _overview(cases: dict[str, Case]) -> list[str]:
    """A line a case: the time of ours, the others' over it, and the operations and memory of ours and of TRL's head."""
    unit, scale = ("seconds", 1e3) if figures.in_seconds(cases) else ("ms", 1.0)
    first = next(iter(cases.values()))
    busy = [case["cpu_of_others"] for case in cases.values() if case.get("cpu_of_others") is not None]
    cells = []
    for title, case in cases.items():
        own = {key: x for key, x in case.items() if key in CONDITIONS or first.get(key, ...) == x}
        ours = figures.median(case, OURS, figures.mode(case))
        pair = [figures.providers(case).get(name, {}) for name in (OURS, "trl")]
        over = {name: figures.over(case, name, OURS) for name in COMPARED}
        cells.append(
            [
                title,
                labels.about({key: x for key, x in case.items() if key not in own}),
                number(_over(ours, scale)),
                *(of_products(x) if figures.is_products(name) else times(x) for name, x in over.items()),
                *(number(x.get("flops_nvh")) for x in pair),
                *(number(x.get("extra_mib")) for x in pair),
            ]
        )
    head = ["case", "which is", f"ours, {unit}", *(f"{name} / ours" for name in COMPARED)]
    head += ["NVH, ours", "TRL", "MiB, ours", "TRL"]
    about = f"{labels.about({key: x for key, x in first.items() if key not in CONDITIONS})}, but for what a case names."
    about += f" Other processes used at most {share(max(busy))} of the cores meanwhile." if busy else ""
    return [about, "", *markdown(head, cells)]


def _scaling(series: dict[str, dict[str, Case]]) -> list[str]:
    """A line for each point of each axis: the time and memory of ours, and the others' over them."""
    every = {name: case for cases in series.values() for name, case in cases.items()}
    names = [name for name in figures.names(every) if name != OURS and not figures.is_products(name)]
    cells = []
    for axis, cases in series.items():
        for i, case in enumerate(cases.values()):
            at = share(figures.along(case, axis)) if axis == "share" else str(case[axis])
            ours = figures.median(case, OURS, figures.mode(case))
            mib = figures.extra_mib(case, OURS)
            row = ["" if i else AXES[axis], at, number(ours), number(mib)]
            row += [times(figures.over(case, name, OURS)) for name in names]
            cells.append([*row, *(times(ratio(figures.extra_mib(case, name), mib)) for name in names)])
    head = ["axis", "value", "ours, ms", "ours, MiB", *(f"{name} / ours, time" for name in names)]
    about = {key: x for key, x in labels.common(every).items() if key != "rounds"}
    return [f"{labels.about(about)}.", "", *markdown([*head, *(f"{name} / ours, MiB" for name in names)], cells)]


def _memory(cases: dict[str, Case], data: dict[str, Any]) -> list[str]:
    """MiB of each provider, a line a number of tokens, and TRL's and all logits over ours."""
    ordered = sorted(cases.values(), key=lambda case: int(case["n"]))
    names = figures.names(cases)
    over = [name for name in ("trl", "eager") if name in names]
    head = ["tokens", *(f"{labels.label(name, data.get('versions'))}, MiB" for name in names)]
    head += [f"{labels.brief_name(name)} / ours" for name in over]
    cells = []
    for case in ordered:
        mib = {name: figures.extra_mib(case, name) for name in names}
        ratios = [times(ratio(mib[name], mib.get(OURS))) for name in over]
        cells.append([f"{case['n']:,}", *(number(mib[name]) for name in names), *ratios])
    about = {key: x for key, x in labels.common(cases).items() if key not in ("rounds", "products_nvh", "model")}
    text = [f"{labels.about(about)}; sequences of {', '.join(str(x['t']) for x in ordered)} tokens in turn."]
    text += [
        "The size of the logits does not depend on H; that of the weight and of its gradient does. So a ratio at a",
        "small H is not that of a model: [memory.md](memory.md#real-models) has those of models, computed, with Liger.",
    ]
    return [*text, "", *markdown(head, cells), *_missing(cases)]


def _accuracy(cases: dict[str, Case]) -> list[str]:
    """A line for each provider: its errors at each size of the logits."""
    ordered = dict(sorted(cases.items(), key=lambda item: figures.by_logits(item[1])))
    names = [name for name in figures.names(ordered) if not figures.is_products(name)]
    kinds: dict[str, Callable[[float | None], str]] = {"logp_mean": small, "d_hidden": small, "ratio_off": _percent}
    words = {"logp_mean": "logp", "d_hidden": "d hidden", "ratio_off": "ratios off"}
    head = ["provider", *(f"{words[kind]}, {title}" for kind in kinds for title in ordered)]
    cells = []
    for name in names:
        found = [form(figures.error(case, name, kind)) for kind, form in kinds.items() for case in ordered.values()]
        if any(found):
            cells.append([f"`{name}`", *found])
    return [
        "Each provider against float64, at the same hidden states and weight. Training does not make this comparison:",
        "there old and new log-probabilities come from one head, whose rounding they share, and a policy that did not",
        "move has ratios of 1 with any of them. The table says how far a head is from log-probabilities made",
        "elsewhere, such as those of a sampler with an fp32 head. logp: the mean error; d hidden: relative, in norm;",
        "ratios off: the share of the tokens whose ratio is off by more than 1 %.",
        "",
        f"{labels.about(labels.common(ordered))}.",
        "",
        *markdown(head, cells),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else share(value)


def _goal(goal: dict[str, Any]) -> list[str]:
    found = [goal.get(name) for name in GOAL]
    return [number(x) if isinstance(x, float) else labels.tidy("" if x is None else x) for x in found]
