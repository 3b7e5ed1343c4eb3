"""The columns of the tables: a provider's row in a case, and the text of each of its cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case, Provider, ratio


@dataclass(frozen=True)
class Row:
    """One provider in one case."""

    lead: str  # which case, or which point on an axis
    name: str
    provider: Provider
    case: Case
    in_seconds: bool

    @property
    def mode(self) -> str:
        """The case's leading mode: what its providers are compared in."""
        return (figures.timed_modes(self.case) or ["full"])[0]

    def median(self, name: str) -> float | None:
        """Of another provider of the case."""
        return figures.median(self.case, name, self.mode)


NOISE = "within noise"  # of who does more, when measured
Column = tuple[str, Callable[[Row], str]]


def rows_of(cases: dict[str, Case], lead: Callable[[str, Case], str]) -> list[Row]:
    """Every provider of every case, all in one unit of time."""
    seconds = figures.in_seconds(cases)
    return [
        Row(lead(name, case), provider, x, case, seconds)
        for name, case in cases.items()
        for provider, x in figures.providers(case).items()
    ]


def table(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Markdown; a column that would be empty is left out, and a lead is written where it changes."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    before = None
    for row, line in zip(rows, cells, strict=True):
        if columns[0][1] is lead and row.lead == before:
            line[0] = ""
        before = row.lead
    return markdown([columns[i][0] for i in kept], [[line[i] for i in kept] for line in cells])


def markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table of these cells."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells)]


def number(value: float | None, digits: int = 4) -> str:
    """That many digits, and no exponent for what is large; blank for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def lead(row: Row) -> str:
    return row.lead


def name(row: Row) -> str:
    return f"`{row.name}`"


def note(row: Row) -> str:
    """Which path ran; why there is no time, or no memory."""
    x = row.provider
    failed = "" if figures.ran(x) else str(x.get("status", "not run"))
    reasons = [x.get("note"), ": ".join(filter(None, (failed, x.get("reason")))), x.get("memory_reason")]
    return labels.tidy("; ".join(str(text) for text in reasons if text))


def time_columns(rows: Sequence[Row]) -> list[Column]:
    """Time, quantiles, each other mode, and ours and the products under it."""
    unit = "seconds" if any(row.in_seconds for row in rows) else "ms"
    modes = {row.mode for row in rows}
    what = next(iter(modes)) if len(modes) == 1 else "full"
    return [
        (unit if what == "full" else f"{unit}, {labels.MODES[what]}", _time(None)),
        ("20 to 80 %", _quantiles),
        *((mode, _time(mode)) for mode in ("forward", "backward") if mode != what),
        ("/ ours", _over_ours),
        ("/ products", _over_limit),
    ]


def _over_ours(row: Row) -> str:
    """How many times faster ours is."""
    found = ratio(row.median(row.name), row.median(figures.OURS))
    return of_products(found) if figures.is_products(row.name) else times(found)


def _over_limit(row: Row) -> str:
    """The row's time over that of the case's products: nobody who does more is faster than they are."""
    found = ratio(row.median(row.name), row.median(figures.PRODUCTS))
    return NOISE if found is not None and found < 1 else times(found)


def of_products(value: float | None) -> str:
    """The products' time over that of ours."""
    return NOISE if value is not None and value > 1 else times(value)


def times(value: float | None) -> str:
    """A ratio."""
    return "" if value is None else f"{value:.2f}"


def memory(row: Row) -> str:
    """Blank for the products: they are made on memory that is there."""
    return "" if figures.is_products(row.name) else number(row.provider.get("extra_mib"))


def flops(row: Row) -> str:
    return number(row.provider.get("flops_nvh"))


def error(which: str) -> Callable[[Row], str]:
    """One of the errors, absolute or relative as it is."""
    return lambda row: small((row.provider.get("errors") or {}).get(which))


def small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _error_of_mean(row: Row) -> str:
    """Of the loss that is a divergence's mean: all that some give."""
    return "" if row.case.get("divergence") is None else error("loss")(row)


def _share(which: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = (row.provider.get("errors") or {}).get(which)
        return "" if value is None else labels.share(value)

    return cell


def _time(mode: str | None) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = figures.timing(row.provider, mode or row.mode)
        return number(found["median"] / _scale(row)) if found else ""

    return cell


def _quantiles(row: Row) -> str:
    found = figures.timing(row.provider, row.mode)
    if not found or found.get("p20") is None or found.get("p80") is None:
        return ""
    return f"{number(found['p20'] / _scale(row))} to {number(found['p80'] / _scale(row))}"


def _scale(row: Row) -> float:
    return 1e3 if row.in_seconds else 1.0


COSTS: tuple[Column, ...] = (("FLOPs, NVH", flops), ("extra MiB", memory))
ERRORS: tuple[Column, ...] = (
    ("logp", error("logp_mean")),
    ("mean divergence", _error_of_mean),
    ("divergence", error("divergence")),
    ("d hidden", error("d_hidden")),
    ("d weight", error("d_weight")),
)
ALL_ERRORS: tuple[Column, ...] = (
    ("logp mean", error("logp_mean")),
    ("logp max", error("logp_max")),
    ("entropy mean", error("entropy_mean")),
    ("entropy max", error("entropy_max")),
    ("loss", error("loss")),
    ("d hidden", error("d_hidden")),
    ("d weight", error("d_weight")),
    ("ratios off by > 1 %", _share("ratio_off")),
    ("clip decisions that differ", _share("clip_differs")),
)
NOTE: Column = ("note", note)
