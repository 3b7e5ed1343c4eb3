"""Extra memory of one loss against tokens: a line for each provider, its name at its end."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case, ratio
from benchmarks.report.plots import style

MIB = {64: "64 MiB", 256: "256 MiB", 1024: "1 GiB", 4096: "4 GiB", 16384: "16 GiB", 65536: "64 GiB"}
APART = 0.3  # least distance of two labels, in factors of e on an axis of some 6 of them


def draw(data: dict[str, Any]) -> Figure | None:
    """None: memory was not measured on several numbers of tokens."""
    cases = ordered(data)
    lines = {name: line for name in figures.names(cases) if len(line := along(cases, name)) > 1}
    if len(cases) < 2 or figures.OURS not in lines:
        return None
    about = {key: x for key, x in labels.common(cases).items() if key != "model"}  # of which there is the V only
    subtitle = f"Peak memory of one loss beyond its inputs and gradients; {labels.shape(about)}"
    figure = style.sheet(figures.of_run(data, "memory"), claim(data), subtitle, 5.3, notes(data, about))
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    for name, line in lines.items():
        dashes = (0, (2.5, 1.5)) if figures.is_ours(name) and name != figures.OURS else "solid"
        width = 5.0 if name == figures.OURS else 3.5
        axes.plot(
            *zip(*line, strict=True), color=style.color(name), linewidth=width, linestyle=dashes, marker="o",
            markersize=8, zorder=4 if figures.is_ours(name) else 3,
        )  # fmt: skip
    _scales(axes, [case["n"] for case in cases.values()], [y for line in lines.values() for _, y in line])
    _names(axes, lines)
    axes.set_xlabel("tokens")
    return figure


def claim(data: dict[str, Any]) -> str:
    """The title: how much leaner ours is than the fullest peer at the most tokens that it could be measured with."""
    cases = ordered(data)
    last = max(case["n"] for case in cases.values())
    found = []
    for name in ("trl", "eager"):
        line = dict(along(cases, name))
        if line and (over := ratio(line[max(line)], dict(along(cases, figures.OURS)).get(max(line)))):
            found.append((max(line), over, f"{labels.brief_name(name)} {'takes' if name == 'trl' else 'take'}"))
    if not found:
        return f"Extra memory of one loss, up to {last:,} tokens"
    tokens, over, who = max(found, key=lambda x: x[:2])
    return f"At {tokens:,} tokens {who} {style.times(over)} times our memory"


def notes(data: dict[str, Any], about: Case) -> list[str]:
    """What the figure does not show: why H is small, what hides there, and who no longer fitted."""
    said = [f"H is {about.get('h')} to make it cheap: logits do not depend on H."]
    main = figures.of_part(data, "main").get("main", {})
    theirs, ours = (figures.extra_mib(main, name) for name in ("liger_grpo", figures.OURS)) if main else (None, None)
    if theirs and ours:
        said[0] += (
            f" Copies of the weight's gradient do, and hardly show: at H {main['h']} and {main['n']} tokens Liger takes"
            f" {theirs:.0f} MiB, grpo_kernels {ours:.0f} MiB."
        )
    for case in ordered(data).values():
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                said.append(f"No point of {labels.brief_name(name)} at {case['n']:,}: {labels.tidy(x.get('reason'))}.")
    return said


def ordered(data: dict[str, Any]) -> dict[str, Case]:
    """The cases of the part, the fewest tokens first."""
    return dict(sorted(figures.of_part(data, "memory").items(), key=lambda item: item[1]["n"]))


def along(cases: dict[str, Case], name: str) -> list[tuple[int, float]]:
    """(tokens, MiB) of a provider, where it was measured."""
    found = [(case["n"], figures.extra_mib(case, name)) for case in cases.values()]
    return [(n, mib) for n, mib in found if mib]


def _scales(axes: Axes, tokens: list[int], mib: list[float]) -> None:
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xlim(0.85 * min(tokens), 5.5 * max(tokens))
    shown = {y: words for y, words in MIB.items() if 0.5 * min(mib) <= y <= 1.5 * max(mib)}
    axes.set_yticks(list(shown), list(shown.values()))
    axes.set_ylim(0.6 * min(mib), 1.6 * max(mib))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator(list(shown)))
    axes.grid(axis="y")
    axes.spines[["left", "bottom"]].set_visible(False)


def _names(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    """At the end of each line; those that would lie on each other are moved up."""
    height = 0.0
    for name, line in sorted(lines.items(), key=lambda item: item[1][-1][1]):
        n, mib = line[-1]
        place = max(mib, height)
        height = place * (1 + APART)
        set_to = name.partition("@")[2] if figures.is_ours(name) else ""
        words = f"set to {set_to} MiB: {_size(mib)}" if set_to else f"{labels.brief_name(name)}: {_size(mib)}"
        axes.annotate(
            words, (n, place), (12, 0), textcoords="offset points", va="center", color=style.color(name),
            weight="bold" if figures.is_ours(name) else "normal", size=style.TEXT - 1,
            bbox={"facecolor": style.CARD, "edgecolor": "none", "pad": 2},
        )  # fmt: skip


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1000 else f"{mib:.0f} MiB"
