"""``python -m benchmarks``: the head of a policy loss on a CPU, ours and every peer in one run.

Writes a JSON file, complete after every single result, and prints tables in markdown; with --plot they go into
docs/benchmarks.md, with plots. Exit status: 1 if ours was wrong; 2 if it could not start. Let nothing else run
meanwhile: the tables say how much of the machine other processes used. On a GPU: ``python -m benchmarks.gpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures, machine, tables, words
from benchmarks.cases import BenchCase
from benchmarks.machine import ROOT
from benchmarks.memory import give_back_what_is_freed
from benchmarks.plan import APART, PARTS, cpu_cases, memory_cases
from benchmarks.run import How, Results, measure_case

DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
THREADS = min(2, os.cpu_count() or 1)
STEP = "step"  # the part that trains with TRL; only where asked for, it takes a quarter of an hour


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, APART, STEP), default=PARTS, help="only these parts"
    )
    parser.add_argument(
        "--save", type=Path, help="JSON file (default benchmarks/results/cpu[-part]-<date>.json)"
    )
    parser.add_argument(
        "--plot", action="store_true", help="tables and plots into docs/benchmarks.md, docs/plots/"
    )
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="measure nothing: show these results"
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="where --plot writes")
    parser.add_argument("--smoke", action="store_true", help="everything at toy size, once")
    options = parser.parse_args(given)
    if options.report is not None and not options.report.is_file():
        parser.error(f"--report: expected a file of results, got {options.report}")
    if options.smoke and options.plot and options.docs == DOCS:
        parser.error("--plot: expected --docs too with --smoke, whose figures are no measurement")
    return options


def chosen(options: argparse.Namespace) -> list[BenchCase]:
    """The cases that were asked for, those of memory first."""
    cases = [case for case in (*memory_cases(), *cpu_cases()) if case.part in options.parts]
    return (
        [replace(case.toy(), rounds=min(case.rounds, 1)) for case in cases]
        if options.smoke
        else cases
    )


def measure(options: argparse.Namespace, command: Sequence[str]) -> Results:
    torch.set_num_threads(THREADS)
    about = machine.about(on_gpu=False)
    kind = (
        "-smoke"
        if options.smoke
        else ""
        if options.parts == PARTS
        else f"-{'-'.join(options.parts)}"
    )
    results = Results(
        options.save or RESULTS / f"cpu{kind}-{about['date'][:10]}.json",
        **about,
        status="running",
        smoke=options.smoke,
        command=[words.tidy(x) for x in command],  # without places on this machine
        threads=THREADS,
        cases={},
    )
    if APART in options.parts:
        give_back_what_is_freed()
    for case in chosen(options):
        print(f"{case.name}: {', '.join(case.providers)}", flush=True)
        measure_case(case, case.providers, results, How())
    if STEP in options.parts:
        from benchmarks.step import measure_all

        measure_all(results, toy=options.smoke)
    results.merge(status="complete")
    return results


def with_others(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`data`, and of the parts that it has none of those of the newest results of `folder` on such a device.

    Training steps and memory against tokens take too long to be measured every time. ``runs`` has the conditions of a
    part that is of another run than the main cases.
    """
    if data.get("smoke") or data.get("dry_run"):
        return data
    others = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    others = sorted(
        (x for x in others if x.get("device") == data["device"]),
        key=lambda x: x["date"],
        reverse=True,
    )
    base = next((x for x in (data, *others) if figures.of_part(x, "main")), data)
    page = {**base, "cases": dict(base.get("cases") or {}), "runs": dict(base.get("runs") or {})}
    for part in (STEP, APART):
        source = next((x for x in (data, *others) if x.get(part) or figures.of_part(x, part)), base)
        if source is not base:
            page |= {part: source[part]} if part in source else {}
            page["cases"] |= figures.of_part(source, part)
            of_part = figures.of_run(source, part)
            page["runs"][part] = {
                x: of_part.get(x) for x in ("date", "commit", "threads", "versions", "machine")
            }
    return page


def is_wrong(data: dict[str, Any]) -> bool:
    """True if the run was not complete, or ours was not right somewhere."""
    providers = [
        x for case in (data.get("cases") or {}).values() for x in figures.providers(case).items()
    ]
    wrong = any(
        figures.is_ours(name) and x["status"] not in ("ok", "absent") for name, x in providers
    )
    return wrong or tables.step_is_wrong(data) or data["status"] != "complete"


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if options.report:
        data = json.loads(options.report.read_text())
    else:
        results = measure(options, sys.argv[1:] if given is None else given)
        data = results.data
        print(f"results: {results.path}")
    page = with_others(data, RESULTS)
    print("\n".join(tables.lines(page)))
    if options.plot:
        from benchmarks import plots

        tables.write(
            page, options.docs / "benchmarks.md", plots.render(page, options.docs / "plots")
        )
    return int(is_wrong(data))


if __name__ == "__main__":
    sys.exit(main())
