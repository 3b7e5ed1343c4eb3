"""The results as markdown: claims, and tables with their conditions, read from the JSON and from nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, words
from benchmarks.figures import (
    ALL_OPTIONS,
    DEFAULTS,
    ONE_GROUP,
    OURS,
    PRODUCTS,
    REGROUPED,
    STOCK,
    Case,
    ratio,
)
from benchmarks.words import markdown, multiple, number, share, small, times, with_range

NOTES = (
    "**Time**: the median of the rounds, providers in turn, and the 20 and 80 % quantiles (of two or three rounds: the "
    "least and the most).",
    "**/ ours**: the provider's time over that of `ours`. At 2, ours is twice as fast.",
    "**/ products**: its time over that of `products`, the matrix products of the case without any other work. No "
    'provider that does all of these products can be faster. "Within noise": these products were '
    "measured as slower than a provider that does more than them.",
    "**NVH**: the unit of floating-point operations; one product of the N tokens that count with a head of V x H is 2. "
    "Counted by `torch.utils.flop_counter`; blank where it does not see them all.",
    "**Extra memory**: the peak beyond the inputs and the returned gradients.",
    "**logp**: the mean error of the log-probabilities against float64.",
    "More: [how it is measured](measuring.md).",
)
READING = (
    "[How to read the tables](#how-to-read-the-tables), [conditions](#conditions-of-the-main-run)."
)
COMPARED_PARTS = ("main", "shapes", "workloads")
AXES = {"n": "N", "v": "V", "share": "rows with gradient"}
COMPARED = (PRODUCTS, "eager", "trl")  # with ours, over all cases
CONDITIONS = (
    "products_nvh",
    "cpu_of_others",
    "rounds",
    "counted",
    "status",
)  # of a case, beside what is computed
NOISE = "within noise"  # a limit that was measured as slower than what does more
SHARES = ("sequences/gradient", "tokens/computed", "tokens/gradient")  # that our trainer logs


def lines(data: dict[str, Any], pictures: Mapping[str, str] | None = None) -> list[str]:
    """The page: the summary, each part with its conditions, then how to read the tables, and the main run's conditions.

    Args:
        pictures: where the figures are, by part, for a page: each stands above the table of its part.
    """
    text = summary(data)
    if pictures is not None:
        text = [
            "# Benchmarks",
            "",
            *text,
            "",
            f"{READING} Written by `python -m benchmarks`; do not edit.",
        ]
    for title, part, body in _sections(data):
        text += ["", f"## {title}", ""]
        text += (
            [f"![{CLAIMS[part](data)}]({pictures[part]})", ""] if part in (pictures or {}) else []
        )
        text += [*body, "", f"Conditions: {words.footer(figures.of_run(data, part))}."]
    names = figures.names(data.get("cases") or {})
    known = [
        {"provider": f"`{x}`", "which is": words.label(x, data.get("versions"))} for x in names
    ]
    text += [
        "",
        "## How to read the tables",
        "",
        *(f"- {note}" for note in NOTES),
        "",
        *markdown(known),
    ]
    return [
        *text,
        "",
        "## Conditions of the main run",
        "",
        *(f"- {line}" for line in words.conditions(data)),
    ]


def write(data: dict[str, Any], path: Path, plots: Sequence[Path] = ()) -> None:
    """Write the page, with the figures as `plots.render` returns them."""
    pictures = {
        plot.stem: Path(os.path.relpath(plot.resolve(), path.resolve().parent)).as_posix()
        for plot in plots
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(words.page(lines(data, pictures)), encoding="utf-8")


def _sections(data: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """(title, part with the section's plot and perhaps a run of its own, lines) where there are results."""
    sections = [
        ("A whole training step", "step", step_lines(data.get("step") or {})),
        ("Memory against tokens", "memory", _memory_lines(data)),
        ("All cases", "", _overview(figures.of_part(data, *COMPARED_PARTS))),
        ("Main cases", "time", _timed(figures.of_part(data, "main"))),
        ("Cases of users", "", _timed(figures.of_part(data, "edges"))),
        ("Distillation", "", _timed(figures.of_part(data, "distill"))),
        ("Scaling", "", _scaling(data)),
        ("Accuracy", "", _accuracy_lines(figures.of_part(data, "accuracy"))),
        ("Goals", "", _goals(data.get("goals") or [])),
    ]
    return [section for section in sections if section[2]]


def _goals(goals: Sequence[dict[str, Any]]) -> list[str]:
    return markdown([
        {
            "case": goal["case"], "figure": words.tidy(goal["figure"]), "goal": words.tidy(goal["goal"]),
            "measured": number(goal.get("value")), "verdict": goal["verdict"],
        }
        for goal in goals
    ])  # fmt: skip


# Claims, a sentence each: titles of the figures, and the summary of the page.


def step_claim(data: dict[str, Any]) -> str:
    """How many times as fast a step with our default options is; empty where one of the two is missing."""
    over = _faster(data, DEFAULTS)
    return over and f"Our training step is {over} times as fast as stock TRL's on a CPU"


def _faster(data: dict[str, Any], name: str) -> str:
    """How many times as fast a variant is in the first scene."""
    over = next((figures.faster(scene, name) for scene in figures.scenes(data).values()), None)
    return "" if over is None else multiple(over[0])


def memory_claim(data: dict[str, Any]) -> str:
    """The memory of the fullest peer over ours, at the most tokens that the peer could be measured with."""
    for case in reversed(memory_cases(data).values()):
        over = {name: x for name in ("trl", "eager") if (x := figures.mib_over(case, name))}
        if over:
            name = max(over, key=lambda x: over[x])
            who = f"{words.brief_name(name)} {'takes' if name == 'trl' else 'take'}"
            return f"At {case['n']:,} tokens {who} {multiple(over[name])} times our memory"
    return ""


def memory_cases(data: dict[str, Any]) -> dict[str, Case]:
    """The cases of the part, the fewest tokens first."""
    return dict(sorted(figures.of_part(data, "memory").items(), key=lambda item: item[1]["n"]))


def time_claim(data: dict[str, Any]) -> str:
    """The time of TRL's head over ours in the main case; empty where one of the two is missing."""
    over = figures.over(main_case(data), "trl", OURS)
    return "" if over is None else f"Our head is {multiple(over)} times as fast as TRL's fused head"


def main_case(data: dict[str, Any]) -> Case:
    """The first case of the main part with forward and backward."""
    cases = figures.of_part(data, "main").values()
    return next(
        (case for case in cases if figures.mode(case) == "full" and figures.median(case, OURS)), {}
    )


CLAIMS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": step_claim,
    "memory": memory_claim,
    "time": time_claim,
}


def summary(data: dict[str, Any]) -> list[str]:
    """The page's first lines: each claim with its shape, and the cases in which ours is behind."""
    text = [
        f"- {line}" for line in (_step(data), _memory(data), _time(data), _accuracy(data)) if line
    ]
    if text and data.get("device") == "cpu":
        text.append(
            "- All figures are of CPUs, where TRL's head is "
            "[a fallback that also projects prompt and padding](costs.md#trl-on-a-cpu-and-on-a-gpu). No GPU has "
            "measured anything yet, and nothing is claimed for GPUs."
        )
    return text


def _step(data: dict[str, Any]) -> str:
    if not (claim := step_claim(data)):
        return ""
    most = _faster(data, ALL_OPTIONS)
    options = f", {most} times with all options" if most else ""
    return f"**{claim}**{options} (generation left out; a small model; half of the groups with equal rewards)."


def _memory(data: dict[str, Any]) -> str:
    """The claim, and the peers that take less than ours at the most tokens."""
    if not (claim := memory_claim(data)):
        return ""
    cases = memory_cases(data)
    case, text = (
        list(cases.values())[-1],
        f"**{claim}** ({words.shape({**words.common(cases), 'model': None})})",
    )
    over = {name: x for name in _peers(case) if (x := figures.mib_over(case, name)) and x < 1}
    return (
        "; ".join(
            [
                text,
                *(f"{words.brief_name(name)} takes {x:.1f} times ours" for name, x in over.items()),
            ]
        )
        + "."
    )


def _peers(case: Case) -> list[str]:
    return [x for x in figures.providers(case) if not figures.is_ours(x) and x != PRODUCTS]


def _time(data: dict[str, Any]) -> str:
    """The main case, and those of its part in which a peer is faster than ours by more than 2 %."""
    if not (claim := time_claim(data)):
        return ""
    text = f"**{claim}** for one loss ({words.shape(main_case(data))})."
    for title, case in figures.of_part(data, "main").items():
        over = {x: figures.over(case, x, OURS) or 1.0 for x in _peers(case)}
        ahead = [
            f"{words.brief_name(x)} ({1 / time:.2f} times as fast)"
            for x, time in over.items()
            if time < 0.98
        ]
        text += f" Faster than ours in the case `{title}`: {', '.join(ahead)}." if ahead else ""
    return text


def _accuracy(data: dict[str, Any]) -> str:
    """The largest mean error of a log-probability over the sizes of logits, ours and TRL's."""
    cases = figures.of_part(data, "accuracy")
    ours, theirs = (
        max(
            (figures.measured(case, x, "errors", "logp_mean") or 0.0 for case in cases.values()),
            default=0.0,
        )
        for x in (OURS, "trl")
    )
    if not ours or not theirs:
        return ""
    about = words.common(cases)
    dtype, shape = words.DTYPES.get(about.get("dtype", ""), ""), words.shape({**about, "dtype": ""})
    return (
        f"**Log-probabilities of a {dtype} head: a mean error of at most {ours:.1e}**; with TRL's head, {theirs:.1e} "
        f"({shape}; the largest of {len(cases)} kinds of logits, against float64)."
    )


# The cases.


def _timed(cases: dict[str, Case]) -> list[str]:
    """The shape of each case, and a row for each provider that ran; the others in words."""
    unit, scale = _unit(cases)
    rows = []
    for title, case in cases.items():
        ran = {name: x for name, x in figures.providers(case).items() if figures.ran(x)}
        for i, (name, x) in enumerate(ran.items()):
            ms, errors = (
                figures.measured(case, name, "ms", figures.mode(case)) or {},
                x.get("errors") or {},
            )
            middle, *ends = (number(ratio(ms.get(q), scale)) for q in ("median", "p20", "p80"))
            of_products = figures.over(case, name, PRODUCTS)
            rows.append({
                "case": "" if i else title, "provider": f"`{name}`", unit: middle,
                "20 to 80 %": " to ".join(ends) if all(ends) else "", "/ ours": _over_ours(case, name),
                "/ products": NOISE if of_products is not None and of_products < 1 else times(of_products),
                "FLOPs, NVH": number(x.get("flops_nvh")),
                "extra MiB": "" if name == PRODUCTS else number(x.get("extra_mib")),
                "logp": small(errors.get("logp_mean")),
                "mean divergence": "" if case.get("divergence") is None else small(errors.get("loss")),
                "note": words.tidy(x.get("note") or ""),
            })  # fmt: skip
    return [*words.about_all(cases), "", *markdown(rows), *_missing(cases)] if cases else []


def _unit(cases: dict[str, Case]) -> tuple[str, float]:
    return ("seconds", 1e3) if figures.in_seconds(cases) else ("ms", 1.0)


def _over_ours(case: Case, name: str) -> str:
    """A provider's time over ours; the products' is no limit where it is more."""
    over = figures.over(case, name, OURS)
    return NOISE if name == PRODUCTS and over is not None and over > 1 else times(over)


def _missing(cases: dict[str, Case]) -> list[str]:
    """A line for each reason not to have run, with the providers and the cases."""
    reasons: dict[str, list[str]] = {}
    for title, case in cases.items():
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                reasons.setdefault(f"`{name}`: {words.failed(x) or 'not run'}", []).append(title)
    lines = [
        f"- {what}" + (f" ({', '.join(titles)})" if len(cases) > 1 else "")
        for what, titles in reasons.items()
    ]
    return ["", *lines] if lines else []


def _overview(cases: dict[str, Case]) -> list[str]:
    """A line a case: the time of ours, the others' over it, and the operations and memory of ours and of TRL's head."""
    if len(cases) < 2:
        return []
    unit, scale = _unit(cases)
    same = {key: x for key, x in next(iter(cases.values())).items() if key not in CONDITIONS}
    busy = [
        case["cpu_of_others"] for case in cases.values() if case.get("cpu_of_others") is not None
    ]
    rows = []
    for title, case in cases.items():
        rest = {
            key: x for key, x in case.items() if key not in CONDITIONS and same.get(key, ...) != x
        }
        both = {
            who: figures.providers(case).get(name, {})
            for who, name in (("ours", OURS), ("TRL", "trl"))
        }
        rows.append({
            "case": title, "which is": words.about(rest),
            f"ours, {unit}": number(ratio(figures.median(case, OURS), scale)),
            **{f"{name} / ours": _over_ours(case, name) for name in COMPARED},
            **{f"NVH, {who}": number(x.get("flops_nvh")) for who, x in both.items()},
            **{f"MiB, {who}": number(x.get("extra_mib")) for who, x in both.items()},
        })  # fmt: skip
    about = f"{words.about(same)}; the second column says what a case has instead."
    about += " Times over ours: at 2, ours is twice as fast. NVH: one product of the tokens with the head is 2."
    about += (
        f" Other processes used at most {share(max(busy))} of the cores meanwhile." if busy else ""
    )
    return [about, "", *markdown(rows)]


def _scaling(data: dict[str, Any]) -> list[str]:
    """A line for each point of each axis: the time and memory of ours, and of those that all points have over them."""
    points = [
        (axis, i, case) for axis, cases in figures.series(data) for i, case in enumerate(cases)
    ]
    every = {str(i): case for i, (*_, case) in enumerate(points)}
    names = [
        x
        for x in figures.names(every)
        if x != OURS and all(x in figures.providers(c) for c in every.values())
    ]
    rows = [
        {
            "axis": "" if i else AXES[axis],
            "value": share(figures.along(case, axis)) if axis == "share" else str(case[axis]),
            "ours, ms": number(figures.median(case, OURS)),
            "ours, MiB": number(figures.extra_mib(case, OURS)),
            **{f"{name} / ours, time": times(figures.over(case, name, OURS)) for name in names},
            **{f"{name} / ours, MiB": times(figures.mib_over(case, name)) for name in names},
        }
        for axis, i, case in points
    ]
    about = {key: x for key, x in words.common(every).items() if key != "rounds"}
    return [f"{words.about(about)}.", "", *markdown(rows)] if rows else []


def _memory_lines(data: dict[str, Any]) -> list[str]:
    """MiB of each provider, a line a number of tokens, and TRL's and all logits over ours."""
    cases = memory_cases(data)
    versions = data.get("versions")
    rows = [
        {
            "tokens": f"{case['n']:,}",
            **{
                f"{words.label(x, versions)}, MiB": number(figures.extra_mib(case, x))
                for x in figures.names(cases)
            },
            **{
                f"{words.brief_name(x)} / ours": times(figures.mib_over(case, x))
                for x in ("trl", "eager")
            },
        }
        for case in cases.values()
    ]
    about = {
        key: x
        for key, x in words.common(cases).items()
        if key not in ("rounds", "products_nvh", "model")
    }
    text = [
        f"{words.about(about)}; sequences of {', '.join(str(x['t']) for x in cases.values())} tokens in turn.",
        "The size of the logits does not depend on H; that of the weight and of its gradient does. So a ratio at a",
        "small H is not that of a model: [memory.md](memory.md#real-models) has those of models, computed, with Liger.",
        "", *markdown(rows), *_missing(cases),
    ]  # fmt: skip
    return text if rows else []


def _accuracy_lines(cases: dict[str, Case]) -> list[str]:
    """A line for each provider: its errors at each size of the logits."""
    kinds = {
        "logp_mean": ("logp", small),
        "d_hidden": ("d hidden", small),
        "ratio_off": ("ratios off", share),
    }
    rows = []
    for name in figures.names(cases):
        row = {
            f"{text}, {title}": form(figures.measured(case, name, "errors", kind))
            for kind, (text, form) in kinds.items()
            for title, case in cases.items()
        }
        rows += [{"provider": f"`{name}`", **row}] if any(row.values()) else []
    text = [
        "Each provider against float64, at the same hidden states and weight. Training does not make this comparison:",
        "there old and new log-probabilities come from one head, whose rounding they share, and a policy that did not",
        "move has ratios of 1 with any of them. The table says how far a head is from log-probabilities made",
        "elsewhere, such as those of a sampler with an fp32 head. logp: the mean error; d hidden: relative, in norm;",
        "ratios off: the share of the tokens whose ratio is off by more than 1 %.",
        "", f"{words.about(words.common(cases))}.", "", *markdown(rows),
    ]  # fmt: skip
    return text if cases else []


# The whole optimizer step, as `benchmarks.step` and `benchmarks.groups` measure it.


def step_is_wrong(data: dict[str, Any]) -> bool:
    """True if a variant failed or is further from stock TRL than rounding, or a tree is wrong."""
    step = data.get("step") or {}
    variants = [x for scene in figures.scenes(data).values() for x in scene["variants"].values()]
    trees = [*_shapes(step).values(), *([step["turns"]] if "turns" in step else [])]
    return any(x.get("status") != "ok" for x in (*variants, *trees))


def step_lines(step: dict[str, Any]) -> list[str]:
    """A table for each scene; the distance of the parameters after SGD; groups and turns."""
    scenes = figures.scenes({"step": step})
    if not scenes:
        return []
    text = [
        "The columns: CPU seconds of a step; how many times as fast as stock TRL, the median of the rounds' ratios,",
        "with the least and the most of them; MiB of activations that the largest micro-batch keeps for its backward;",
        "of the padded tokens the share that the model computes, and the share with a gradient; the largest",
        "differences from stock TRL. [How it is measured](measuring.md#the-training-step);",
        "[the options](training-step.md). Stock TRL runs its fallback for CPUs, whose head projects prompt and padding",
        "too ([unlike on a GPU](costs.md#trl-on-a-cpu-and-on-a-gpu)).",
    ]
    first = next(iter(scenes.values()))["about"]
    for name, scene in scenes.items():
        count, rounds = (
            words.count(scene["steps"] - 1, "step"),
            words.count(scene["rounds"], "round"),
        )
        about = first if scene["about"] == first else _difference(scene["about"], first)
        said = (
            f"**{name}**: {about}" if about != name else f"**{name}**"
        )  # which may say how the scene differs
        text += ["", f"{said}; {count} in {rounds}{words.busy(scene)}", ""]
        text += markdown([_variant(scene, x) for x in scene["variants"]])
        if over := figures.faster(scene, REGROUPED, than=ONE_GROUP):
            text += ["", f"*{REGROUPED}* is {with_range(over)} times as fast as *{ONE_GROUP}*."]
    apart = {name: x["parameters"] for name, x in (step.get("sgd") or {}).items() if name != STOCK}
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        text += [
            "",
            "After plain SGD at toy size the parameters of every variant differ from stock TRL's by at most "
            f"{small(apart[worst])} of the distance that they moved ({worst}).",
        ]
    return [*text, *_groups(step), *_turns(step)]


def _difference(about: str, first: str) -> str:
    """The clauses of a scene's description that those of the first scene lack."""
    clauses, same = (text.replace("; ", ", ").split(", ") for text in (about, first))
    return ", ".join(x for x in clauses if x not in same)


def _variant(scene: dict[str, Any], name: str) -> dict[str, str]:
    x, over = scene["variants"][name], figures.faster(scene, name)
    saved, shares, apart = (x.get(key) or {} for key in ("saved_mib", "shares", "differences"))
    return {
        "variant": name, "seconds": number(x.get("seconds"), 3), "times as fast": with_range(over) if over else "",
        "saved MiB": number(saved.get("max"), 3), **{key: _share(shares.get(key)) for key in SHARES[1:]},
        "loss": small(apart.get("loss")), "gradient norm": small(apart.get("grad_norm")),
        "metrics": small(apart.get("metrics")), "failed": words.failed(x),
    }  # fmt: skip


def _share(value: float | None) -> str:
    """A share with one digit behind the point."""
    return share(None if value is None else round(value, 3))


def _shapes(step: dict[str, Any]) -> dict[str, Any]:
    shapes: dict[str, Any] = (step.get("groups") or {}).get("shapes") or {}
    return shapes


def _groups(step: dict[str, Any]) -> list[str]:
    """A line for each shape of a group: the time of both layouts, and the speed that the necessary work allows."""
    rows = []
    for name, x in _shapes(step).items():
        seconds, apart = x.get("seconds") or {}, x.get("differences") or {}
        rows.append({
            "shape": name, **{f"{layout}, seconds": number(seconds.get(layout), 3) for layout in ("padded", "tree")},
            "padded / tree": times(x.get("speed")), **{key: times(x.get(key)) for key in ("allowed", "reached")},
            "tokens/computed": _share(x.get("computed")),
            **{key: small(apart.get(key)) for key in ("loss", "gradient")}, "failed": words.failed(x),
        })  # fmt: skip
    if not rows:
        return []
    groups = step["groups"]
    return [
        "", f"**one group**: {groups['about']}; {words.count(groups['rounds'], 'round')}{words.busy(groups)}", "",
        "CPU seconds of a forward and backward of `causal_lm_loss`, with a prompt of P tokens and G completions of C.",
        "Allowed: padded / tree by the multiplications that are necessary; reached: the share of it.",
        "", *markdown(rows),
    ]  # fmt: skip


def _turns(step: dict[str, Any]) -> list[str]:
    if "computed" not in (turns := step.get("turns") or {}):
        return []
    return [
        "",
        f"A conversation of {turns['count']} turns, a sample for each, whose template leaves out earlier thinking: of "
        f"{turns['padded']:,} padded tokens {turns['computed']:,} are computed ({_share(turns['share'])}); "
        f"{turns['prefixes']:,} prefixes are distinct.",
    ]
