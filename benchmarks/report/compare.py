"""Two runs of the suite against each other: what got slower, bigger or less exact by more than they can tell apart.

Time is compared as new / old of the medians, over the drift of the machine: the median of the same ratio over all in
that case that is not ours. How far that is from 1 by chance follows from what the runs measured themselves. Of n
samples whose 20 and 80 % quantiles are a width w apart, relative to the median::

    sigma = w / E_n                       E_n: that width for n samples of a normal distribution of sigma 1
    se    = sqrt(pi / 2) sigma / sqrt(n)  the standard error of the median

Few samples tell sigma badly, so at least the median sigma of the case's providers is taken. A time is worse, or better,
if it is off by more than `ERRORS` standard errors (those of both runs and of the drift), and by more than `FLOOR`.

Why 2.5: in simulated pairs of runs of the same code, six others in the case, sigma 1 to 8 %, with or without one
sample in ten far off, at most 1 % of the times were called worse with 2 to 25 samples (with nothing else timed up to
4 %). With 3 samples and a sigma of 2 %, code 10 % slower was noticed in 7 to 9 of 10 runs; with 5, in more than 9. The
floor is chosen, not measured: for what no process sees in its own samples, such as where its memory lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.report import figures, labels
from benchmarks.report.columns import markdown, number, small
from benchmarks.report.figures import Case, Provider

ERRORS = 2.5
FLOOR = 0.03
MEMORY, MEMORY_MIB = 1.05, 8.0  # allocators round, and a thread's scratch comes and goes
ERROR, LEAST_ERROR = 2.0, 1e-6  # below that it is the last bits, in an order of summation of their own
MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean
SHAPE = ("n", "h", "v", "t", "dtype")
WORK = (
    "softcap", "frozen", "score", "padding", "zero_share", "drift", "top_entropy", "sequence", "beta", "scale",
    "peaked", "forward_only", "weight_dtype", "autocast", "divergence", "teacher_h",
)  # fmt: skip
PARTS = ("forward", "backward")  # of a step: a change there counts if it is more than `FLOOR` of the step
BAD = ("worse", "gone")


@dataclass(frozen=True)
class Finding:
    """One figure in both runs.

    `verdict`: "worse", "better" or "same"; of a time "unknown" where a run has one sample only, "peer" where it is not
    ours; of a status "gone" or "back"; of a condition "differs".
    """

    case: str  # "" for a condition of the whole run
    provider: str
    figure: str
    old: Any
    new: Any
    verdict: str
    ratio: float | None = None  # new over old
    drift: float | None = None  # of the machine; None: nothing else was timed
    noise: float | None = None  # relative: less than that from 1 is no difference

    @property
    def is_time(self) -> bool:
        """Whether it is a time."""
        return self.figure.endswith(", ms")

    @property
    def regressed(self) -> bool:
        """Whether it is ours, and worse or gone."""
        return self.verdict in BAD and figures.is_ours(self.provider)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Finding]:
    """Every figure that is in both.

    Raises:
        ValueError: they are of different formats or devices, or a case of the same name is other work in the other.
    """
    _refuse(old, new)
    found = list(_conditions(old, new))
    for name, case in old["cases"].items():
        other = new["cases"].get(name)
        if other is None:
            continue
        for mode in figures.MODES:
            found += _times(name, mode, case, other)
        for provider, before in figures.providers(case).items():
            now = figures.providers(other).get(provider)
            if now is not None:
                found += _figures(name, provider, before, now)
    return found


def has_regressed(findings: list[Finding]) -> bool:
    """Whether something of ours is worse, or gone; what happened to a peer is told, and is no regression."""
    return any(x.regressed for x in findings)


def lines(findings: list[Finding]) -> list[str]:
    """What differs in the conditions, what of ours regressed, what else changed, and all times."""
    compared = [x for x in findings if x.verdict != "differs"]
    regressed = [x for x in compared if x.regressed]
    changed = [x for x in compared if x.verdict not in ("same", "peer", "unknown") and not x.regressed]
    text = [f"{x.figure}: {labels.tidy(x.old)} before, {labels.tidy(x.new)} now" for x in findings if x not in compared]
    alone = dict.fromkeys(x.case for x in compared if x.is_time and x.drift is None)
    if alone:
        text.append(f"nothing but ours was timed, so the drift of the machine is unknown: {', '.join(alone)}")
    text += [*([""] if text else []), f"{len(regressed)} of {len(compared)} figures regressed."]
    times = [x for x in compared if x.is_time]
    head = ["case", "provider", "figure", "before", "now", "now / before", "drift", "noise", "verdict"]
    for title, some in (("Regressed", regressed), ("Changed", changed), ("Times", times)):
        if some:
            text += ["", f"{title}:", "", *markdown(head, [_cells(x) for x in some])]
    return text


def _refuse(old: dict[str, Any], new: dict[str, Any]) -> None:
    wrong = []
    for name in ("format", "device"):
        if old.get(name) != new.get(name):
            wrong.append(f"{name}: {old.get(name)} and {new.get(name)}")
    for name in old["cases"].keys() & new["cases"].keys():
        before, now = old["cases"][name], new["cases"][name]
        keys = [*SHAPE, *(key for key in WORK if key in before and key in now)]
        wrong += [
            f"case {name}, {key}: {before.get(key)} and {now.get(key)}"
            for key in keys
            if before.get(key) != now.get(key)
        ]
    if wrong:
        raise ValueError(f"results: expected the same work on the same device, got {'; '.join(sorted(wrong))}")


def _conditions(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Finding]:
    """What may explain a difference, and is no reason not to compare."""
    pairs = {"threads": (old.get("threads"), new.get("threads")), "CPU model": (labels.cpu(old), labels.cpu(new))}
    versions = [x.get("versions") or {} for x in (old, new)]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        pairs[f"version of {name}"] = (versions[0].get(name, "absent"), versions[1].get(name, "absent"))
    alone = ([x for x in a["cases"] if x not in b["cases"]] for a, b in ((old, new), (new, old)))
    before, now = (", ".join(x) or "none" for x in alone)
    pairs["cases only in this run"] = (before, now)
    for figure, (before, now) in pairs.items():
        if before != now:
            yield Finding("", "", figure, before, now, "differs")


def _times(name: str, mode: str, old: Case, new: Case) -> Iterator[Finding]:
    """The times of one case in one mode."""
    pairs = {x: (figures.median(old, x, mode), figures.median(new, x, mode)) for x in figures.providers(old)}
    ratios = {x: now / before for x, (before, now) in pairs.items() if before and now}
    least = [_typical_sigma(case, mode) for case in (old, new)]
    errors = {x: _standard_error((old, new), x, mode, least) for x in ratios}
    others = [x for x in ratios if not figures.is_ours(x)]
    drift, drift_error = _drift([ratios[x] for x in others], [errors[x] for x in others])
    for provider, ratio in ratios.items():
        noise = None if None in least else max(FLOOR, ERRORS * math.hypot(errors[provider], drift_error))
        before, now = pairs[provider]
        verdict = _verdict(ratio / (drift or 1.0), noise) if figures.is_ours(provider) else "peer"
        whole = figures.median(old, provider, "full") if mode in PARTS else None
        if whole and verdict in ("worse", "better") and abs(now / (drift or 1.0) - before) < FLOOR * whole:
            verdict = "same"  # a backward that only scales a gradient takes a thousandth of the step
        yield Finding(name, provider, f"{mode}, ms", before, now, verdict, ratio, drift, noise)


def _verdict(off: float, noise: float | None) -> str:
    if noise is None:
        return "unknown"
    return "worse" if off > 1 + noise else "better" if off < 1 / (1 + noise) else "same"


def _drift(ratios: list[float], errors: list[float]) -> tuple[float | None, float]:
    """(median, its standard error) of the others' ratios: from how they scatter, or from their own errors."""
    if not ratios:
        return None, 0.0
    drift = statistics.median(ratios)
    scatter = 1.4826 * statistics.median(abs(x / drift - 1) for x in ratios)
    return drift, MEDIAN * max(scatter, statistics.median(errors)) / math.sqrt(len(ratios))


def _typical_sigma(case: Case, mode: str) -> float | None:
    """Median over the providers; None where all have one sample only."""
    found = [_sigma(x, mode) for x in figures.providers(case).values() if figures.ran(x)]
    known = [x for x in found if x is not None]
    return statistics.median(known) if known else None


def _sigma(provider: Provider, mode: str) -> float | None:
    """Relative standard deviation of one sample."""
    timing = figures.timing(provider, mode) or {}
    n, low, high = timing.get("samples", 0), timing.get("p20"), timing.get("p80")
    return None if n < 2 or low is None or high is None else (high - low) / timing["median"] / normal_width(n)


def _standard_error(cases: tuple[Case, Case], name: str, mode: str, least: list[float | None]) -> float:
    """Relative, of the quotient of the two medians; `least`: the smallest sigma to believe of each run."""
    found = []
    for case, at_least in zip(cases, least, strict=True):
        provider = figures.providers(case)[name]
        samples = (figures.timing(provider, mode) or {}).get("samples", 1)
        found.append(MEDIAN * max(_sigma(provider, mode) or 0.0, at_least or 0.0) / math.sqrt(samples))
    return math.hypot(*found)


def normal_width(n: int) -> float:
    """About what `timing.quantiles` gives as p80 - p20 of n samples of the standard normal distribution."""
    low, high = (statistics.NormalDist().inv_cdf((round(q * (n - 1)) + 0.625) / (n + 0.25)) for q in (0.2, 0.8))
    return high - low


def _figures(case: str, provider: str, old: Provider, new: Provider) -> Iterator[Finding]:
    """Status, FLOPs, memory and errors of one provider."""
    if figures.ran(old) != figures.ran(new):
        now = labels.tidy(": ".join(str(x) for x in (new.get("status"), new.get("reason")) if x))
        yield Finding(case, provider, "status", old.get("status"), now, "gone" if figures.ran(old) else "back")
    if not (figures.ran(old) and figures.ran(new)):
        return
    before, now = old.get("flops_nvh"), new.get("flops_nvh")
    if before is not None and now is not None:
        yield _one(case, provider, "FLOPs, NVH", before, now, worse=now > before, better=now < before)
    before, now = old.get("extra_mib"), new.get("extra_mib")
    if before is not None and now is not None:
        yield _one(case, provider, "extra MiB", before, now, worse=_more(before, now), better=_more(now, before))
    errors = [x.get("errors") or {} for x in (old, new)]
    for name in errors[0]:
        before, now = (x.get(name) for x in errors)
        if before is not None and now is not None:
            worse, better = _less_exact(before, now), _less_exact(now, before)
            yield _one(case, provider, f"error {name}", before, now, worse=worse, better=better)


def _one(case: str, provider: str, figure: str, old: float, new: float, *, worse: bool, better: bool) -> Finding:
    verdict = "worse" if worse else "better" if better else "same"
    return Finding(case, provider, figure, old, new, verdict, figures.ratio(new, old))


def _more(old: float, new: float) -> bool:
    return new > MEMORY * old and new - old > MEMORY_MIB


def _less_exact(old: float, new: float) -> bool:
    return new > ERROR * old and new > LEAST_ERROR


def _cells(x: Finding) -> list[str]:
    form = small if x.figure.startswith("error") else number
    values = [form(value) if isinstance(value, float | int) else labels.tidy(value) for value in (x.old, x.new)]
    ratios = ["" if value is None else f"{value:.3f}" for value in (x.ratio, x.drift)]
    noise = "" if x.noise is None else labels.share(x.noise)
    return [x.case, f"`{x.provider}`", x.figure, *values, *ratios, noise, x.verdict]
