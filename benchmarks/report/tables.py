"""The results as markdown, each table with its conditions, read from the JSON and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import columns, figures, labels, step
from benchmarks.report.columns import COSTS, ERRORS, NOTE, markdown, number, rows_of, table, time_columns
from benchmarks.report.figures import Case, ratio
from benchmarks.report.labels import share

NOTES = (
    "Time: the median of the rounds, providers in turn, and the 20 and 80 % quantiles (of two or three rounds: the "
    "least and the most). / ours: over the time of `ours`, that is how many times faster ours is. / products: over "
    "that of `products`, the case's own matrix products alone, the limit of whoever skips none of them; within noise: "
    "measured as slower than what does more.",
    "FLOPs: counted by `torch.utils.flop_counter`, in NVH (one product of the N tokens that count with a head of V x H "
    "is 2); blank where it does not see them all. Extra memory: the peak beyond the inputs and the returned gradients.",
    "Errors: against float64 on the same inputs; absolute for loss, log-probabilities and entropies, relative in norm "
    "for divergences and gradients; logp: the mean.",
)
TITLES = {"main": "Main case", "shapes": "Shapes", "workloads": "Workloads", "distill": "Distillation"}
AXES = {"n": "N", "v": "V", "share": "rows with gradient"}
TRAINING = ("generation", "head", "body", "optimizer", "other")
MODEL = ("model", "head, V x H", "trainer")
GOAL = {"case": "case", "figure": "figure", "goal": "goal", "value": "measured", "verdict": "verdict"}
SHOWN = {"main": "time"}  # the figure of a case of the main part
Section = tuple[str, tuple[str, ...], list[str]]  # title, the plots that show it, its lines


def lines(data: dict[str, Any]) -> list[str]:
    """All of it: the conditions, then each part."""
    text = _head(data)
    for title, _, body in _sections(data):
        text += ["", f"## {title}", "", *body]
    return text


def write(data: dict[str, Any], path: Path, plots: Sequence[Path] = ()) -> None:
    """Write a markdown page; each of `plots` (as `plots.render` returns them) stands above the table of its figures."""
    text = ["# Benchmarks", "", "Written by `python -m benchmarks`; do not edit.", "", *_head(data)]
    sections = _sections(data)
    text += ["", *(f"- [{title}](#{labels.slug(title)})" for title, *_ in sections)]
    shown: set[Path] = set()
    for title, stems, body in sections:
        text += ["", f"## {title}", ""]
        for plot in plots:
            if plot.stem in stems and plot not in shown:
                shown.add(plot)
                place = Path(os.path.relpath(plot.resolve(), path.resolve().parent)).as_posix()
                text += [f"![{title}]({place})", ""]
        run = figures.of_run(data, stems[0]) if stems else data
        text += [*body, "", f"Conditions: {labels.footer(run)}."]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def _head(data: dict[str, Any]) -> list[str]:
    """Conditions, what the columns mean, and which provider is what."""
    known = [[f"`{name}`", labels.label(name, data.get("versions"))] for name in figures.names(data.get("cases") or {})]
    text = [f"- {line}" for line in labels.conditions(data)]
    for note in NOTES:
        text += ["", note]
    return [*text, "", *markdown(["provider", "which is"], known)]


def _sections(data: dict[str, Any]) -> list[Section]:
    """Those of which there are results."""
    found: list[Section] = []
    if step.scenes(data):
        found.append(("A whole training step", ("step",), step.lines(data["step"])))
    if peaks := figures.of_part(data, "memory"):
        found.append(("Memory against tokens", ("memory",), _memory(peaks, data)))
    if len(compared := figures.compared(data)) > 1:
        found.append(("All cases", ("cases",), _overview(compared)))
    for part, title in TITLES.items():
        cases = figures.of_part(data, part)
        if part == "main":
            for name, case in cases.items():
                stems = (SHOWN[name],) if name in SHOWN else ()
                found.append((f"{title}: {name}", stems, _timed({name: case})))
        elif cases:
            overview = [] if cases.keys() <= compared.keys() else [*_overview(cases), ""]
            found.append((title, (), [*overview, *_timed(cases)]))
    for axis, cases in figures.series(data):
        found.append((f"Scaling: {AXES.get(axis, axis)}", (), _scaling(axis, cases)))
    if accuracy := figures.of_part(data, "accuracy"):
        found.append(("Accuracy", (), _accuracy(accuracy)))
    if (data.get("training") or {}).get("models"):
        found.append(("The head in a training step", ("training",), _training(data["training"])))
    if data.get("goals"):
        found.append(("Goals", (), markdown(list(GOAL.values()), [_goal(goal) for goal in data["goals"]])))
    return found


def _memory(cases: dict[str, Case], data: dict[str, Any]) -> list[str]:
    """MiB of each provider, a line a number of tokens, and TRL's and all logits over ours; why a figure is missing."""
    ordered = sorted(cases.values(), key=lambda case: int(case["n"]))
    names = figures.names(cases)
    over = [name for name in ("trl", "eager") if name in names]
    head = ["tokens", *(f"{labels.label(name, data.get('versions'))}, MiB" for name in names)]
    head += [f"{labels.brief_name(name)} / ours" for name in over]
    cells, missing = [], []
    for case in ordered:
        mib = {name: figures.extra_mib(case, name) for name in names}
        ratios = [columns.times(ratio(mib[name], mib.get(figures.OURS))) for name in over]
        cells.append([f"{case['n']:,}", *(number(mib[name]) for name in names), *ratios])
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                missing.append(f"- {case['n']:,} tokens, {labels.brief_name(name)}: {labels.tidy(x.get('reason', ''))}")
    about = {key: x for key, x in labels.common(cases).items() if key not in ("rounds", "products_nvh", "model")}
    text = [f"{labels.about(about)}; sequences of {', '.join(str(x['t']) for x in ordered)} tokens in turn."]
    text += [
        "Logits do not depend on H, but what every head holds of the weight and its gradient does, so a ratio at a",
        "small H is not that of a model: [memory.md](memory.md#real-models) has those, computed, with Liger.",
    ]
    return [*text, "", *markdown(head, cells), *([""] if missing else []), *missing]


def _timed(cases: dict[str, Case]) -> list[str]:
    """What each case is, and a row for each of its providers."""
    rows = rows_of(cases, lambda name, _: name if len(cases) > 1 else "")
    cells = [("case", columns.lead), ("provider", columns.name), *time_columns(rows), *COSTS, *ERRORS, NOTE]
    return [*labels.about_all(cases), "", *table(rows, cells)]


def _overview(cases: dict[str, Case]) -> list[str]:
    """A line a case: the time of ours, and the others' over it."""
    unit, scale = ("seconds", 1e3) if figures.in_seconds(cases) else ("ms", 1.0)
    medians = {}
    for title, case in cases.items():
        mode = (figures.timed_modes(case) or ["full"])[0]
        medians[title] = {name: figures.median(case, name, mode) for name in figures.providers(case)}
    others = [name for name in figures.names(cases) if name != figures.OURS]
    others = [name for name in others if any(ratio(x.get(name), x.get(figures.OURS)) for x in medians.values())]
    cells = []
    for title, x in medians.items():
        ours = x.get(figures.OURS)
        over = [_ratio(name, ratio(x.get(name), ours)) for name in others]
        cells.append([title, number(None if ours is None else ours / scale), *over])
    return markdown(["case", f"ours, {unit}", *(f"{name} / ours" for name in others)], cells)


def _ratio(name: str, value: float | None) -> str:
    return columns.of_products(value) if figures.is_products(name) else columns.times(value)


def _scaling(axis: str, cases: dict[str, Case]) -> list[str]:
    """A row for each point and provider."""
    rows = rows_of(cases, lambda _, case: share(figures.along(case, axis)) if axis == "share" else str(case[axis]))
    cells = [
        (AXES.get(axis, axis), columns.lead),
        ("provider", columns.name),
        *time_columns(rows),
        *COSTS,
        *ERRORS,
        NOTE,
    ]
    return [*labels.about_all(cases), "", *table(rows, cells)]


def _accuracy(cases: dict[str, Case]) -> list[str]:
    """A table for each size of the logits."""
    text = [
        "Each provider against float64, at the same hidden states and weight. Training does not make this comparison:",
        "there old and new log-probabilities come from one head, whose rounding they share, and a policy that did not",
        "move has ratios of 1 with any of them. The tables say how far a head is from log-probabilities made",
        "elsewhere, such as those of a sampler with an fp32 head.",
        "",
        *labels.about_all(cases),
    ]
    for name, case in sorted(cases.items(), key=lambda item: figures.by_logits(item[1])):
        rows = [row for row in rows_of({name: case}, lambda *_: "") if not figures.is_products(row.name)]
        text += ["", f"**{name}**", "", *table(rows, [("provider", columns.name), *columns.ALL_ERRORS, NOTE])]
    return text


def _training(training: dict[str, Any]) -> list[str]:
    """Seconds where they were measured, operations where they were counted, and the share of each part in the sum."""
    met = _training_parts(training)
    cells = []
    for x in training["models"]:
        for what, unit in (("seconds", "seconds"), ("flops", "TFLOP")):
            parts = {name: value for name, value in (x.get(what) or {}).items() if value is not None}
            if parts:
                whole, scale = sum(parts.values()), 1.0 if what == "seconds" else 1e12
                row = [*_model(x), x.get("kind", ""), number(x.get("tokens")), unit]
                row += [_part(parts.get(name), whole, scale) for name in met]
                update = ratio(parts.get("head"), whole - parts.get("generation", 0.0))
                row.append("" if update is None else share(update))
                cells.append([*row, number(x.get("peak_mib")) if what == "seconds" else ""])
    head = [*MODEL, "kind", "tokens", "of", *met, "head, without generation", "peak MiB"]
    missing = (training.get("not_measured") or {}).items()
    said = [f"- {key}: {labels.tidy(value, 900)}" for key, value in (training.get("conditions") or {}).items()]
    said += [f"- no measurement of {key}: {labels.tidy(value)}" for key, value in missing]
    return [*said, *([""] if said else []), *markdown(head, cells), *_variants(training)]


def _variants(training: dict[str, Any]) -> list[str]:
    """The head's share where the step is another."""
    cells = [
        [
            *_model(x),
            "yes" if variant.get("gradient_checkpointing") else "no",
            share(variant.get("live_share", 1.0)),
            share(variant["head_share"]),
            share(variant["head_share_of_update"]),
        ]
        for x in training["models"]
        for variant in x.get("variants") or []
    ]
    head = [*MODEL, "gradient checkpointing", "tokens with gradient", "head", "head, without generation"]
    return ["", "Variants, computed:", "", *markdown(head, cells)] if cells else []


def _model(model: dict[str, Any]) -> list[str]:
    size = " x ".join(str(value) for value in model.get("head") or [])
    return [labels.tidy(model.get("model", "")), size, labels.tidy(model.get("trainer", ""))]


def _training_parts(training: dict[str, Any]) -> list[str]:
    met = {name for x in training["models"] for what in ("seconds", "flops") for name in x.get(what) or {}}
    return [*(name for name in TRAINING if name in met), *sorted(met.difference(TRAINING))]


def _part(value: float | None, whole: float, scale: float) -> str:
    return "" if value is None else f"{number(value / scale)} ({share(value / whole if whole else 0.0)})"


def _goal(goal: dict[str, Any]) -> list[str]:
    found = [goal.get(name) for name in GOAL]
    return [number(x) if isinstance(x, float) else labels.tidy("" if x is None else x) for x in found]
