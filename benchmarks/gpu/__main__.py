"""``python -m benchmarks.gpu``: smoke, GPU tests, sanitizers, benchmarks, in this order and in bounded time.

The JSON file is complete after every single result. Exit status: 0 if smoke and tests passed, the sanitizers found
nothing in our kernels and no goal was missed; 1 otherwise; 2 if it could not start. docs/gpu.md says how to use it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.bench import plan, run_bench
from benchmarks.gpu.outside import run_sanitizer, run_tests
from benchmarks.gpu.smoke import run_smoke
from benchmarks.gpu.summary import conclude
from benchmarks.plan import gpu_cases
from benchmarks.process import ROOT, environment
from benchmarks.run import Results, describe

STEPS = ("smoke", "tests", "sanitizer", "bench")  # a peer may bring the process down, so the benchmarks are the last
SHARES = {"smoke": 0.25, "tests": 0.40, "sanitizer": 0.25}  # of the time left; the last step gets all of it
RESERVE_SECONDS = 5.0  # to write the end


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    cases = gpu_cases()
    providers = list(dict.fromkeys(name for case in cases for name in case.providers))
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be given more than once")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="for everything (default 560)")
    parser.add_argument("--out", type=Path, help="result file (default benchmarks/results/<device>-<date>.json)")
    parser.add_argument("--cases", nargs="+", choices=[x.name for x in cases], metavar="CASE", help="only these cases")
    parser.add_argument("--providers", nargs="+", choices=providers, metavar="PEER", help="these, ours and products")
    parser.add_argument("--profile", action="store_true", help="also profile a step of ours by kernel")
    parser.add_argument("--no-micro", action="store_true", help="leave out the row kernels and the device's ceilings")
    parser.add_argument("--flush-l2", action="store_true", help="overwrite the L2 cache before each measured step")
    parser.add_argument("--commit", help="what was measured, where the checkout does not tell")
    parser.add_argument("--dry-run", action="store_true", help="all of it on a CPU, at toy sizes, once")
    parser.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: sum up these results")
    options = parser.parse_args(given)
    if options.report is not None and not options.report.is_file():
        parser.error(f"--report: expected a file of results, got {options.report}")
    return options


def run_steps(results: Results, options: argparse.Namespace, folder: Path) -> None:
    """The steps asked for; one that fails is noted, and the next one runs. What they print stays in `folder`."""
    until = time.time() + options.budget_seconds - RESERVE_SECONDS
    chosen = [step for step in STEPS if not options.only or step in options.only]
    for step in chosen:
        left = until - time.time()
        seconds = left if step == chosen[-1] else left * SHARES[step]
        print(f"{step}: at most {seconds:.0f} s", flush=True)
        try:
            if step == "smoke":
                run_smoke(results, seconds=seconds, toy=options.dry_run)
            elif step == "tests":
                run_tests(results, seconds=seconds, folder=folder, toy=options.dry_run)
            elif step == "sanitizer":
                run_sanitizer(results, seconds=seconds, folder=folder, toy=options.dry_run)
            else:
                _bench(results, options, seconds)
        except Exception as error:
            results.merge("failed_steps", **{step: describe(error)})
            print(f"{step}: {describe(error)}", flush=True)


def _bench(results: Results, options: argparse.Namespace, seconds: float) -> None:
    results.merge(versions=machine.peer_versions())
    results.merge("clocks", before=machine.clocks())
    items = plan(options.cases, options.providers, profiles=options.profile, parts=not options.no_micro)
    try:
        run_bench(results, items, seconds=seconds, flush=options.flush_l2, toy=options.dry_run)
    finally:
        results.merge("clocks", after=machine.clocks())


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = arguments(given)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if options.report:
        return 0 if conclude(Results(options.report, **json.loads(options.report.read_text()))) else 1
    if not (options.dry_run or torch.cuda.is_available()):
        print("error: no CUDA or ROCm device; --dry-run runs everything on a CPU at toy sizes", file=sys.stderr)
        return 2
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]], environment(toy=True))
    about = machine.describe(ROOT, options.commit)
    out = options.out or ROOT / "benchmarks" / "results" / f"{_name(options, about)}-{about['date'][:10]}.json"
    results = Results(out, format=2, status="running", dry_run=options.dry_run, machine=about, device=about["device"])
    results.merge(commit=about["commit"], date=about["date"])
    results.merge(command=list(sys.argv[1:] if given is None else given))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = out.with_name(out.name + ".logs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.time()
    status = "interrupted"
    try:
        run_steps(results, options, folder)
        status = "complete"
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        results.merge(status=status, seconds=round(time.time() - started, 1))
        ok = conclude(results)
        print(f"results: {out}, logs: {folder}", flush=True)
    return 0 if ok and status == "complete" else 1


def _name(options: argparse.Namespace, about: dict[str, Any]) -> str:
    """Name of the results: the device's."""
    return "cpu" if options.dry_run else re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
