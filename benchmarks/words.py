"""Cells of tables, names of providers, shapes of cases and conditions of runs, without any path of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.figures import Case
from benchmarks.providers import DISTILLERS, PROVIDERS

BRIEF = {  # in a figure, whose footer has the versions
    "eager": "all logits",
    "compiled": "all logits, compiled",
    "linear_ce": "torch's linear CE",
    "trl": "TRL's fused head",
    "liger_grpo": "Liger's fused GRPO loss",
    "liger_ce": "Liger's scaled CE",
    "verl_torch": "verl's torch head",
    "verl_triton": "verl's Triton head",
    "unsloth": "Unsloth",
    "cce": "Apple CCE",
    "quack": "QuACK",
}
PACKAGES = {
    "torch": "torch",
    "trl": "TRL",
    "liger-kernel": "Liger",
    "verl": "verl",
    "unsloth_zoo": "Unsloth",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
DIVERGENCES = {0.0: "forward KL", 1.0: "reverse KL"}  # by TRL's beta
PATH = re.compile(r"(?<![\w./])(?:file://)?~?/(?:[\w.+@~-]+/)*([\w.+@~-]+)/?")


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table with a column for each key of the first row; one that would be empty is left out."""
    if not rows:
        return []
    kept = [key for key in rows[0] if any(row[key] for row in rows)]
    lines = (kept, ["---"] * len(kept), *([row[key] for key in kept] for row in rows))
    return [f"| {' | '.join(line)} |" for line in lines]


def page(lines: Sequence[str]) -> str:
    """Lines of markdown as a page, in which no number is broken at the minus of its exponent."""
    return re.sub(r"(?<=\de)-(?=\d)", "\u2011", "\n".join(lines) + "\n")


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
    """A ratio in a sentence: 1.6, 16, 1,600."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"


def with_range(over: tuple[float, float, float], form: Callable[[float], str] = times) -> str:
    """A middle value, and in brackets the least and the most."""
    middle, least, most = map(form, over)
    return f"{middle} ({least} to {most})"


def count(number: int, word: str) -> str:
    """1 thread, 2 threads."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def tidy(text: Any, most: int = 160) -> str:
    """Fit for a cell of a table: one line, of limited length, no bar, of an absolute path the last name only."""
    words = " ".join(PATH.sub(r"\1", str(text)).split()).replace("|", "/")
    return words if len(words) <= most else words[: most - 3].rstrip() + "..."


def failed(x: dict[str, Any]) -> str:
    """The status and the reason of what did not run or was wrong; blank if all was well."""
    if x.get("status") in (None, "ok", "complete"):
        return ""
    return tidy(": ".join(str(part) for part in (x["status"], x.get("reason")) if part))


def busy(measured: dict[str, Any]) -> str:
    """How much of the machine other processes used."""
    others = measured.get("cpu_of_others")
    return (
        "" if others is None else f"; other processes used {share(others)} of the cores meanwhile"
    )


# Providers.


def label(name: str, versions: dict[str, Any] | None = None) -> str:
    """A provider for readers: "trl" is "TRL 1.16 fused head". One that is not listed keeps its name."""
    base, _, mib = name.partition("@")
    provider = PROVIDERS.get(base) or DISTILLERS.get(base)
    version = short((versions or {}).get(provider.package)) if provider else ""
    words = re.sub(r" {2,}", " ", provider.label.format(version)).strip() if provider else base
    return f"{words}, {mib} MiB" if mib else words


def brief_name(name: str) -> str:
    """A provider in a figure: as few words as tell it from the others."""
    base, _, mib = name.partition("@")
    return BRIEF.get(base, label(base)) + (f", {mib} MiB" if mib else "")


def short(version: Any) -> str:
    """1.16 for 1.16.0, 2.13 for 2.13.0+cpu; nothing for what is absent."""
    return (
        ""
        if version in (None, "absent")
        else re.sub(r"^(\d+\.\d+)\.0$", r"\1", str(version).split("+")[0])
    )


# Cases.


def shape(case: Case) -> str:
    sizes = [
        f"{name.upper()} {case[name]}"
        for name in ("n", "t", "h", "v")
        if case.get(name) is not None
    ]
    sizes.append(DTYPES.get(case.get("dtype", ""), ""))
    if case.get("weight_dtype"):
        sizes.append(f"weight {DTYPES[case['weight_dtype']]}")
    return ": ".join(x for x in (case.get("model") or "", ", ".join(x for x in sizes if x)) if x)


def features(case: Case) -> str:
    """Kind of loss, as far as the case's keys tell; the usual is left out."""
    words = []
    if (beta := case.get("divergence")) is not None:
        words.append(f"{DIVERGENCES.get(beta, f'JSD of beta {beta:g}')} from a teacher")
    if case.get("teacher_h"):
        words.append(f"whose H is {case['teacher_h']}")
    if case.get("score"):
        words.append("without gradients" if case.get("part") == "distill" else "scoring")
    else:
        of_policy = "drift" in case and case.get("part") != "distill"
        words += ["frozen head" if case["frozen"] else "trainable head"] if "frozen" in case else []
        words += ["off-policy" if case["drift"] else "on-policy"] if of_policy else []
    if case.get("padding"):
        words.append(f"{share(case['padding'])} padding")
    if case.get("zero_share"):
        words.append(f"{share(case['zero_share'])} of the groups with advantage 0")
    if case.get("top_entropy", 1.0) < 1.0:
        words.append(f"the {share(case['top_entropy'])} of highest entropy")
    named = {
        "sequence": "ratio of the sequence",
        "peaked": "peaked",
        "autocast": "under autocast to bf16",
    }
    words += [text for key, text in named.items() if case.get(key)]
    scale = None if case.get("peaked") else case.get("scale")
    of_value = (
        ("KL", case.get("beta")),
        ("soft-cap", case.get("softcap")),
        ("logits to about", scale),
    )
    return ", ".join([*words, *(f"{text} {value:g}" for text, value in of_value if value)])


def about(case: Case) -> str:
    """Shape, features, rounds, and what else the machine did; of a part of a case's keys, what they tell."""
    words = [shape(case), features(case)]
    if case.get("products_nvh") is not None:
        words.append(f"products {case['products_nvh']:g} NVH")
    if case.get("rounds"):
        words.append(count(case["rounds"], "round"))
    return "; ".join(x for x in (*words, busy(case).removeprefix("; "), failed(case)) if x)


def common(cases: dict[str, Case]) -> Case:
    """The keys and values that all of them have."""
    first = next(iter(cases.values()), {})
    return {
        key: value
        for key, value in first.items()
        if all(x.get(key, ...) == value for x in cases.values())
    }


def about_all(cases: dict[str, Case]) -> list[str]:
    """What all of them have, then what each has for itself."""
    same = common(cases)
    lines = [about(same)]
    for name, case in cases.items():
        rest = about({key: value for key, value in case.items() if key not in same})
        lines += [f"- {name}: {rest}"] if rest else []
    return lines if len(lines) == 1 else [lines[0], "", *lines[1:]]


# Runs.


def where(data: dict[str, Any]) -> str:
    """The device, and the threads of a CPU."""
    if data.get("device") != "cpu":
        return str(data.get("device", ""))
    system = (data.get("machine") or {}).get("system") or {}
    level = system.get("torch cpu capability")
    device = system.get("cpu", "CPU") + (f" ({level})" if level else "")
    return f"{device}; {count(data['threads'], 'thread')}" if data.get("threads") else device


def made(data: dict[str, Any]) -> str:
    """The packages, and ten digits of the commit."""
    versions = data.get("versions") or {}
    packages = [
        f"{words} {short(versions.get(name))}"
        for name, words in PACKAGES.items()
        if short(versions.get(name))
    ]
    commit, dash, rest = str(data.get("commit") or "unknown").partition("-")
    return "; ".join(x for x in (", ".join(packages), f"commit {commit[:10]}{dash}{rest}") if x)


def day(data: dict[str, Any]) -> str:
    return str(data.get("date", ""))[:10]


def footer(data: dict[str, Any]) -> str:
    """The conditions in one line, for below a table."""
    return tidy("; ".join(x for x in (where(data), made(data), day(data)) if x), 400)


def conditions(data: dict[str, Any]) -> list[str]:
    """A line for each of machine, versions, backend, commit, date, rounds and command, as far as they are stored."""
    machine = data.get("machine") or {}
    system, devices = machine.get("system") or {}, (machine.get("devices") or {}).items()
    cores = f"{system['cores']} cores" if system.get("cores") else ""
    device, _, threads = where(data).partition("; ")
    parts = [device, *(f"{name} {text}" for name, text in devices if name != "cpu"), cores, threads]
    versions = {name: (machine.get("versions") or {}).get(name) for name in ("python", "triton")}
    versions |= data.get("versions") or {}
    rounds = sorted(
        {case["rounds"] for case in (data.get("cases") or {}).values() if case.get("rounds")}
    )
    command = "python -m benchmarks" + ("" if data.get("device") in (None, "cpu") else ".gpu")
    lines = {
        "machine": ", ".join(x for x in (*parts, str(system.get("os", ""))) if x),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "backend": ", ".join(
            f"{name}: {text}" for name, text in (machine.get("backend") or {}).items()
        ),
        "commit": data.get("commit"),
        "date": data.get("date"),
        "rounds": " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else None,
        "command": " ".join([command, *map(str, data.get("command") or [])]),
        "status": data.get("status"),
        "smoke": "toy sizes, once: no measurement" if data.get("smoke") else None,
    }
    return [f"{name}: {tidy(text, 600)}" for name, text in lines.items() if text]
