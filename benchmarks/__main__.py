"""``python -m benchmarks``: the head of a policy loss on a CPU, ours and every peer in one run.

Writes a JSON file, complete after every single result, and prints tables in markdown; with --page
they go into benchmarks/results/README.md. Exit status: 1 if ours was wrong; 2 if it could not
start. Let nothing else run meanwhile: the tables say how much of the machine other processes used.
On a GPU: ``python -m benchmarks.gpu``.
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

from benchmarks import figures, machine, tables
from benchmarks.cases import BenchCase
from benchmarks.machine import ROOT
from benchmarks.plan import PARTS, cpu_cases
from benchmarks.run import How, Results, measure_case

RESULTS = ROOT / "benchmarks" / "results"
THREADS = min(2, os.cpu_count() or 1)
STEP = "step"  # the part that trains with TRL; only where asked for, it takes a quarter of an hour


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=(*PARTS, STEP), default=PARTS, help="only these parts")
    saved = "JSON file (default benchmarks/results/cpu[-part]-<date>.json)"
    add("--save", type=Path, help=saved)
    add("--page", action="store_true", help="the tables into README.md beside the results")
    add("--report", type=Path, metavar="JSON", help="measure nothing: show these results")
    add("--into", type=Path, default=RESULTS, help="where --page writes")
    add("--smoke", action="store_true", help="everything at toy size, once")
    options = parser.parse_args(given)
    if options.report is not None and not options.report.is_file():
        parser.error(f"--report: expected a file of results, got {options.report}")
    if options.smoke and options.page and options.into == RESULTS:
        parser.error("--page: expected --into too with --smoke, whose figures are no measurement")
    return options


def chosen(options: argparse.Namespace) -> list[BenchCase]:
    cases = [case for case in cpu_cases() if case.part in options.parts]
    toys = [replace(case.toy(), rounds=min(case.rounds, 1)) for case in cases]
    return toys if options.smoke else cases


def measure(options: argparse.Namespace, command: Sequence[str]) -> Results:
    torch.set_num_threads(THREADS)
    about = machine.about(on_gpu=False)
    kind = "" if options.parts == PARTS else f"-{'-'.join(options.parts)}"
    kind = "-smoke" if options.smoke else kind
    results = Results(
        options.save or RESULTS / f"cpu{kind}-{about['date'][:10]}.json",
        **about,
        status="running",
        smoke=options.smoke,
        command=[tables.tidy(x) for x in command],  # without places on this machine
        threads=THREADS,
        cases={},
    )
    for case in chosen(options):
        print(f"{case.name}: {', '.join(case.providers)}", flush=True)
        measure_case(case, case.providers, results, How())
    if STEP in options.parts:
        from benchmarks.step import measure_all

        measure_all(results, toy=options.smoke)
    results.merge(status="complete")
    return results


def with_others(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`data`, and the main cases or the training steps that it lacks, of the newest run in
    `folder`.

    Both take too long to be measured every time. ``runs`` has the conditions of steps of another
    run.
    """
    if data.get("smoke") or data.get("dry_run"):
        return data
    every = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    every = [x for x in every if x.get("device") == data["device"]]
    others = [data, *sorted(every, key=lambda x: x["date"], reverse=True)]
    base = next((x for x in others if figures.of_part(x, "main")), data)
    source = next((x for x in others if x.get(STEP)), base)
    if source is base:
        return base
    run = figures.of_run(source, STEP)
    about = {x: run.get(x) for x in ("date", "commit", "threads", "versions", "machine")}
    return {**base, STEP: source[STEP], "runs": {**(base.get("runs") or {}), STEP: about}}


def is_wrong(data: dict[str, Any]) -> bool:
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
    if options.page:
        tables.write(page, options.into / "README.md")
    return int(is_wrong(data))


if __name__ == "__main__":
    sys.exit(main())
