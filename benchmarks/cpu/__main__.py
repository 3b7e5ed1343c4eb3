"""``python -m benchmarks.cpu``: tables in markdown, and a JSON file, complete after every single result.

Exit status: 1 if a goal was missed or ours was not right, 2 if it could not start. Let nothing else run meanwhile: each
table says how much of the machine other processes used.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cpu.cases import CASES
from benchmarks.cpu.measure import measure_case
from benchmarks.cpu.providers import PROVIDERS
from benchmarks.cpu.report import judge, lines
from benchmarks.gpu.child import ROOT
from benchmarks.gpu.machine import git_commit
from benchmarks.gpu.results import Results
from grpo_kernels import report

WORKSPACES = (64, 128, 256, 512)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512, help="tokens, N")
    parser.add_argument("--length", type=int, default=64, help="of a sequence; divides the rows")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=[x.name for x in CASES], choices=[x.name for x in CASES])
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), help=f"default: {' '.join(PROVIDERS)}")
    parser.add_argument("--backend", default="cpp", help='of "ours"')
    parser.add_argument(
        "--workspaces", type=int, nargs="*", metavar="MIB",
        help=f"ours and its products at these workspaces (default {WORKSPACES}), and eager, in place of the providers",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--save", type=Path, help="JSON file (default benchmarks/results/cpu-<date>.json)")
    options = parser.parse_args(given)
    if options.rows % options.length:
        parser.error(f"--rows: expected a multiple of --length {options.length}, got {options.rows}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = arguments(given)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(options.threads)
    providers = options.providers
    if options.workspaces is not None:
        sizes = options.workspaces or WORKSPACES
        providers = [f"{name}@{mib}" for mib in sizes for name in ("ours", "products")] + ["eager"]
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    results = Results(
        options.save or ROOT / "benchmarks" / "results" / f"cpu-{date[:10]}.json",
        format=1,
        command=list(sys.argv[1:] if given is None else given),
        machine=_machine(),
        commit=git_commit(ROOT),
        date=date,
        threads=options.threads,
        repetitions=options.repetitions,
        cases={},
    )
    for case in CASES:
        if case.name in options.cases:
            measure_case(
                replace(case, n=options.rows, h=options.hidden, v=options.vocab, t=options.length),
                results,
                providers=providers,
                backend=options.backend,
                repetitions=options.repetitions,
                threads=options.threads,
                memory=not options.no_memory,
            )
    cases = results.data["cases"]
    if options.workspaces is None:
        results.merge(goals=judge(cases))
    print("\n".join(lines(results.data)), f"\nresults: {results.path}")
    wrong = any(
        x["status"] != "ok" for case in cases.values() for name, x in case["providers"].items() if name[:4] == "ours"
    )
    return int(wrong or any(goal["verdict"] == "fail" for goal in results.data.get("goals", [])))


def _machine() -> report.Report:
    """The environment, without the library's place on this machine."""
    found = report.collect()
    found["backend"]["C++ library"] = found["backend"]["C++ library"].split(",")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
