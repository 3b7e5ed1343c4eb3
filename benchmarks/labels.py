"""The words of tables and plots: providers, shapes, and the conditions of a run, without any path of the machine."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.figures import Case
from benchmarks.providers import DISTILLERS, PROVIDERS

# In a figure, whose footer has the versions.
BRIEF = {
    "eager": "all logits",
    "compiled": "all logits, compiled",
    "linear_ce": "torch's linear CE",
    "trl": "TRL's fused head",
    "liger_grpo": "Liger's fused GRPO",
    "liger_ce": "Liger's scaled CE",
    "verl_torch": "verl's torch head",
    "verl_triton": "verl's Triton head",
    "unsloth": "Unsloth",
    "cce": "Apple CCE",
    "quack": "QuACK",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
MODES = {
    "full": "forward and backward",
    "score": "log-probabilities only",
    "forward": "forward",
    "backward": "backward",
}
WORDS = (("sequence", "ratio of the sequence"), ("peaked", "peaked"), ("autocast", "under autocast to bf16"))
DIVERGENCES = {0.0: "forward KL", 1.0: "reverse KL"}  # by TRL's beta
PATH = re.compile(
    r"(?<![\w./])(?:"
    r"[A-Za-z]:\\(?:[^\\\s'\"]+\\)*(?P<windows>[^\\\s'\"]+)"
    r"|(?:file://)?~?/(?:[\w.+@~-]+/)*(?P<posix>[\w.+@~-]+)/?"
    r")"
)
MOST_TEXT = 160


def label(name: str, versions: dict[str, Any] | None = None) -> str:
    """A provider for readers: "trl" is "TRL 1.16 fused head". One that is not known keeps its name."""
    base, _, mib = name.partition("@")
    known = PROVIDERS.get(base) or DISTILLERS.get(base)
    number = short((versions or {}).get(known.package)) if known else ""
    words = re.sub(r" {2,}", " ", known.label.format(number)).strip() if known else base
    return f"{words}, {mib} MiB" if mib else words


def brief_name(name: str) -> str:
    """A provider in a figure: as few words as tell it from the others."""
    base, _, mib = name.partition("@")
    words = BRIEF.get(base) or label(base)
    return f"{words}, {mib} MiB" if mib else words


def short(version: Any) -> str:
    """1.16 for 1.16.0, 2.13 for 2.13.0+cpu; nothing for what is absent."""
    if version in (None, "absent"):
        return ""
    return re.sub(r"^(\d+\.\d+)\.0$", r"\1", str(version).split("+")[0])


def tidy(text: Any, most: int = MOST_TEXT) -> str:
    """Fit for a cell of a table: one line, of limited length, no bar, of an absolute path the last name only."""
    words = " ".join(PATH.sub(_last_name, str(text)).split()).replace("|", "/")
    return words if len(words) <= most else words[: most - 3].rstrip() + "..."


def _last_name(found: re.Match[str]) -> str:
    return found["windows"] or found["posix"]


def count(number: int, word: str) -> str:
    """1 thread, 2 threads."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def share(value: float) -> str:
    """0.5 as 50 %."""
    return f"{100 * value:.3g} %"


def shape(case: Case) -> str:
    """Model, sizes and dtype."""
    sizes = [f"{name.upper()} {case[name]}" for name in ("n", "t", "h", "v") if case.get(name) is not None]
    sizes.append(DTYPES.get(case.get("dtype", ""), case.get("dtype", "")))
    if case.get("weight_dtype"):
        sizes.append(f"weight {DTYPES.get(case['weight_dtype'], case['weight_dtype'])}")
    return ": ".join(x for x in (case.get("model") or "", ", ".join(x for x in sizes if x)) if x)


def features(case: Case) -> str:
    """What kind of loss it is, as far as the keys there are tell; what is usual is not said."""
    found = []
    if (beta := case.get("divergence")) is not None:
        found.append(f"{DIVERGENCES.get(beta, f'JSD of beta {beta:g}')} from a teacher")
    if case.get("teacher_h"):
        found.append(f"whose H is {case['teacher_h']}")
    if case.get("score"):
        found.append("without gradients" if case.get("part") == "distill" else "scoring")
    else:
        of_policy = "drift" in case and case.get("part") != "distill"
        found += ["frozen head" if case["frozen"] else "trainable head"] if "frozen" in case else []
        found += ["off-policy" if case["drift"] else "on-policy"] if of_policy else []
    for name, words in (("padding", "{} padding"), ("zero_share", "{} of the groups with advantage 0")):
        if case.get(name):
            found.append(words.format(share(case[name])))
    if case.get("top_entropy", 1.0) < 1.0:
        found.append(f"the {share(case['top_entropy'])} of highest entropy")
    found += [words for name, words in WORDS if case.get(name)]
    for name, words in (("beta", "KL {:g}"), ("softcap", "soft-cap {:g}"), ("scale", "logits to about {:g}")):
        if case.get(name) and not (name == "scale" and case.get("peaked")):
            found.append(words.format(case[name]))
    return ", ".join(found)


def about(case: Case) -> str:
    """Shape, features, rounds, and what else the machine did; of a part of a case's keys, what they tell."""
    found = [shape(case), features(case)]
    if case.get("products_nvh") is not None:
        found.append(f"products {case['products_nvh']:g} NVH")
    if case.get("rounds"):
        found.append(count(case["rounds"], "round"))
    if case.get("cpu_of_others") is not None:
        found.append(f"other processes used {share(case['cpu_of_others'])} of the cores meanwhile")
    if case.get("status") not in (None, "ok", "complete"):
        found.append(tidy(f"{case['status']}: {case.get('reason', '')}"))
    return "; ".join(x for x in found if x)


def brief(case: Case) -> str:
    """Shape, features and rounds: what a plot has room for."""
    return about({key: x for key, x in case.items() if key not in ("products_nvh", "cpu_of_others")})


def common(cases: dict[str, Case]) -> Case:
    """What is the same in all of them."""
    first = next(iter(cases.values()))
    return {key: value for key, value in first.items() if all(x.get(key, ...) == value for x in cases.values())}


def about_all(cases: dict[str, Case]) -> list[str]:
    """What is the same in all of them, then what each has of its own."""
    same = common(cases)
    lines = [about(same)]
    for name, case in cases.items():
        own = about({key: value for key, value in case.items() if key not in same})
        lines += [f"- {name}: {own}"] if own else []
    return lines if len(lines) == 1 else [lines[0], "", *lines[1:]]


def conditions(data: dict[str, Any]) -> list[str]:
    """Everything that is known of the run: machine, versions, backend, commit, date, rounds, command."""
    machine = data.get("machine") or {}
    rounds = sorted({case["rounds"] for case in (data.get("cases") or {}).values() if case.get("rounds")})
    lines = [
        ("machine", _machine(data)),
        ("versions", _versions(data)),
        ("backend", ", ".join(f"{name}: {text}" for name, text in (machine.get("backend") or {}).items())),
        ("commit", data.get("commit")),
        ("date", data.get("date")),
        ("rounds", f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else rounds[0] if rounds else None),
        ("command", " ".join([_program(data), *map(str, data.get("command") or [])])),
        ("status", data.get("status")),
        ("smoke", "toy sizes, once: no measurement" if data.get("smoke") else None),
    ]
    return [f"{name}: {tidy(text, 600)}" for name, text in lines if text]


def _program(data: dict[str, Any]) -> str:
    return "python -m benchmarks" + ("" if data.get("device") in (None, "cpu") else ".gpu")


def footer(data: dict[str, Any]) -> str:
    """The conditions in one line, for below a table."""
    return tidy("; ".join(x for x in (where(data), made(data), day(data)) if x), 400)


def where(data: dict[str, Any]) -> str:
    """The device, and the threads of a CPU."""
    threads = count(data["threads"], "thread") if data.get("threads") and data.get("device") == "cpu" else ""
    return "; ".join(x for x in (_device(data), threads) if x)


def made(data: dict[str, Any]) -> str:
    """The packages, and the commit."""
    versions = data.get("versions") or {}
    named = (
        ("torch", "torch"),
        ("trl", "TRL"),
        ("liger-kernel", "Liger"),
        ("verl", "verl"),
        ("unsloth_zoo", "Unsloth"),
    )
    found = ", ".join(f"{words} {short(versions[name])}" for name, words in named if short(versions.get(name)))
    return "; ".join(x for x in (found, f"commit {_commit(data)}") if x)


def day(data: dict[str, Any]) -> str:
    """The date of the run, without its time."""
    return str(data.get("date", ""))[:10]


def cpu(data: dict[str, Any]) -> str | None:
    """The processor's name."""
    return ((data.get("machine") or {}).get("system") or {}).get("cpu")


def _device(data: dict[str, Any]) -> str:
    system = (data.get("machine") or {}).get("system") or {}
    if data.get("device") != "cpu":
        return str(data.get("device", ""))
    level = system.get("torch cpu capability")
    return f"{system.get('cpu', 'CPU')}" + (f" ({level})" if level else "")


def _commit(data: dict[str, Any]) -> str:
    """Ten digits, and whether the checkout was as committed."""
    commit, dash, rest = str(data.get("commit") or "unknown").partition("-")
    return commit[:10] + dash + rest


def _machine(data: dict[str, Any]) -> str:
    machine = data.get("machine") or {}
    system, devices = machine.get("system") or {}, machine.get("devices") or {}
    parts = [
        _device(data),
        *(f"{name} {text}" for name, text in devices.items() if name != "cpu"),
        f"{system['cores']} cores" if system.get("cores") else "",
        count(data["threads"], "thread") if data.get("threads") else "",
        str(system.get("os", "")),
    ]
    return ", ".join(x for x in parts if x)


def _versions(data: dict[str, Any]) -> str:
    of_machine = (data.get("machine") or {}).get("versions") or {}
    found = {**{name: of_machine.get(name) for name in ("python", "triton")}, **(data.get("versions") or {})}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)
