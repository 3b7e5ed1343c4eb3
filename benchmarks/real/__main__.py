"""``python -m benchmarks.real``: SmolLM2-135M-Instruct trained with stock TRL and with ours (`make
real`).

Two trainings run at a time, each on one core. Results are in a JSON file after each of them; the
tables go into docs/results.md and benchmarks/results/real.md, the figure into docs/plots/. Exit
status: 1 if a training failed, or ours was not stock TRL's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, parity
from benchmarks.figures import DEFAULTS, STOCK
from benchmarks.machine import ROOT
from benchmarks.real import errors, report
from benchmarks.real.model import make
from benchmarks.real.train import VARIANTS, train
from benchmarks.run import Results, describe

MODEL = ROOT / ".venv" / "real" / "model"
SEEDS, STEPS = (0, 1, 2), 20
STEPS_OF_OPTIONS = 10  # of the variants beside stock TRL and the defaults, at the first seed
AT_ONCE, START = 2, "spawn"  # trainings, each in a new process
TOLERANCE = 1e-3  # of a run of twenty steps: rounding grows from step to step


class Job(NamedTuple):
    name: str
    seed: int
    steps: int


def jobs(*, short: bool) -> list[Job]:
    if short:
        return [Job(name, 0, 2) for name in (STOCK, DEFAULTS)]
    main = [Job(name, seed, STEPS) for seed in SEEDS for name in (STOCK, DEFAULTS)]
    others = [name for name in VARIANTS if name not in (STOCK, DEFAULTS)]
    return [*main, *(Job(name, SEEDS[0], STEPS_OF_OPTIONS) for name in others)]


def run_all(todo: Sequence[Job], results: Results, model: Path, *, short: bool) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = pool.map(lambda job: _run(job, model, short=short), todo)
        for job, run in zip(todo, done, strict=True):
            name = f"{job.name}, seed {job.seed}"
            results.merge("runs", **{name: {"name": job.name, "seed": job.seed, **run}})
            print(f"{name}: {run['wall']} s, {run.get('reason', 'ok')[-300:]}", flush=True)


def _run(job: Job, model: Path, *, short: bool) -> dict[str, Any]:
    started = time.monotonic()
    tests = not short and job.steps == STEPS
    with ProcessPoolExecutor(1, multiprocessing.get_context(START)) as alone:
        try:
            options = {"seed": job.seed, "steps": job.steps, "short": short, "tests": tests}
            run = alone.submit(train, job.name, model, **options)
            outcome = {"status": "ok", **run.result()}
        # of the training, with its traceback there, or BrokenProcessPool
        except Exception as error:
            reason = str(error.__cause__ or describe(error)).strip()[-1500:]
            outcome = {"status": "error", "reason": reason}
    return {"wall": round(time.monotonic() - started), **outcome}


def compare(data: dict[str, Any]) -> None:
    """Write into each run of ours how far its metrics are from stock TRL's at that seed."""
    runs = data["runs"]
    for run in runs.values():
        stock = runs.get(f"{STOCK}, seed {run['seed']}", {})
        if run["name"] == STOCK or "steps" not in run or "steps" not in stock:
            continue
        apart = []
        for theirs, ours in zip(stock["steps"], run["steps"], strict=False):
            apart.append(parity.from_stock([theirs["logs"]], [ours["logs"]]))
        most = {k: max(step.get(k, 0.0) for step in apart) for k in apart[0]}
        off = [i for i, step in enumerate(apart) if max(step.values()) > TOLERANCE]
        worst = max(most.items(), key=lambda x: x[1])
        run |= {"alike": off[0] if off else len(apart), "worst": list(worst)}


def is_wrong(data: dict[str, Any]) -> bool:
    runs = data["runs"]
    first = runs.get(f"{DEFAULTS}, seed {SEEDS[0]}", {})
    cases = (data.get("errors") or {}).get("cases", {})
    failed = any(x["status"] != "ok" for x in (*runs.values(), *cases.values()))
    return failed or first.get("alike", -1) != len(first.get("steps", ()))


def main(given: Sequence[str] | None = None) -> int:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=about)
    add, saved = parser.add_argument, "JSON file (default benchmarks/results/cpu-real-<date>.json)"
    add("--short", action="store_true", help="two steps of 16 completions, once: two minutes")
    add("--save", type=Path, help=saved)
    add("--report", type=Path, metavar="JSON", help="train nothing: show these results")
    options = parser.parse_args(given)
    os.environ |= {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if options.report:
        data = json.loads(options.report.read_text())
    else:
        about = machine.about(on_gpu=False)
        day = f"{about['date'][:10]}{'-short' if options.short else ''}"
        path = options.save or ROOT / "benchmarks" / "results" / f"cpu-real-{day}.json"
        if options.short and not options.save:
            path = Path(tempfile.gettempdir()) / path.name
        results = Results(path, **about, status="running", short=options.short, runs={})
        run_all(jobs(short=options.short), results, make(MODEL), short=options.short)
        compare(results.data)
        if not options.short:
            errors.measure(results, MODEL)
        results.merge(status="complete")
        data = results.data
        print(f"results: {path}")
    print("\n".join(report.lines(data)))
    if not data["short"]:
        report.write(data, ROOT / "docs", ROOT / "benchmarks" / "results")
    return int(is_wrong(data))


if __name__ == "__main__":
    sys.exit(main())
