"""``python -m benchmarks.gpu``: smoke, GPU tests, benchmarks, sanitizers, in this order and in bounded time.

The JSON file is complete after every single result. Exit status: 0 if smoke and tests passed, the sanitizers found
nothing in our kernels and no goal was missed; 1 otherwise; 2 if it could not start. docs/gpu.md says how to use it.
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

from benchmarks.cases import BenchCase
from benchmarks.gpu import logs, peers
from benchmarks.gpu.check_peers import check_peers
from benchmarks.gpu.run_sanitizer import run_sanitizer
from benchmarks.gpu.run_tests import run_tests
from benchmarks.gpu.smoke import run_smoke
from benchmarks.gpu.summary import conclude
from benchmarks.gpu.supervise import supervise
from benchmarks.harness import machine
from benchmarks.harness.child import ROOT
from benchmarks.harness.events import describe
from benchmarks.harness.results import Results
from benchmarks.plan import ANCHORS, GOAL_CASES, gpu_cases, passes

STEPS = ("smoke", "tests", "bench", "sanitizer")
SHARES = {
    "smoke": 0.25,
    "tests": 0.40,
    "bench": 0.75,
}  # of the time left when the step begins; the last one gets all of it
TURN_SECONDS = 8.0  # for the rounds of a peer and its anchors; building and checking it takes about as long
PROFILED = ("main", "frozen")  # a missed goal has to be explained
RESERVE_SECONDS = 5.0  # to write the end


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=STEPS, action="append", help="this step; may be given more than once")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="for everything (default 560)")
    parser.add_argument("--out", type=Path, help="result file (default benchmarks/results/<device>-<date>.json)")
    parser.add_argument("--wheels", type=Path, nargs="+", default=[], help="folders with the peers' wheels")
    cases = gpu_cases()
    providers = list(dict.fromkeys(name for case in cases for name in case.providers))
    parser.add_argument("--cases", nargs="+", choices=[x.name for x in cases], metavar="CASE", help="only these cases")
    parser.add_argument(
        "--providers",
        nargs="+",
        choices=providers,
        metavar="PEER",
        help="only these peers, each with ours and the products",
    )
    parser.add_argument("--profile", action="store_true", help="also profile a step of ours by kernel")
    parser.add_argument("--no-micro", action="store_true", help="leave out the row kernels and the device's ceilings")
    parser.add_argument("--flush-l2", action="store_true", help="overwrite the L2 cache before each measured step")
    parser.add_argument("--commit", help="what was measured, where the checkout does not tell")
    parser.add_argument("--dry-run", action="store_true", help="all of it on a CPU, at toy sizes, once")
    parser.add_argument(
        "--check-peers", action="store_true", help="without a GPU: are they importable, do they compile"
    )
    options = parser.parse_args(given)
    for folder in options.wheels:
        if not folder.is_dir():
            parser.error(f"--wheels: expected folders, got {folder}")
    return options


def plan_items(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the worker is to do, the most important first: the goals, what explains them, other peers, other cases."""
    chosen = [case for case in gpu_cases() if not options.cases or case.name in options.cases]
    goals = [case for case in chosen if case.name in GOAL_CASES]
    goal_items = [_case_items(case, options.providers) for case in goals]
    items = [item for case in goal_items for item in case[:1]]
    if options.profile:
        items += [{"kind": "profile", "case": case.name} for case in goals if case.name in PROFILED]
    if not options.no_micro:
        items += [{"kind": kind} for kind in ("ceilings", "rows", "scoring")]
    for place in range(1, max((len(case) for case in goal_items), default=0)):
        items += [item for case in goal_items for item in case[place : place + 1]]
    return items + [item for case in chosen if case not in goals for item in _case_items(case, options.providers)]


def _case_items(case: BenchCase, providers: Sequence[str] | None) -> list[dict[str, Any]]:
    """One item a pass, of those `providers`, if they are given, and the anchors; the first pass whatever is left."""
    of_passes = [
        [name for name in names if providers is None or name in providers or name in ANCHORS] for names in passes(case)
    ]
    kept = [names for i, names in enumerate(of_passes) if i == 0 or set(names) - set(ANCHORS)]
    return [
        {
            "kind": "case",
            "case": case.name,
            "pass": i,
            "last": i == len(kept) - 1,
            "seconds": TURN_SECONDS,
            "providers": names,
        }
        for i, names in enumerate(kept)
    ]


def bench(results: Results, options: argparse.Namespace, *, seconds: float, paths: Sequence[str], folder: Path) -> None:
    """Have all cases measured, with the peers that are installed or below `paths`."""
    until = time.time() + seconds
    results.merge("clocks", before=machine.clocks())
    plan = {
        "toy": options.dry_run,
        "peers": list(paths),
        "until": until,
        "flush": options.flush_l2,
    }
    try:
        supervise(plan_items(options), plan, results, folder=folder)
    finally:
        results.merge("clocks", after=machine.clocks())


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
                _bench_with_wheels(results, options, time.time() + seconds, folder)
        except Exception as error:
            results.merge("failed_steps", **{step: describe(error)})
            print(f"{step}: {describe(error)}", flush=True)
        finally:
            logs.bound(folder)


def _bench_with_wheels(results: Results, options: argparse.Namespace, until: float, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="grpo-kernels-peers-", ignore_cleanup_errors=True) as place:
        paths, report = peers.install(options.wheels, Path(place))
        results.merge("peers", installed=report)
        bench(results, options, seconds=until - time.time(), paths=paths, folder=folder)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = arguments(given)
    if not (options.dry_run or options.check_peers or torch.cuda.is_available()):
        print("error: no CUDA or ROCm device; --dry-run runs everything on a CPU at toy sizes", file=sys.stderr)
        return 2
    about = machine.describe(ROOT, options.commit)
    out = options.out or ROOT / "benchmarks" / "results" / f"{_name(options, about)}-{about['date'][:10]}.json"
    results = Results(out, format=2, status="running", dry_run=options.dry_run, machine=about, device=about["device"])
    results.merge(commit=about["commit"], date=about["date"])
    results.merge(command=list(sys.argv[1:] if given is None else given))
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = logs.folder_for(out)
    if options.check_peers:
        ok = check_peers(results, wheels=options.wheels, providers=options.providers, logs=folder)
        results.merge(status="complete")
        return 0 if ok else 1
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
    """Of the results: the device's."""
    if options.check_peers:
        return "peers"
    return "cpu" if options.dry_run else re.sub(r"[^a-z0-9]+", "-", str(about["device"]).lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
