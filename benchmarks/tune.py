"""Times the kernels' tiles on the GPU at hand and writes the winners to `tuned.json`.

Only the entries of the device's family are replaced. A candidate that breaks a rule of
`benchmarks.aot.checks`, such as spilling registers, is not timed. Statistics and fused kernel share
one winner, since their bits must agree. The table is written after each part (statistics and fused;
gradient): a tuner that runs out of time loses no more than a part. A part's entries are those of
the vocabularies asked for alone, the last of which stands for all that are larger.

``--dry-run`` lists what would be timed, and does the same at toy sizes on any machine, into a file
that is thrown away. Without a GPU it needs ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import argparse
import json
import math
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

from benchmarks.aot.kernels import Loss, row_runs
from benchmarks.machine import write_whole
from grpo_kernels.backends import triton_rows
from grpo_kernels.backends.triton_rows.device import FAMILIES, TABLE, RowConfig, arch_of, family
from grpo_kernels.backends.triton_rows.rows import INTERPRETED

Entry = dict[str, Any]
Workload = Callable[[Any], Callable[[], Any]]  # what is timed, for a configuration
PARTS = (("stats", "fused"), ("grad",))  # kernels that share their entries
KERNELS = tuple(part[0] for part in PARTS)
SHORTLIST = 6


@dataclass(frozen=True)
class Sizes:
    row_counts: tuple[int, ...]
    vocabs: tuple[int, ...]
    tiles: tuple[RowConfig, ...]


REAL = Sizes(
    row_counts=(256, 4096),
    vocabs=(32000, 128256, 151936, 201088, 256000),
    tiles=tuple(
        RowConfig(1, block_v, warps, stages)
        for block_v, warps, stages in product((1024, 2048, 4096, 8192), (4, 8, 16), (1, 2, 3, 4))
        if 8 <= block_v // (32 * warps) <= 32  # columns a thread: four, or eight, of each quarter
    ),
)
TOY = Sizes((4,), (40, 100), (RowConfig(16, 32, 1, 1), RowConfig(16, 64, 1, 1)))


class OutOfTime(Exception):
    """The budget is spent."""


def check_time(until: float) -> None:
    if time.monotonic() > until:
        raise OutOfTime


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--dry-run", action="store_true", help="toy sizes; the table is not touched")
    add("--out", type=Path, metavar="FILE", help="instead of the package's own table")
    about = "stop after that; finished parts are written"
    add("--budget-seconds", type=float, default=math.inf, help=about)
    add("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="stats: and fused")
    add("--vocabs", nargs="+", type=int, metavar="V", help="only these sizes of the vocabulary")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.dry_run and INTERPRETED):
        instead = "--dry-run with TRITON_INTERPRET=1 needs none"
        print(f"error: no GPU to time on; {instead}", file=sys.stderr)
        return 2
    sizes = TOY if options.dry_run else REAL
    if options.vocabs:
        sizes = replace(sizes, vocabs=tuple(sorted(options.vocabs)))
    if options.dry_run:
        for config in REAL.tiles:
            print(f"candidate: {config}")
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or (Path(folder, TABLE) if options.dry_run else own_table())
        until = time.monotonic() + options.budget_seconds
        missed = tune(options.kernels, sizes, device, out, until)
    if missed:
        print(f"no time for: {', '.join(missed)}; they stay as they were")
    return 1 if missed else 0


def tune(
    kernels: Collection[str], sizes: Sizes, device: torch.device, out: Path, until: float
) -> list[str]:
    """Do the parts, and write the table after each. Return the parts that time was short for."""
    parts = [part for part in PARTS if part[0] in kernels]
    missed = [" and ".join(part) for part in parts]
    arch = arch_of(device)
    table = json.loads((out if out.exists() else own_table()).read_text())
    for part in parts:
        try:
            winners = tuned(part, arch, sizes, device, until)
        except OutOfTime:
            break
        new = entries(part, winners, device)
        table = merged(table, new)
        check_table(table)
        write_whole(out, text_of(table))
        name = missed.pop(0)
        print(f"{name}: {len(new)} entries of family {family(arch)} written to {out}", flush=True)
    return missed


def tuned(
    part: Sequence[str], arch: str, sizes: Sizes, device: torch.device, until: float
) -> dict[int, RowConfig]:
    def runs(kernel: str, n: int, vocab: int) -> Workload:
        out = torch.float32 if INTERPRETED else torch.bfloat16
        options: dict[str, Any] = {"loss": Loss("clipped", "k3"), "entropy": kernel == "stats"}
        return row_runs(kernel, n=n, device=device, vocab=vocab, out=out, **options)

    first = runs(part[-1], sizes.row_counts[-1], sizes.vocabs[-1])
    usable = shortlist(sizes.tiles, first, lambda c: broken_rules(part, c, arch), until)
    winners = {}
    for vocab in sizes.vocabs:
        workloads = [runs(kernel, n, vocab) for kernel in part for n in sizes.row_counts]
        winners[vocab] = fastest(usable, workloads, until)
    return winners


def broken_rules(part: Sequence[str], config: RowConfig, arch: str) -> tuple[str, ...]:
    """The rules that the kernels break by this tile, in any variant; none if interpreted."""
    if INTERPRETED:
        return ()
    from benchmarks.aot import matrix
    from benchmarks.aot.checks import compile_launch

    for case in (case for kernel in part for case in matrix.row_cases(kernel, arch, config)):
        if broken := compile_launch(case.caught(), arch).broken:
            return broken
    return ()


def fastest(candidates: Iterable[Any], workloads: list[Workload], until: float) -> Any:
    times = {}
    for config in candidates:
        check_time(until)
        times[config] = math.prod(seconds(workload(config)) for workload in workloads)
    assert times, "every candidate breaks a rule"
    return min(times, key=times.__getitem__)


def shortlist(
    candidates: Iterable[Any], workload: Workload, broken: Callable[[Any], Any], until: float
) -> list[Any]:
    """The fastest few by one workload that break no rule; compiling all would take longer."""

    def duration(config: Any) -> float:
        check_time(until)
        return seconds(workload(config))

    ranked = sorted(candidates, key=duration)
    return list(islice((c for c in ranked if not broken(c)), SHORTLIST))


def seconds(run: Callable[[], Any]) -> float:
    if not INTERPRETED:
        try:
            ms = triton.testing.do_bench(run, warmup=20, rep=80, return_mode="median")
            return float(ms) / 1e3
        except OutOfResources:  # more shared memory than a program may have
            return math.inf
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# The table of tiles, `tuned.json`: entries from winners, merged into what is there, checked,
# written whole.


def own_table() -> Path:
    return Path(str(resources.files(triton_rows).joinpath(TABLE)))


def text_of(table: list[Entry]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(e)}" for e in table) + "\n]\n"


def entries(
    part: Sequence[str], winners: dict[int, RowConfig], device: torch.device
) -> list[Entry]:
    """The winners by vocabulary: neighbors that agree as one entry, the last without a bound."""
    measured: Any = False
    if not INTERPRETED:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        measured = {"device": torch.cuda.get_device_name(device), **versions}
    where = {"family": family(arch_of(device)), "kernels": list(part)}
    return [
        {**where, "vocab_at_most": vocab, **asdict(config), "measured": measured}
        for vocab, config in joined(sorted(winners.items()))
    ]


def joined(steps: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(bound, value up to it), without the steps that the next repeats; the last has no bound."""
    after = [value for _, value in steps[1:]]
    kept = [step for step, value in zip(steps, [*after, None], strict=True) if step[1] != value]
    return [*kept[:-1], (None, kept[-1][1])]


def merged(table: list[Entry], new: list[Entry]) -> list[Entry]:
    replaced = [(e["family"], e["kernels"]) for e in new]
    return [*new, *(e for e in table if (e["family"], e["kernels"]) not in replaced)]


def check_table(table: list[Entry]) -> None:
    """Every family finds tiles for every kernel, whatever the vocabulary."""
    for name, part in product(FAMILIES, PARTS):
        found = [e for e in table if (e["family"], tuple(e["kernels"])) == (name, part)]
        assert any(e["vocab_at_most"] is None for e in found), (name, part)


if __name__ == "__main__":
    sys.exit(main())
