"""The share of ratios that are off by more than 1 %, by the size of the logits; who is alike shares a row of bars."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case
from benchmarks.report.plots import style

ROW = 1.35  # inches
SHADES = (0.45, 0.72, 1.0)  # light to full with the logits
Shares = tuple[float, ...]


def draw(data: dict[str, Any]) -> Figure | None:
    """None: no errors of ours were measured."""
    cases = ordered(data)
    groups = alike(cases)
    if not groups or not any(figures.OURS in names for names in groups.values()):
        return None
    said = {key: value for key, value in labels.common(cases).items() if key not in ("rounds", "scale")}
    tokens = said.get("counted") or said.get("n")
    note = f"Ratios of the policy to itself in float64, of {tokens} tokens; lines: two standard errors of such a share."
    about = f"Importance ratios that differ by more than 1 % from float64's; {labels.brief(said)}"
    figure = style.sheet(data, claim(data), about, ROW * len(groups) + 0.6, [note])
    axes = figure.subplots()
    height = 0.84 / len(cases)
    for y, (shares, names) in enumerate(groups.items()):
        hue = style.color(names[0]) if len(names) == 1 else style.SEVERAL
        for i, (case, share) in enumerate(zip(cases.values(), shares, strict=True)):
            at = y + (i - (len(cases) - 1) / 2) * height
            shade = SHADES[min(i, len(SHADES) - 1)]
            axes.barh(at, 100 * share, height=0.86 * height, color=hue, alpha=shade)
            error = 200 * math.sqrt(share * (1 - share) / tokens) if tokens else 0.0
            axes.plot([100 * share - error, 100 * share + error], [at, at], color=style.INK, linewidth=2)
            axes.annotate(
                f"{100 * share:.0f} %  at logits to {case.get('scale', 0):g}", (100 * share + error, at), (9, 0),
                textcoords="offset points", va="center", size=style.TEXT - 2,
            )  # fmt: skip
    style.rows(axes, [_words(names) for names in groups.values()], [figures.OURS in x for x in groups.values()])
    axes.set_xlim(0, 118)
    axes.set_xticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.grid(axis="x")
    return figure


def claim(data: dict[str, Any]) -> str:
    """The title: the worst share of TRL's head, and ours."""
    cases = ordered(data)
    worst = {
        name: max(
            (x for case in cases.values() if (x := figures.error(case, name, "ratio_off")) is not None), default=None
        )
        for name in ("trl", figures.OURS)
    }
    if worst["trl"] is None or worst[figures.OURS] is None:
        return "How exact: ratios that are off by more than 1 %"
    dtype = labels.DTYPES.get(labels.common(cases).get("dtype", ""), "")
    ours = "none" if worst[figures.OURS] == 0 else labels.share(worst[figures.OURS])
    return f"{dtype}: up to {100 * worst['trl']:.0f} % of TRL's ratios are off, of ours {ours}"


def ordered(data: dict[str, Any]) -> dict[str, Case]:
    """The cases with logits of some size, the smallest first."""
    found = {name: x for name, x in figures.of_part(data, "accuracy").items() if not x.get("peaked")}
    return dict(sorted(found.items(), key=lambda item: figures.by_logits(item[1])))


def alike(cases: dict[str, Case]) -> dict[Shares, list[str]]:
    """Providers by their shares of the ratios that are off, in whole percents, the most exact first."""
    groups: dict[Shares, list[str]] = {}
    for name in figures.names(cases):
        shares = [figures.error(case, name, "ratio_off") for case in cases.values()]
        if not figures.is_products(name) and None not in shares and ("/" not in name and "@" not in name):
            groups.setdefault(tuple(round(x or 0.0, 2) for x in shares), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: sum(item[0])))


def _words(names: list[str]) -> str:
    """Two names a line."""
    found = [labels.brief_name(x) for x in names]
    return "\n".join(", ".join(found[i : i + 2]) for i in range(0, len(found), 2))
