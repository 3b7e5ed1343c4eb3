"""``python -m benchmarks.gpu``: GPU tests, sanitizers, benchmarks, in this order and in bounded time.

The JSON file is complete after every single result. Exit status: 0 if the tests passed, the sanitizers found nothing in
our kernels and no goal was missed; 1 otherwise; 2 if it could not start.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.child import ROOT
from benchmarks.events import describe
from benchmarks.gpu import peers
from benchmarks.gpu.run_sanitizer import run_sanitizer
from benchmarks.gpu.run_tests import run_tests
from benchmarks.gpu.summary import conclude
from benchmarks.gpu.supervise import supervise
from benchmarks.plan import gpu_cases
from benchmarks.results import Results

STEPS = ("tests", "sanitizer", "bench")
SHARES = {"tests": 0.40, "sanitizer": 0.30, "bench": 1.0}  # of the time left when the step begins
CASE_SECONDS = 35.0  # for the rounds of a case; building and checking its providers takes about as long
RESERVE_SECONDS = 5.0  # to write the end


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be given more than once")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="for everything (default 560)")
    parser.add_argument("--out", type=Path, help="result file (default benchmarks/results/<device>-<date>.json)")
    parser.add_argument("--wheels", type=Path, nargs="+", default=[], help="folders with wheels of the peers")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in gpu_cases()], help="only these cases")
    parser.add_argument("--providers", nargs="+", help="only these providers")
    parser.add_argument("--profile", action="store_true", help="also profile a step of ours by kernel")
    parser.add_argument("--no-micro", action="store_true", help="leave out the row kernels and the device's ceilings")
    parser.add_argument("--flush-l2", action="store_true", help="overwrite the L2 cache before each measured step")
    parser.add_argument("--commit", help="what was measured, where the checkout does not tell")
    parser.add_argument("--dry-run", action="store_true", help="all of it on a CPU, at toy sizes, once")
    return parser.parse_args(given)


def plan_items(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the worker is to do, the most important first."""
    chosen = [case.name for case in gpu_cases() if not options.cases or case.name in options.cases]
    providers = {case.name: list(case.providers) for case in gpu_cases()}
    items: list[dict[str, Any]] = [
        {"kind": "case", "case": name, "seconds": CASE_SECONDS, "providers": providers[name]} for name in chosen
    ]
    if options.profile:
        profiled = [{"kind": "profile", "case": name} for name in chosen if name in ("main", "frozen")]
        items[2:2] = profiled  # a missed goal has to be explained, whatever else there is no time for
    if not options.no_micro:
        items.insert(0, {"kind": "ceilings"})
        items[4:4] = [{"kind": "rows"}, {"kind": "scoring"}]
    return items


def bench(results: Results, options: argparse.Namespace, *, seconds: float, folder: Path) -> None:
    """Install the peers and have all cases measured."""
    until = time.time() + seconds
    paths, report = peers.install(options.wheels, folder / "peers")
    results.merge("peers", installed=report)
    results.merge("clocks", before=machine.clocks())
    plan = {
        "toy": options.dry_run,
        "peers": paths,
        "until": until,
        "providers": options.providers,
        "flush": options.flush_l2,
    }
    try:
        supervise(plan_items(options), plan, results, folder=folder)
    finally:
        results.merge("clocks", after=machine.clocks())


def run_steps(results: Results, options: argparse.Namespace, folder: Path) -> None:
    """The steps asked for; one that fails is noted, and the next one runs."""
    until = time.time() + options.budget_seconds - RESERVE_SECONDS
    chosen = [step for step in STEPS if not options.only or step in options.only]
    for step in chosen:
        left = until - time.time()
        seconds = left if step == chosen[-1] else left * SHARES[step]
        print(f"{step}: at most {seconds:.0f} s", flush=True)
        try:
            if step == "tests":
                run_tests(results, seconds=seconds, folder=folder, toy=options.dry_run)
            elif step == "sanitizer":
                run_sanitizer(results, seconds=seconds, folder=folder, toy=options.dry_run)
            else:
                bench(results, options, seconds=seconds, folder=folder)
        except Exception as error:
            results.merge("failed_steps", **{step: describe(error)})
            print(f"{step}: {describe(error)}", flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = arguments(given)
    if not (options.dry_run or torch.cuda.is_available()):
        print("error: no CUDA or ROCm device; --dry-run runs everything on a CPU at toy sizes", file=sys.stderr)
        return 2
    about = machine.describe(ROOT, options.commit)
    device = "cpu" if options.dry_run else re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower()).strip("-")
    out = options.out or ROOT / "benchmarks" / "results" / f"{device}-{about['date'][:10]}.json"
    results = Results(out, format=2, status="running", dry_run=options.dry_run, machine=about, device=about["device"])
    results.merge(commit=about["commit"], date=about["date"])
    results.merge(command=list(sys.argv[1:] if given is None else given))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.time()
    status = "interrupted"
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-kernels-gpu-", ignore_cleanup_errors=True) as folder:
            run_steps(results, options, Path(folder))
        status = "complete"
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        results.merge(status=status, seconds=round(time.time() - started, 1))
        ok = conclude(results)
        print(f"results: {out}", flush=True)
    return 0 if ok and status == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
