"""The section of the page on the whole optimizer step, as `benchmarks.step` and `benchmarks.groups` measure it."""

from __future__ import annotations

from typing import Any

from benchmarks import figures, labels
from benchmarks.cells import markdown, number, small, times
from benchmarks.figures import ONE_GROUP, REGROUPED, STOCK, Scene
from benchmarks.labels import share

SHARES = ("sequences/gradient", "tokens/computed", "tokens/gradient")
SHOWN = SHARES[1:]


def is_wrong(data: dict[str, Any]) -> bool:
    """True if a variant failed or is further from stock TRL than rounding, or a tree is wrong."""
    step = data.get("step") or {}
    variants = [x for scene in figures.scenes(data).values() for x in scene["variants"].values()]
    trees = [*_shapes(step).values(), *([step["turns"]] if "turns" in step else [])]
    return any(x.get("status") != "ok" for x in (*variants, *trees))


def lines(step: dict[str, Any]) -> list[str]:
    """A table for each scene; the distance of the parameters after SGD; groups and turns."""
    text = [
        "The columns: CPU seconds of a step; how many times as fast as stock TRL: the median of the rounds' ratios,",
        "with the least and the most of them;",
        "MiB that the graph of the largest micro-batch saves; shares of padded tokens; the largest differences from",
        "stock TRL. [How it is measured](measuring.md#the-training-step); [the options](training-step.md).",
    ]
    for i, (name, scene) in enumerate(step["scenes"].items()):
        count, rounds = labels.count(scene["steps"] - 1, "step"), labels.count(scene["rounds"], "round")
        first = next(iter(step["scenes"].values()))["about"]
        about = _what_differs(scene["about"], first) if i else first
        text += ["", f"**{name}**: {about}; {count} in {rounds}{_busy(scene)}", ""]
        head = ["variant", "seconds", "stock / it", "saved MiB", *SHOWN, "loss", "gradient norm", "metrics", "failed"]
        text += markdown(head, [_variant(scene, x) for x in scene["variants"]])
        if speed := figures.faster(scene, REGROUPED, than=ONE_GROUP):
            text += ["", f"*{REGROUPED}* is {_with_range(speed)} times as fast as *{ONE_GROUP}*."]
    apart = {name: x["parameters"] for name, x in (step.get("sgd") or {}).items() if name != STOCK}
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        text += [
            "",
            "After plain SGD at toy size the parameters of every variant differ from stock TRL's by at most "
            f"{small(apart[worst])} of the distance that they moved ({worst}).",
        ]
    return [*text, *_groups(step), *_turns(step)]


def _shapes(step: dict[str, Any]) -> dict[str, Any]:
    """The shapes of the groups that were measured, by name."""
    found: dict[str, Any] = (step.get("groups") or {}).get("shapes") or {}
    return found


def _groups(step: dict[str, Any]) -> list[str]:
    """A line for each shape of a group: the time of both layouts, and the speed that the necessary work allows."""
    cells = []
    for name, x in _shapes(step).items():
        seconds, apart = x.get("seconds") or {}, x.get("differences") or {}
        cells.append(
            [
                name,
                *(number(seconds.get(layout), 3) for layout in ("padded", "tree")),
                *(times(x.get(key)) for key in ("speed", "allowed", "reached")),
                share(round(x["computed"], 3)) if "computed" in x else "",
                *(small(apart.get(key)) for key in ("loss", "gradient")),
                _failed(x),
            ]
        )
    if not cells:
        return []
    groups = step["groups"]
    about = f"**one group**: {groups['about']}; {labels.count(groups['rounds'], 'round')}{_busy(groups)}"
    head = ["shape", "padded, seconds", "tree, seconds", "padded / tree", "allowed", "reached", SHOWN[0]]
    return [
        "", about, "",
        "CPU seconds of a forward and backward of `causal_lm_loss`, with a prompt of P tokens and G completions of C.",
        "Allowed: padded / tree by the multiplications that are necessary; reached: the share of it.",
        "", *markdown([*head, "loss", "gradient", "failed"], cells),
    ]  # fmt: skip


def _turns(step: dict[str, Any]) -> list[str]:
    """A sentence on the conversation given turn by turn."""
    if "computed" not in (turns := step.get("turns") or {}):
        return []
    return [
        "",
        f"A conversation of {turns['count']} turns, a sample for each, whose template leaves out earlier thinking: of "
        f"{turns['padded']:,} padded tokens {turns['computed']:,} are computed ({share(round(turns['share'], 3))}); "
        f"{turns['prefixes']:,} prefixes are distinct.",
    ]


def _what_differs(about: str, first: str) -> str:
    """The clauses of a scene's description that those of the first scene lack."""
    known = {clause for part in first.split("; ") for clause in part.split(", ")}
    own = [x for part in about.split("; ") for x in part.split(", ") if x not in known]
    return ", ".join(own) or "as the first"


def _variant(scene: Scene, name: str) -> list[str]:
    x = scene["variants"][name]
    saved, shares, apart = (x.get(key) or {} for key in ("saved_mib", "shares", "differences"))
    found = figures.faster(scene, name)
    return [
        name,
        number(x.get("seconds"), 3),
        _with_range(found) if found else "",
        number(saved.get("max"), 3),
        *("" if key not in shares else share(round(shares[key], 3)) for key in SHOWN),
        *(small(apart.get(key)) for key in ("loss", "grad_norm", "metrics")),
        _failed(x),
    ]


def _with_range(ratio: tuple[float, float, float]) -> str:
    """The median of the rounds' ratios, and in brackets the least and the most of them."""
    return "{} ({} to {})".format(*map(times, ratio))


def _failed(x: dict[str, Any]) -> str:
    return "" if x["status"] == "ok" else labels.tidy(f"{x['status']}: {x.get('reason', '')}".strip(": "))


def _busy(found: dict[str, Any]) -> str:
    others = found.get("cpu_of_others")
    return "" if others is None else f"; other processes used {share(others)} of the cores meanwhile"
