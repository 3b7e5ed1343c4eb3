"""The results' JSON as markdown: claims, and tables with their conditions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, ONE_GROUP, OURS, PRODUCTS, Case, ratio
from benchmarks.providers import PROVIDERS

PACKAGES = {
    "torch": "torch", "trl": "TRL", "liger-kernel": "Liger", "verl": "verl",
    "unsloth_zoo": "Unsloth",
}  # fmt: skip
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
PATH = re.compile(r"(?<![\w./])(?:file://)?~?/(?:[\w.+@~-]+/)*([\w.+@~-]+)/?")
COMPARED_PARTS = ("main", "shapes", "workloads")
COMPARED = (PRODUCTS, "eager", "trl")  # with ours, over all cases
OF_RUN = ("products_nvh", "cpu_of_others", "rounds", "counted", "status")  # no feature of a case
NOISE = "within noise"  # a limit that was measured as slower than what does more
SHARES = ("sequences/gradient", "tokens/computed", "tokens/gradient")  # that our trainer logs


def lines(data: dict[str, Any]) -> list[str]:
    text = summary(data)
    sections = [
        ("A whole training step", "step", step_lines(data.get("step") or {})),
        ("All cases", "", _overview(figures.of_part(data, *COMPARED_PARTS))),
        ("Main cases", "", _timed(figures.of_part(data, "main"))),
        ("Cases of users", "", _timed(figures.of_part(data, "edges"))),
        ("Accuracy", "", _accuracy_lines(figures.of_part(data, "accuracy"))),
        ("Goals", "", _goals(data.get("goals") or [])),
    ]
    for title, part, body in sections:
        if body:
            conditions = f"Conditions: {footer(figures.of_run(data, part))}."
            text += ["", f"## {title}", "", *body, "", conditions]
    names = figures.names(data.get("cases") or {})
    known = [
        {"provider": f"`{x}`", "which is": label(x, data.get("versions"))}
        for x in names
        if x.partition("@")[0] in PROVIDERS
    ]
    text += ["", "## Providers", "", *markdown(known), "", "## Conditions of the main run", ""]
    return [*text, *(f"- {line}" for line in conditions_of(data))]


def write(data: dict[str, Any], path: Path) -> None:
    about = "Written by `python -m benchmarks`; do not edit. "
    about += "[How it is measured](../../docs/dev/measuring.md), "
    about += "and [how to read the tables](../../docs/dev/measuring.md#reading-the-tables)."
    head = ["# Benchmarks", "", about, ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page([*head, *lines(data)]), encoding="utf-8")


def summary(data: dict[str, Any]) -> list[str]:
    text = [f"- {line}" for line in (_step(data), _time(data), _accuracy(data)) if line]
    if text and data.get("device") == "cpu":
        text.append(
            "- All figures are of CPUs, where TRL's head is "
            "[a fallback that also projects prompt and "
            "padding](../../docs/memory.md#trl-on-a-cpu-and-on-a-gpu). No GPU has "
            "measured anything yet, and nothing is claimed for GPUs."
        )
    return text


def _step(data: dict[str, Any]) -> str:
    scene: dict[str, Any] = next(iter(figures.scenes(data).values()), {"variants": {}})
    over, most = (figures.faster(scene, name) for name in (DEFAULTS, ALL_OPTIONS))
    if over is None:
        return ""
    text = f"**Our training step is {multiple(over[0])} times as fast as stock TRL's on a CPU**"
    text += f", {multiple(most[0])} times with all options" if most else ""
    return f"{text} (generation left out; a small model; half of the groups with equal rewards)."


def _time(data: dict[str, Any]) -> str:
    cases = figures.of_part(data, "main")
    main = next((x for x in cases.values() if not x.get("score") and figures.median(x, OURS)), {})
    over = figures.over(main, "trl", OURS)
    if over is None:
        return ""
    text = f"**Our head is {multiple(over)} times as fast as TRL's fused head**"
    text += f" for one loss ({shape(main)})."
    for title, case in cases.items():
        peers = [x for x in figures.providers(case) if not figures.is_ours(x) and x != PRODUCTS]
        times_ours = ((x, figures.over(case, x, OURS) or 1.0) for x in peers)
        ahead = [f"{label(x)} ({1 / y:.2f} times as fast)" for x, y in times_ours if y < 0.98]
        text += f" Faster than ours in the case `{title}`: {', '.join(ahead)}." if ahead else ""
    return text


def _accuracy(data: dict[str, Any]) -> str:
    cases = figures.of_part(data, "accuracy")
    measured = (
        (figures.measured(c, x, "errors", "logp_mean") for c in cases.values())
        for x in (OURS, "trl")
    )
    ours, theirs = (max((error or 0.0 for error in errors), default=0.0) for errors in measured)
    if not ours or not theirs:
        return ""
    about = common(cases)
    dtype, sizes = DTYPES.get(about.get("dtype", ""), ""), shape({**about, "dtype": ""})
    return (
        f"**Log-probabilities of a {dtype} head: a mean error of at most {ours:.1e}**; with TRL's "
        f"head, {theirs:.1e} "
        f"({sizes}; the largest of {len(cases)} kinds of logits, against float64)."
    )


def _timed(cases: dict[str, Case]) -> list[str]:
    if not cases:
        return []
    unit, scale = figures.unit(cases)
    same = common(cases)
    text = [about(same)]
    rest = {
        title: {k: x for k, x in case.items() if k not in same} for title, case in cases.items()
    }
    said = [f"- {title}: {about(x)}" for title, x in rest.items() if about(x)]
    text += ["", *said] if said else []
    rows = []
    for title, case in cases.items():
        ran = {name: x for name, x in figures.providers(case).items() if figures.ran(x)}
        for i, (name, x) in enumerate(ran.items()):
            ms = figures.measured(case, name, "ms", figures.mode(case)) or {}
            middle, *ends = (number(ratio(ms.get(q), scale)) for q in ("median", "p20", "p80"))
            limit = figures.over(case, name, PRODUCTS)
            rows.append({
                "case": "" if i else title, "provider": f"`{name}`", unit: middle,
                "20 to 80%": " to ".join(ends) if all(ends) else "",
                "/ ours": _over_ours(case, name),
                "/ products": NOISE if limit is not None and limit < 1 else times(limit),
                "FLOPs, NVH": number(x.get("flops_nvh")),
                "extra MiB": "" if name == PRODUCTS else number(x.get("extra_mib")),
                "logp": small((x.get("errors") or {}).get("logp_mean")),
                "note": tidy(x.get("note") or ""),
            })  # fmt: skip
    reasons: dict[str, list[str]] = {}  # not to have run, with the cases
    for title, case in cases.items():
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                reasons.setdefault(f"- `{name}`: {failed(x) or 'not run'}", []).append(title)
    missing = [f"{what} ({', '.join(titles)})" for what, titles in reasons.items()]
    return [*text, "", *markdown(rows), *(["", *missing] if missing else [])]


def _over_ours(case: Case, name: str) -> str:
    """A provider's time over ours; the products' is no limit where it is more."""
    over = figures.over(case, name, OURS)
    return NOISE if name == PRODUCTS and over is not None and over > 1 else times(over)


def _overview(cases: dict[str, Case]) -> list[str]:
    if len(cases) < 2:
        return []
    unit, scale = figures.unit(cases)
    same = {key: x for key, x in next(iter(cases.values())).items() if key not in OF_RUN}
    busy = [x for case in cases.values() if (x := case.get("cpu_of_others")) is not None]
    rows = []
    for title, case in cases.items():
        rest = {k: x for k, x in case.items() if k not in OF_RUN and same.get(k, ...) != x}
        both = {
            who: figures.providers(case).get(x, {}) for who, x in (("ours", OURS), ("TRL", "trl"))
        }
        rows.append({
            "case": title, "which is": about(rest),
            f"ours, {unit}": number(ratio(figures.median(case, OURS), scale)),
            **{f"{name} / ours": _over_ours(case, name) for name in COMPARED},
            **{f"NVH, {who}": number(x.get("flops_nvh")) for who, x in both.items()},
            **{f"MiB, {who}": number(x.get("extra_mib")) for who, x in both.items()},
        })  # fmt: skip
    said = f"{about(same)}; the second column says what a case has instead."
    said += f" Other processes used at most {share(max(busy))} of the cores." if busy else ""
    return [said, "", *markdown(rows)]


def _accuracy_lines(cases: dict[str, Case]) -> list[str]:
    if not cases:
        return []
    kinds: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "logp_mean": ("logp", small), "d_hidden": ("d hidden", small),
        "ratio_off": ("ratios off", share),
    }  # fmt: skip
    rows = []
    for name in figures.names(cases):
        row = {
            f"{text}, {title}": form(figures.measured(case, name, "errors", kind))
            for kind, (text, form) in kinds.items()
            for title, case in cases.items()
        }
        rows += [{"provider": f"`{name}`", **row}] if any(row.values()) else []
    return [f"{about(common(cases))}.", "", *markdown(rows)]


def _goals(goals: Sequence[dict[str, Any]]) -> list[str]:
    return markdown([
        {
            "case": goal["case"], "figure": tidy(goal["figure"]), "goal": tidy(goal["goal"]),
            "measured": number(goal.get("value")), "verdict": goal["verdict"],
        }
        for goal in goals
    ])  # fmt: skip


# The whole optimizer step, as `benchmarks.step` and `benchmarks.groups` measure it.


def step_is_wrong(data: dict[str, Any]) -> bool:
    found = [x for scene in figures.scenes(data).values() for x in scene["variants"].values()]
    found += [x for _, shapes in _groups(data.get("step") or {}) for x in shapes.values()]
    return any(x.get("status") != "ok" for x in found)


def _groups(step: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    given = [step.get(key) or {} for key in ("groups", "hybrid_groups")]
    return [(x, x["shapes"]) for x in given if x.get("shapes")]


def step_lines(step: dict[str, Any]) -> list[str]:
    scenes = figures.scenes({"step": step})
    if not scenes:
        return []
    text: list[str] = []
    first = next(iter(scenes.values()))["about"].replace("; ", ", ").split(", ")
    for i, (name, scene) in enumerate(scenes.items()):
        clauses = scene["about"].replace("; ", ", ").split(", ")  # those that the first scene lacks
        said = scene["about"] if i == 0 else ", ".join(x for x in clauses if x not in first)
        said = "" if said == name else f": {said}"
        rounds = f"{count(scene['steps'] - 1, 'step')} in {count(scene['rounds'], 'round')}"
        text += ["", f"**{name}**{said}; {rounds}{busy(scene)}", ""]
        text += markdown([_variant(scene, x) for x in scene["variants"]])
        if over := figures.faster(scene, DEFAULTS, than=ONE_GROUP):
            text += ["", f"*{DEFAULTS}* is {with_range(over)} times as fast as *{ONE_GROUP}*."]
    for groups, shapes in _groups(step):
        rows = []
        for name, x in shapes.items():
            apart = x.get("differences") or {}
            rows.append({
                "shape": name,
                **{f"{layout}, seconds": number(y, 3) for layout, y in
                    (x.get("seconds") or {}).items()},
                "padded / tree": times(x.get("speed")),
                **{key: times(x.get(key)) for key in ("allowed", "reached")},
                "tokens/computed": _share(x.get("computed")),
                **{key: small(apart.get(key)) for key in ("loss", "gradient")}, "failed": failed(x),
            })  # fmt: skip
        about_groups = f"{groups['about']}; {count(groups['rounds'], 'round')}{busy(groups)}"
        text += ["", f"**one group**: {about_groups}", "", *markdown(rows)]
    return text[1:]


def _variant(scene: dict[str, Any], name: str) -> dict[str, str]:
    x, over = scene["variants"][name], figures.faster(scene, name)
    saved, shares, apart = (x.get(key) or {} for key in ("saved_mib", "shares", "differences"))
    return {
        "variant": name, "seconds": number(x.get("seconds"), 3),
        "times as fast": with_range(over) if over else "",
        "saved MiB": number(saved.get("max"), 3),
        **{key: _share(shares.get(key)) for key in SHARES[1:]},
        "loss": small(apart.get("loss")), "gradient norm": small(apart.get("grad_norm")),
        "metrics": small(apart.get("metrics")), "failed": failed(x),
    }  # fmt: skip


def _share(value: float | None) -> str:
    return share(None if value is None else round(value, 3))


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table with a column for each key of the first row; one that would be empty is left out."""
    if not rows:
        return []
    kept = [key for key in rows[0] if any(row[key] for row in rows)]
    cells = (kept, ["---"] * len(kept), *([row[key] for key in kept] for row in rows))
    return [f"| {' | '.join(line)} |" for line in cells]


def page(text: Sequence[str]) -> str:
    """Lines of markdown as a page: prose in 100 columns, no number broken at its minus."""
    wrapped = []
    for line in text:
        hangs = "  " if line.startswith("- ") else ""
        whole = len(line) <= 100 or line.startswith(("|", "#", "!"))
        wrap = partial(textwrap.wrap, width=100, subsequent_indent=hangs, break_long_words=False)
        wrapped += [line] if whole else wrap(line, break_on_hyphens=False)
    return re.sub(r"(?<=\de)-(?=\d)", "\u2011", "\n".join(wrapped) + "\n")


def number(value: float | None, digits: int = 4) -> str:
    """That many digits, and no exponent for what is large; blank for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def multiple(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g}%"


def with_range(over: tuple[float, float, float], form: Callable[[float], str] = times) -> str:
    middle, least, most = map(form, over)
    return f"{middle} ({least} to {most})"


def count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def tidy(text: Any, most: int = 160) -> str:
    """Fit for a cell: one short line, no bar, of an absolute path the last name only."""
    words = " ".join(PATH.sub(r"\1", str(text)).split()).replace("|", "/")
    return words if len(words) <= most else words[: most - 3].rstrip() + "..."


def failed(x: dict[str, Any]) -> str:
    if x.get("status") in (None, "ok", "complete"):
        return ""
    return tidy(": ".join(str(part) for part in (x["status"], x.get("reason")) if part))


def busy(measured: dict[str, Any]) -> str:
    others = measured.get("cpu_of_others")
    if others is None:
        return ""
    return f"; other processes used {share(others)} of the cores meanwhile"


def label(name: str, versions: dict[str, Any] | None = None) -> str:
    """A provider for readers: "trl" is "TRL 1.16 fused head"."""
    base, _, mib = name.partition("@")
    provider = PROVIDERS.get(base)
    version = short((versions or {}).get(provider.package)) if provider else ""
    words = " ".join(provider.label.format(version).split()) if provider else base
    return f"{words}, {mib} MiB" if mib else words


def short(version: Any) -> str:
    """1.16 for 1.16.0, 2.13 for 2.13.0+cpu; nothing for what is absent."""
    absent = version in (None, "absent")
    return "" if absent else re.sub(r"^(\d+\.\d+)\.0$", r"\1", str(version).split("+")[0])


def shape(case: Case) -> str:
    sizes = [f"{x.upper()} {case[x]}" for x in ("n", "t", "h", "v") if case.get(x) is not None]
    sizes.append(DTYPES.get(case.get("dtype", ""), ""))
    if case.get("weight_dtype"):
        sizes.append(f"weight {DTYPES[case['weight_dtype']]}")
    return ": ".join(x for x in (case.get("model") or "", ", ".join(x for x in sizes if x)) if x)


def about(case: Case) -> str:
    kind = []
    if case.get("score"):
        kind.append("scoring")
    else:
        kind += ["frozen head" if case["frozen"] else "trainable head"] if "frozen" in case else []
        kind += ["off-policy" if case["drift"] else "on-policy"] if "drift" in case else []
    if case.get("padding"):
        kind.append(f"{share(case['padding'])} padding")
    if case.get("zero_share"):
        kind.append(f"{share(case['zero_share'])} of the groups with advantage 0")
    if case.get("top_entropy", 1.0) < 1.0:
        kind.append(f"the {share(case['top_entropy'])} of highest entropy")
    named = {"sequence": "ratio of the sequence", "peaked": "peaked"}
    named["autocast"] = "under autocast to bf16"
    kind += [text for key, text in named.items() if case.get(key)]
    scale = None if case.get("peaked") else case.get("scale")
    values = ("KL", case.get("beta")), ("soft-cap", case.get("softcap")), ("logits to about", scale)
    kind += [f"{text} {value:g}" for text, value in values if value]
    words = [shape(case), ", ".join(kind)]
    if case.get("products_nvh") is not None:
        words.append(f"products {case['products_nvh']:g} NVH")
    if case.get("rounds"):
        words.append(count(case["rounds"], "round"))
    return "; ".join(x for x in (*words, busy(case).removeprefix("; "), failed(case)) if x)


def common(cases: dict[str, Case]) -> Case:
    first = next(iter(cases.values()), {})
    return {k: x for k, x in first.items() if all(c.get(k, ...) == x for c in cases.values())}


def where(data: dict[str, Any]) -> str:
    if data.get("device") != "cpu":
        return str(data.get("device", ""))
    system = (data.get("machine") or {}).get("system") or {}
    level = system.get("torch cpu capability")
    device = system.get("cpu", "CPU") + (f" ({level})" if level else "")
    return f"{device}; {count(data['threads'], 'thread')}" if data.get("threads") else device


def made(data: dict[str, Any]) -> str:
    versions = {x: short((data.get("versions") or {}).get(name)) for name, x in PACKAGES.items()}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit, dash, rest = str(data.get("commit") or "unknown").partition("-")
    return "; ".join(x for x in (packages, f"commit {commit[:10]}{dash}{rest}") if x)


def footer(data: dict[str, Any]) -> str:
    day = str(data.get("date", ""))[:10]
    return tidy("; ".join(x for x in (where(data), made(data), day) if x), 400)


def conditions_of(data: dict[str, Any]) -> list[str]:
    machine = data.get("machine") or {}
    system, devices = machine.get("system") or {}, (machine.get("devices") or {}).items()
    cores = f"{system['cores']} cores" if system.get("cores") else ""
    device, _, threads = where(data).partition("; ")
    parts = [device, *(f"{name} {text}" for name, text in devices if name != "cpu"), cores, threads]
    versions = {name: (machine.get("versions") or {}).get(name) for name in ("python", "triton")}
    versions |= data.get("versions") or {}
    rounds = sorted({x["rounds"] for x in (data.get("cases") or {}).values() if x.get("rounds")})
    command = "python -m benchmarks" + ("" if data.get("device") in (None, "cpu") else ".gpu")
    backends = (machine.get("backend") or {}).items()
    said = {
        "machine": ", ".join(x for x in (*parts, str(system.get("os", ""))) if x),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "backend": ", ".join(f"{name}: {text}" for name, text in backends),
        "commit": data.get("commit"),
        "date": data.get("date"),
        "rounds": " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else None,
        "command": " ".join([command, *map(str, data.get("command") or [])]),
        "status": data.get("status"),
        "smoke": "toy sizes, once: no measurement" if data.get("smoke") else None,
    }
    return [f"{name}: {tidy(text, 600)}" for name, text in said.items() if text]
