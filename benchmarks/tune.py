"""Times the kernels' tiles on the GPU at hand and writes the winners to `tuned.json`: ``python -m benchmarks.tune``.

At run time nothing is timed: the package reads this table (`configs`). Only the entries of the device's family are
replaced; the others stay as they are. A candidate that breaks a rule of `benchmarks.aot.checks`, such as spilling
registers, is not timed. Statistics and fused kernel share one winner, since their bits must agree.

A part is what shares an entry: row kernels at all vocabularies asked for, or the scoring kernel of one kind of operands
at all widths and vocabularies. After each the table is written, so that what ran out of time loses no more than a part.
``--kernels``, ``--vocabs`` and ``--widths`` choose some; ``--budget-seconds`` ends it at the next part, or within one:
what was not timed by then is not written. A part's entries are those of the sizes asked for alone, the last of which
stands for all that are larger.

``--dry-run`` does the same at toy sizes, with toy tiles and a clock of its own, on any machine: it lists what would be
timed and writes to a file that is thrown away. Without a GPU it needs ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from benchmarks.aot.kernels import Loss, dot_runs, row_runs
from grpo_kernels.backends.triton_rows import configs
from grpo_kernels.backends.triton_rows.configs import DotConfig, RowConfig, family
from grpo_kernels.backends.triton_rows.device import arch_of
from grpo_kernels.backends.triton_rows.rows import INTERPRETED

Entry = dict[str, Any]
Config = RowConfig | DotConfig
SPLITS_AT_MOST = 256
Workload = Callable[[Any], Callable[[], Any]]  # what is timed, for a configuration
Winners = dict[int | None, dict[int, Config]]  # by width and vocabulary
Part = Callable[[str, "Sizes", torch.device, "Budget"], list[Entry]]
PLACEHOLDER = 0  # of `splits`: it follows from V
SHORTLIST = 6


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    row_counts: tuple[int, ...]
    widths: tuple[int, ...]
    vocabs: tuple[int, ...]
    rows: tuple[RowConfig, ...]
    dot: tuple[DotConfig, ...]


REAL = Sizes(
    row_counts=(256, 4096),
    widths=(896, 1024, 2048, 4096, 5120),
    vocabs=(32000, 128256, 151936, 201088, 256000),
    rows=tuple(
        RowConfig(1, block_v, warps, stages)
        for block_v, warps, stages in product((1024, 2048, 4096, 8192), (4, 8, 16), (1, 2, 3, 4))
        if 8
        <= block_v // (32 * warps)
        <= 32  # columns a thread: at best four, or eight, of each quarter
    ),
    dot=tuple(
        DotConfig(block_n, block_v, block_h, PLACEHOLDER, warps, stages, use_tma)
        for (block_n, block_v), block_h, warps, stages, use_tma in product(
            ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128)),
            (32, 64, 128),
            (4, 8),
            (2, 3, 4),
            (False, True),
        )
        if 16 <= block_n * block_v // (32 * warps) <= 128  # accumulators a thread
    ),
)
TOY = Sizes(
    row_counts=(4,),
    widths=(16, 32),
    vocabs=(40, 100),
    rows=(RowConfig(16, 32, 1, 1), RowConfig(16, 64, 1, 1)),
    dot=(
        DotConfig(16, 16, 16, PLACEHOLDER, 1, 1, False),
        DotConfig(16, 32, 16, PLACEHOLDER, 1, 1, False),
    ),
)


KERNELS = ("stats", "grad", "dot")


class OutOfTime(Exception):
    """The budget is spent."""


class Budget:
    """Seconds from now on; None: as many as it takes."""

    def __init__(self, seconds: float | None) -> None:
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        """Raise `OutOfTime` if none are left."""
        if time.monotonic() > self._until:
            raise OutOfTime


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes; the table is not touched"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="instead of the package's own table"
    )
    parser.add_argument(
        "--budget-seconds", type=float, help="stop after that; finished parts are written"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=KERNELS,
        help="only these; stats: and fused",
    )
    parser.add_argument(
        "--vocabs", nargs="+", type=int, metavar="V", help="only these sizes of the vocabulary"
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, metavar="H", help="only these hidden sizes, for dot"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Tune what is asked for, a part after the other; exit status 1 if there was no time for some."""
    options = arguments(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.dry_run and INTERPRETED):
        print(
            "error: no GPU to time on; --dry-run with TRITON_INTERPRET=1 needs none",
            file=sys.stderr,
        )
        return 2
    sizes = chosen(TOY if options.dry_run else REAL, options)
    if options.dry_run:
        for config in (*REAL.rows, *REAL.dot):
            print(f"candidate: {config}")
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or (Path(folder, configs.TABLE) if options.dry_run else own_table())
        missed = tune(parts(options.kernels), sizes, device, out, Budget(options.budget_seconds))
    if missed:
        print(f"no time for: {', '.join(missed)}; they stay as they were")
    return 1 if missed else 0


def chosen(sizes: Sizes, options: argparse.Namespace) -> Sizes:
    """Those of the command line in the place of `sizes`'s own."""
    asked = {name: tuple(sorted(getattr(options, name) or ())) for name in ("vocabs", "widths")}
    return replace(sizes, **{name: values for name, values in asked.items() if values})


def parts(kernels: Collection[str]) -> dict[str, Part]:
    """What shares entries of the table, by name, the most important first."""
    found: dict[str, Part] = {
        " and ".join(together): functools.partial(tuned_rows, together)
        for together in (["stats", "fused"], ["grad"])
        if together[0] in kernels
    }
    for dtype, softcap in product((torch.bfloat16, torch.float32), (False, True)):
        if "dot" in kernels:
            name = f"dot, {8 * dtype.itemsize} bits{', soft-cap' if softcap else ''}"
            found[name] = functools.partial(tuned_dot, dtype, softcap)
    return found


def tune(
    parts: dict[str, Part], sizes: Sizes, device: torch.device, out: Path, budget: Budget
) -> list[str]:
    """Do the parts and write the table after each; the names of those that there was no time for."""
    arch, missed = arch_of(device), list(parts)
    table = json.loads((out if out.exists() else own_table()).read_text())
    for name, part in parts.items():
        try:
            new = part(arch, sizes, device, budget)
        except OutOfTime:
            break
        table = merged(table, new)
        check_table(table)
        write(table, out)
        missed.remove(name)
        print(f"{name}: {len(new)} entries of family {family(arch)} written to {out}", flush=True)
    return missed


def tuned_rows(
    kernels: list[str], arch: str, sizes: Sizes, device: torch.device, budget: Budget
) -> list[Entry]:
    """The entries of row kernels that share theirs, for each size of vocabulary: fp32 logits, gradients in bf16."""

    def runs(kernel: str, n: int, vocab: int) -> Workload:
        out = torch.float32 if INTERPRETED else torch.bfloat16
        options: dict[str, Any] = {
            "loss": Loss("clipped", "k3"),
            "out": out,
            "entropy": kernel == "stats",
        }
        return row_runs(kernel, n=n, device=device, vocab=vocab, **options)

    first = runs(kernels[-1], sizes.row_counts[-1], sizes.vocabs[-1])
    usable = shortlist(sizes.rows, first, lambda c: broken_rules(kernels, c, arch), budget)
    winners: Winners = {None: {}}
    for vocab in sizes.vocabs:
        workloads = [runs(kernel, n, vocab) for kernel in kernels for n in sizes.row_counts]
        winners[None][vocab] = fastest(usable, workloads, budget)
    return entries({"kernels": kernels}, winners, device)


def tuned_dot(
    dtype: torch.dtype, softcap: bool, arch: str, sizes: Sizes, device: torch.device, budget: Budget
) -> list[Entry]:
    """The entries of the scoring kernel for operands of `dtype`, for each width and size of vocabulary."""

    def runs(n: int, width: int, vocab: int) -> Workload:
        transform = "soft-cap" if softcap else "plain"
        run_of = dot_runs(dtype, n=n, device=device, width=width, vocab=vocab, transform=transform)
        return lambda c: run_of(
            replace(c, splits=configs.splits_of(vocab, c.block_v, SPLITS_AT_MOST))
        )

    able = [c for c in sizes.dot if not c.use_tma or family(arch) in ("sm_90", "sm_100")]
    first = runs(sizes.row_counts[-1], sizes.widths[-1], sizes.vocabs[-1])
    usable = shortlist(
        able, first, lambda c: broken_rules(["dot"], c, arch, dtype, softcap), budget
    )
    winners: Winners = {}
    for width, vocab in product(sizes.widths, sizes.vocabs):
        workloads = [runs(n, width, vocab) for n in sizes.row_counts]
        winners.setdefault(width, {})[vocab] = fastest(usable, workloads, budget)
    return entries(
        {"operand_bits": 8 * dtype.itemsize, "aligned": True, "softcap": softcap}, winners, device
    )


def broken_rules(
    kernels: list[str],
    config: Config,
    arch: str,
    dtype: torch.dtype = torch.float32,
    softcap: bool = False,
) -> tuple[str, ...]:
    """The rules that the kernels break by these tiles, in any variant; interpreted kernels have no rules."""
    if INTERPRETED:
        return ()
    from benchmarks.aot import matrix
    from benchmarks.aot.checks import compile_launch

    if isinstance(config, DotConfig):
        config = replace(config, splits=1)
        cases = matrix.dot_cases(arch, config, dtype, softcap=softcap, aligned=True)
    else:
        cases = (case for kernel in kernels for case in matrix.row_cases(kernel, arch, config))
    return next(
        (result.broken for c in cases if (result := compile_launch(c.caught(), arch)).broken), ()
    )


def fastest(candidates: Iterable[Config], workloads: list[Workload], budget: Budget) -> Config:
    """The candidate with the least product of times, so that each workload counts alike."""
    times = {}
    for config in candidates:
        budget.check()
        times[config] = math.prod(seconds(workload(config)) for workload in workloads)
    assert times, "every candidate breaks a rule"
    return min(times, key=times.__getitem__)


def shortlist(
    candidates: Iterable[Any], workload: Workload, broken: Callable[[Any], Any], budget: Budget
) -> list[Any]:
    """The fastest few by one workload that break no rule; to compile all for the rules would take longer."""

    def duration(config: Any) -> float:
        budget.check()
        return seconds(workload(config))

    ranked = sorted(candidates, key=duration)
    return list(islice((c for c in ranked if not broken(c)), SHORTLIST))


def seconds(run: Callable[[], Any]) -> float:
    if not INTERPRETED:
        try:
            return (
                float(triton.testing.do_bench(run, warmup=20, rep=80, return_mode="median")) / 1e3
            )
        except OutOfResources:  # more shared memory than a program may have
            return math.inf
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# The table of tiles, `tuned.json`: entries from winners, merged into what is there, checked, written whole.


def own_table() -> Path:
    return Path(str(resources.files(configs.__package__).joinpath(configs.TABLE)))


def write(table: dict[str, list[Entry]], out: Path) -> None:
    """Write the table whole: whoever reads it sees the old one or the new one."""
    beside = out.with_name(out.name + ".part")
    beside.write_text(text_of(table))
    assert json.loads(beside.read_text()) == table
    os.replace(beside, out)


def entries(fixed: Entry, winners: Winners, device: torch.device) -> list[Entry]:
    """The winners by width and vocabulary: neighbours that agree as one entry, the last of each without a bound."""
    measured = False if INTERPRETED else {
        "device": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    by_width = [(width, joined(sorted(by_vocab.items()))) for width, by_vocab in winners.items()]
    found = []
    for width, by_vocab in joined(by_width):
        for vocab, config in by_vocab:
            values = asdict(config)
            bounds: Entry = {"vocab_at_most": vocab}
            if isinstance(config, DotConfig):
                del values["splits"]
                bounds = {"hidden_width_at_most": width, **bounds, "splits_at_most": SPLITS_AT_MOST}
            found.append(
                {
                    "family": family(arch_of(device)),
                    **fixed,
                    **bounds,
                    **values,
                    "measured": measured,
                }
            )
    return found


def joined(steps: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(bound, what holds up to it), without the steps that the next one repeats; the last has no bound."""
    kept = [
        step
        for step, after in zip(steps, [*steps[1:], (None, None)], strict=True)
        if step[1] != after[1]
    ]
    return [*kept[:-1], (None, kept[-1][1])]


def merged(table: dict[str, list[Entry]], new: list[Entry]) -> dict[str, list[Entry]]:
    """The table with the new entries in the place of those that they make out of date."""

    def place(entry: Entry) -> tuple[Any, ...]:
        return tuple(
            str(entry.get(name)) for name in ("family", "kernels", "operand_bits", "aligned")
        )

    replaced = {place(e) for e in new}
    fresh = {kind: [e for e in new if ("kernels" in e) == (kind == "rows")] for kind in table}
    return {
        kind: [*fresh[kind], *(e for e in table[kind] if place(e) not in replaced)]
        for kind in table
    }


def check_table(table: dict[str, list[Entry]]) -> None:
    """Every family finds tiles for every kernel, whatever the sizes."""
    for name in configs.FAMILIES:
        rows = [e for e in table["rows"] if e["family"] == name]
        for kernel in configs.ROW_KERNELS:
            assert any(kernel in e["kernels"] and e["vocab_at_most"] is None for e in rows), (
                name,
                kernel,
            )
        assert all(("stats" in e["kernels"]) == ("fused" in e["kernels"]) for e in rows), name
        dots = [
            e
            for e in table["dot"]
            if e["family"] == name and e["vocab_at_most"] is e["hidden_width_at_most"] is None
        ]
        for wanted in product((16, 32), (True, False), (True, False)):
            pairs = tuple(zip(("operand_bits", "aligned", "softcap"), wanted, strict=True))
            assert any(all(e[key] in (x, None) for key, x in pairs) for e in dots), (name, wanted)


def text_of(table: dict[str, list[Entry]]) -> str:
    """JSON with an entry a line."""
    kinds = (
        f'  "{kind}": [\n' + ",\n".join(f"    {json.dumps(e)}" for e in found) + "\n  ]"
        for kind, found in table.items()
    )
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
