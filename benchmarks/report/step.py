"""The whole optimizer step: its tables, and the figures that its plot draws (`benchmarks.step` measures them)."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report import labels
from benchmarks.report.columns import markdown, number, small, times
from benchmarks.report.labels import share

STOCK, DEFAULTS = "stock TRL", "defaults"
SHARES = ("sequences/gradient", "tokens/computed", "tokens/gradient")
HEAD = (
    "variant", "seconds", "stock / it", "saved MiB, mean", "most", *SHARES, "loss", "gradient norm", "metrics",
    "options, or what failed",
)  # fmt: skip
Scene = dict[str, Any]


def scenes(data: dict[str, Any]) -> dict[str, Scene]:
    """The scenes of the results, by name."""
    return (data.get("step") or {}).get("scenes") or {}


def timed(scene: Scene) -> dict[str, float]:
    """CPU seconds of a step of each variant that ran and was right."""
    found = scene["variants"].items()
    return {name: x["seconds"] for name, x in found if x["status"] == "ok" and x.get("seconds")}


def faster(scene: Scene, name: str) -> tuple[float, float, float] | None:
    """Seconds of stock TRL over those of a variant; the least and the most of the rounds."""
    found = timed(scene)
    if STOCK not in found or name not in found:
        return None
    rounds = zip(*(scene["variants"][x]["samples"] for x in (STOCK, name)), strict=False)
    ratios = [statistics.fmean(stock) / statistics.fmean(own) for stock, own in rounds]
    return found[STOCK] / found[name], min(ratios), max(ratios)


def is_wrong(data: dict[str, Any]) -> bool:
    """True if a variant failed, or is further from stock TRL than rounding."""
    return any(x["status"] != "ok" for scene in scenes(data).values() for x in scene["variants"].values())


def lines(step: dict[str, Any]) -> list[str]:
    """Markdown: the conditions, a table for each scene, and the parameters after SGD."""
    text = [f"- {name}: {labels.tidy(words, 900)}" for name, words in step["conditions"].items()]
    for name, scene in step["scenes"].items():
        others = scene.get("cpu_of_others")
        busy = "" if others is None else f"; other processes used {share(others)} of the cores meanwhile"
        steps, rounds = scene["steps"] - 1, labels.count(scene["rounds"], "round")
        text += ["", f"**{name}**: {scene['about']}; {labels.count(steps, 'step')} in {rounds}{busy}", ""]
        text += markdown(HEAD, [_row(scene, x) for x in scene["variants"]])
    if sgd := step.get("sgd"):
        head = ["after SGD", "parameters", "loss", "gradient norm"]
        cells = [[name, *(small(x[key]) for key in ("parameters", "loss", "grad_norm"))] for name, x in sgd.items()]
        text += ["", *markdown(head, cells)]
    return text


def _row(scene: Scene, name: str) -> list[str]:
    x = scene["variants"][name]
    saved, shares, apart = (x.get(key) or {} for key in ("saved_mib", "shares", "differences"))
    found = faster(scene, name)
    over = "" if found is None else f"{times(found[0])} ({times(found[1])} to {times(found[2])})"
    options = ", ".join(f"`{key}={value!r}`" for key, value in (x.get("options") or {}).items())
    failed = "" if x["status"] == "ok" else labels.tidy(f"{x['status']}: {x.get('reason', '')}".strip(": "))
    return [
        name,
        number(x.get("seconds"), 3),
        over,
        *(number(saved.get(key), 3) for key in ("mean", "max")),
        *("" if key not in shares else share(round(shares[key], 3)) for key in SHARES),
        *(small(apart.get(key)) for key in ("loss", "grad_norm", "metrics")),
        failed or options,
    ]
