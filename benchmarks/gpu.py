"""``python -m benchmarks.gpu``: smoke test, GPU tests, sanitizers, benchmarks, in bounded time.

The JSON file has each benchmark's result at once, and those of tests when their pytest ends. Exit
status: 0 if smoke and tests passed, the sanitizers found nothing in our kernels and no goal was
missed; 1 otherwise; 2 if it could not start. docs/dev/testing.md says how to use it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import figures, machine, tables, timing
from benchmarks.gpu_parts import PARTS, profile_step
from benchmarks.machine import ROOT
from benchmarks.plan import ANCHORS, GOAL_CASES, gpu_cases, passes
from benchmarks.run import How, Results, describe, measure_case

RESERVE_SECONDS = 5.0  # to write the end
PEER_SECONDS = 8.0  # of a peer's rounds with its anchors; building and checking take about as long
PROFILED = ("main", "frozen")  # a missed goal has to be explained
PYTEST = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider")
SMOKE = "tests/gpu/test_gpu_smoke.py"
ALONE = ("tests/gpu/test_gpu_sizes.py",)  # its tests want much memory
MOST_WORKERS = 12
ONE_TEST_SECONDS = 150
# What each tool watches.
TOOLS = {"memcheck": "not 151936 and not bandwidth", "racecheck": "9001 and bfloat16"}
NOT_RUN = ("absent", "skipped", "out of time", "out of memory")
FOUND = 99  # exit status if the tool found something
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/bin")
KERNELS = ROOT / "grpo_kernels" / "backends" / "triton_rows"
# the fastest of each stands for it
FAMILIES = {"liger": ("liger_grpo", "liger_grpo/uncompiled", "liger_torch", "liger_ce")}


class Goal(NamedTuple):
    case: str
    over: str
    under: str
    limit: float
    at_least: bool = True


GOALS = (
    Goal("main", "ours", "products", 1.20, at_least=False),
    Goal("main", "trl", "ours", 1.25),
    Goal("main", "liger", "ours", 1.25),
    Goal("frozen", "ours", "products", 1.20, at_least=False),
    Goal("frozen", "trl", "ours", 1.7),
    Goal("frozen", "liger", "ours", 1.7),
    Goal("half_zero", "trl", "ours", 1.7),
    Goal("half_zero", "liger", "ours", 1.7),
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    cases = gpu_cases()
    providers = list(dict.fromkeys(name for case in cases for name in case.providers))
    add = parser.add_argument
    add("--only", choices=STEPS, action="append", help="this step; may be given more than once")
    add("--budget-seconds", type=float, default=560.0, help="for everything (default 560)")
    add("--out", type=Path, help="result file (default benchmarks/results/<device>-<date>.json)")
    names = [x.name for x in cases]
    add("--cases", nargs="+", choices=names, metavar="CASE", help="only these cases")
    peers = {"nargs": "+", "choices": providers, "metavar": "PEER"}
    add("--providers", **peers, help="these, ours and products")
    add("--profile", action="store_true", help="also profile a step of ours by kernel")
    add("--no-micro", action="store_true", help="no row kernels, no ceilings of the device")
    add("--flush-l2", action="store_true", help="overwrite the L2 cache before each step")
    add("--commit", help="what was measured, where the checkout does not tell")
    add("--dry-run", action="store_true", help="all of it on a CPU, at toy sizes, once")
    add("--report", type=Path, metavar="JSON", help="measure nothing: sum up these results")
    options = parser.parse_args(given)
    if options.report is not None and not options.report.is_file():
        parser.error(f"--report: expected a file of results, got {options.report}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if options.report:
        results = Results(options.report, **json.loads(options.report.read_text()))
        return 0 if conclude(results) else 1
    if not (options.dry_run or torch.cuda.is_available()):
        instead = "--dry-run runs everything on a CPU at toy sizes"
        print(f"error: no CUDA or ROCm device; {instead}", file=sys.stderr)
        return 2
    # Triton reads it when it is imported
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        toy = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        again = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **toy})
    about = machine.about(on_gpu=not options.dry_run, commit=options.commit)
    name = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    out = options.out or ROOT / "benchmarks" / "results" / f"{name}-{about['date'][:10]}.json"
    command = list(sys.argv[1:] if given is None else given)
    results = Results(out, **about, status="running", dry_run=options.dry_run, command=command)
    folder = logs(results)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started, status = time.time(), "interrupted"
    try:
        timing.end_at_signals()
        run_steps(results, options)
        status = "interrupted" if timing.is_asked() else "complete"
    except KeyboardInterrupt:
        pass
    finally:
        if status != "complete":
            print(status, flush=True)
        results.merge(status=status, seconds=round(time.time() - started, 1))
        ok = conclude(results)
        print(f"results: {out}, logs: {folder}", flush=True)
    return 0 if ok and status == "complete" else 1


def logs(results: Results) -> Path:
    return results.path.with_name(results.path.name + ".logs")


def run_steps(results: Results, options: argparse.Namespace) -> None:
    """The steps asked for; one that fails is noted, and the next one runs."""
    end = time.time() + options.budget_seconds - RESERVE_SECONDS
    chosen = [step for step in STEPS if not options.only or step in options.only]
    for step in chosen:
        if timing.is_asked():
            return
        share, function = STEPS[step]
        until = end if step == chosen[-1] else time.time() + share * (end - time.time())
        print(f"{step}: at most {until - time.time():.0f} s", flush=True)
        try:
            function(results, options, until)
        except Exception as error:
            results.merge("failed_steps", **{step: describe(error)})
            print(f"{step}: {describe(error)}", flush=True)


def run(command: Sequence[str], until: float, log: Path, **env: str) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of `command`, interrupted at `until`."""
    path = os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
    full = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **env}
    code: int | None = None
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=full, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while (code := process.poll()) is None and not timing.is_past(until):
                time.sleep(0.1)
        finally:
            for kind in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, kind)
                    try:
                        process.wait(10.0)
                    except subprocess.TimeoutExpired:
                        continue
    return code, log.read_text(errors="replace")


def run_smoke(results: Results, options: argparse.Namespace, until: float) -> None:
    run_tests(results, "smoke", [SMOKE, "-m", "not gpu" if options.dry_run else "gpu"], until)


def run_gpu_tests(results: Results, options: argparse.Namespace, until: float) -> None:
    others = [f"--ignore={name}" for name in ALONE]
    most = time.time() + 0.75 * (until - time.time())
    run_tests(results, "together", ["tests/gpu", "-m", "gpu", *others], most)
    run_tests(results, "alone", [*ALONE, "-m", "gpu", "-p", "no:xdist"], until)


def run_tests(results: Results, name: str, what: Sequence[str], until: float) -> None:
    """Run pytest on `what`, in processes that share the GPU: most of the time compiles kernels."""
    xml = logs(results) / f"{name}.xml"
    command = [*PYTEST, "--color=no", "--tb=short", *what, f"--junitxml={xml}", "--durations=10"]
    if importlib.util.find_spec("xdist") is not None and "no:xdist" not in what:
        workers = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) * 3 // 4))
        command += ["-n", str(workers), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={ONE_TEST_SECONDS}")
    results.merge("tests", name, status="running")
    started = time.time()
    code, output = run(command, until, xml.with_suffix(".log"))
    summary = tests_summary(code, output, xml)
    results.merge("tests", name, seconds=round(time.time() - started, 1), **summary)
    print(f"{name}: {summary['status']} {summary['counts']}", flush=True)


def tests_summary(code: int | None, output: str, xml: Path) -> dict[str, Any]:
    statuses = {None: "out of time", 0: "passed", 1: "failed", 5: "nothing selected"}
    status = statuses.get(code, "error")
    found: dict[str, Any] = {"status": status, "exit_status": code}
    try:
        found |= _from_xml(ElementTree.parse(xml).getroot())
    except (OSError, ElementTree.ParseError):  # each line of -v has the progress in percent
        line = r"^(?=.*\[ *\d+%\]).*?\b(PASSED|FAILED|ERROR|SKIPPED)\b"
        found["counts"] = Counter(x.lower() for x in re.findall(line, output, re.MULTILINE))
    well = status in ("passed", "nothing selected")
    return found if well else {**found, "output": output[-4000:]}


def _from_xml(root: ElementTree.Element) -> dict[str, Any]:
    counts = Counter(passed=0, failed=0, error=0, skipped=0)
    failures, said, skips = [], {}, Counter[str]()
    outcomes = {"failure": "failed", "error": "error", "skipped": "skipped"}
    for test in root.iter("testcase"):
        name = f"{test.get('classname', '')}::{test.get('name', '')}"
        outcome = next((x for x in test if x.tag in outcomes), None)
        counts["passed" if outcome is None else outcomes[outcome.tag]] += 1
        if outcome is not None and outcome.tag == "skipped":
            skips[outcome.get("message") or ""] += 1
        elif outcome is not None:
            text = f"{outcome.get('message') or ''}\n{outcome.text or ''}"
            failures.append({"test": name, "text": text[:1500]})
        if recorded := {x.get("name"): x.get("value") for x in test.iter("property")}:
            said[name] = recorded
    return {"counts": counts, "failures": failures[:40], "skipped_for": skips, "said": said}


def run_sanitizers(results: Results, options: argparse.Namespace, until: float) -> None:
    places = (shutil.which("compute-sanitizer"), *(f"{x}/compute-sanitizer" for x in PLACES))
    tool = next((x for x in places if x and Path(x).exists()), None)
    for i, (check, which) in enumerate(TOOLS.items()):
        if options.dry_run or tool is None:
            reason = "dry run" if options.dry_run else "compute-sanitizer is not on the path"
            results.merge("sanitizer", check, status="absent", reason=reason)
            continue
        results.merge("sanitizer", check, status="running")
        xml = logs(results) / f"{check}.xml"
        command = [tool, f"--tool={check}", f"--error-exitcode={FOUND}", "--print-limit=50"]
        command += ["--launch-timeout=120", "--target-processes=application-only", *PYTEST, SMOKE]
        command += ["-m", "gpu", "-k", which, f"--junitxml={xml}"]
        # without a pool, an access past the end of a tensor is one past the end of an allocation
        share = time.time() + (until - time.time()) / (len(TOOLS) - i)
        no_pool = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code, output = run(command, share, xml.with_suffix(".log"), **no_pool)
        tests = tests_summary(code, output, xml)["counts"]
        results.merge("sanitizer", check, counts=tests, **sanitizer_summary(code, output, tests))


def sanitizer_summary(code: int | None, output: str, tests: dict[str, int]) -> dict[str, Any]:
    """Sum up what the tool said; the vendor's own kernels are not ours to judge."""
    _, *reports = re.split(r"(?m)^(?==+ (?:Invalid|Error|Warning|Race|Program hit))", output)
    ours = [x for x in reports if any(re.search(rf"\b{name}\b", x) for name in kernel_names())]
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    if code is None:
        status = "out of time"
    elif total is None or not tests.get("passed"):
        status = "error"  # the tool or the tests did not get through
    elif ours:
        status = "found"
    elif int(total.group(1)) > 0:
        status = "found elsewhere"
    else:
        status = "tests failed" if tests.get("failed") or tests.get("error") else "clean"
    return {
        "status": status, "exit_status": code, "reports": len(reports), "in_our_kernels": len(ours),
        "summary": total.group(0) if total else "",
        "first": [x[:600] for x in (ours or reports)[:3]],
        **({"output": output[-2000:]} if status in ("error", "out of time") else {}),
    }  # fmt: skip


def kernel_names() -> list[str]:
    text = "\n".join(path.read_text() for path in sorted(KERNELS.glob("*.py")))
    return re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", text)


class Item(NamedTuple):
    """One thing to measure: a case with some providers, or a part by itself."""

    kind: str  # "case", "profile", or one of `gpu_parts.PARTS`
    case: str = ""
    providers: tuple[str, ...] = ()


def plan(
    cases: Sequence[str] | None,
    providers: Sequence[str] | None,
    *,
    profiles: bool = False,
    parts: bool = True,
) -> list[Item]:
    """The items, the most important first: the goals, what explains them, other peers, other cases.

    Of `cases` and `providers` None means all; ours and the products come with any provider.
    """
    goals, others = [], []
    for case in (x for x in gpu_cases() if not cases or x.name in cases):
        wanted = {*(providers or case.providers), *ANCHORS}
        of_passes = [tuple(x for x in names if x in wanted) for names in passes(case)]
        kept = [names for i, names in enumerate(of_passes) if i == 0 or set(names) - set(ANCHORS)]
        of_case = [Item("case", case.name, x) for x in kept]
        (goals if case.name in GOAL_CASES else others).append(of_case)
    found = [of_case[0] for of_case in goals]
    found += [Item("profile", x.case) for x in list(found) if profiles and x.case in PROFILED]
    found += [Item(kind) for kind in PARTS if parts]
    for place in range(1, max(map(len, goals), default=0)):
        found += [item for of_case in goals for item in of_case[place : place + 1]]
    return found + [item for of_case in others for item in of_case]


def run_layouts(results: Results, options: argparse.Namespace, until: float) -> None:
    if importlib.util.find_spec("transformers") is None:
        missing = {"status": "absent", "reason": "transformers is not installed"}
        results.merge("layouts", "any attention", **missing)
        return
    from benchmarks.gpu_step import measure_layouts

    device = torch.device("cpu" if options.dry_run else "cuda")
    measure_layouts(device, results, until, toy=options.dry_run)


def run_bench(results: Results, options: argparse.Namespace, until: float) -> None:
    toy = options.dry_run
    device = torch.device("cpu" if toy else "cuda")
    if toy:
        torch.set_num_threads(1)
    how = How(
        device, "triton" if toy else "auto", one_by_one=True, flush=options.flush_l2, once=toy,
        seconds=PEER_SECONDS, until=until,
    )  # fmt: skip
    cases = {case.name: case.toy() if toy else case for case in gpu_cases()}
    results.merge("clocks", before=machine.clocks())
    chosen = {"profiles": options.profile, "parts": not options.no_micro}
    for item in plan(options.cases, options.providers, **chosen):
        if timing.is_past(until):
            results.merge("not_begun", **{" ".join((item.kind, item.case)).strip(): "no time left"})
        elif item.kind == "case":
            with results.noting("cases", item.case):
                measure_case(cases[item.case], item.providers, results, how)
        elif item.kind == "profile":
            profile_step(cases[item.case], device, results, toy=toy)
        else:
            with results.noting("micro", item.kind):
                PARTS[item.kind](device, results, toy=toy)
    results.merge("clocks", after=machine.clocks())


# Each step's share of the time left, of which the last gets all. A peer may bring the process down,
# so the benchmarks are the last.
STEPS: dict[str, tuple[float, Callable[[Results, argparse.Namespace, float], None]]] = {
    "smoke": (0.25, run_smoke), "tests": (0.40, run_gpu_tests), "sanitizer": (0.25, run_sanitizers),
    "step": (0.15, run_layouts), "bench": (1.0, run_bench),
}  # fmt: skip


def conclude(results: Results) -> bool:
    data = results.data
    if "cases" in data and not data.get("dry_run"):
        data["goals"] = judge(data["cases"])
    data["did_not_run"] = did_not_run(data)
    results.save()
    print("\n".join([*tables.lines(data), *lines(data), *data["did_not_run"]]))
    return is_well(data)


def judge(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a goal: what was wanted, what came, and "pass", "fail" or "not measured"."""
    verdicts = []
    for goal in GOALS:
        names = FAMILIES.get(goal.over, (goal.over,))
        ratios = [figures.over(cases.get(goal.case, {}), name, goal.under) for name in names]
        value = min((x for x in ratios if x is not None), default=None)
        met = value is not None and (value >= goal.limit if goal.at_least else value <= goal.limit)
        entry = {"case": goal.case, "figure": f"time, {goal.over} / {goal.under}"}
        entry["goal"] = f"{'>=' if goal.at_least else '<='} {goal.limit:.3g}"
        verdict = "not measured" if value is None else "pass" if met else "fail"
        verdicts.append({**entry, "value": value and round(value, 3), "verdict": verdict})
    return verdicts


def is_well(data: dict[str, Any]) -> bool:
    tests = data.get("tests", {}).values()
    failed = any(x.get("status") != "passed" for x in tests)
    passed = any(x.get("counts", {}).get("passed") for x in tests)
    nothing_ran = bool(tests) and not data.get("dry_run") and not passed
    found = any(x.get("in_our_kernels") for x in data.get("sanitizer", {}).values())
    missed = any(goal["verdict"] == "fail" for goal in data.get("goals", []))
    wrong = any(x["status"] in ("wrong", "error") for _, x in _statuses(data.get("layouts", {})))
    every = [figures.providers(case) for case in data.get("cases", {}).values()]
    ours = {x["ours"].get("status") for x in every if "ours" in x}
    is_bad = failed or nothing_ran or found or missed or wrong or "failed_steps" in data
    return not is_bad and ours <= {"ok"}


def lines(data: dict[str, Any]) -> Iterator[str]:
    for name, x in data.get("profile", {}).items():
        ms = f"step {x.get('step_ms')} ms, kernels {x.get('kernels_ms')} ms"
        yield f"profile {name}: {ms} {x.get('reason', '')}"
        for kernel in x.get("kernels", [])[:8]:
            yield "  {ms:9.3f} ms {calls:4d} x {name:.80}".format(**kernel)
    for name, x in data.get("micro", {}).items():
        yield f"{name}: {json.dumps({k: _rate(y) for k, y in x.items()})}"
    for name, x in _statuses(data.get("layouts", {})):
        if x["status"] != "ok":
            yield f"{name}: {_why(x)} {x.get('errors', '')}"
        else:
            errors = "".join(f", {k} off by {e:.1e}" for k, e in x.get("errors", {}).items())
            ms, mib = x.get("ms", {}).get("median"), x.get("peak_mib")
            yield f"{name}: {ms} ms, {mib} MiB, {x['computed']:.0%} of the tokens{errors}"
    for name, x in data.get("tests", {}).items():
        yield from (f"  {y['test']}: {y['text'][:160]!r}" for y in x.get("failures", []))
        said = x.get("said", {}).items() if name == "smoke" else ()
        yield from (f"  {test}: {text}" for test, text in said)
        yield f"tests, {name}: {x['status']} {x.get('counts', '')}"
    for name, x in data.get("sanitizer", {}).items():
        ours = f"in our kernels: {x.get('in_our_kernels')}"
        yield f"{name}: {x['status']} {x.get('summary', '')} {ours}"
    yield from (f"step {name} failed: {why}" for name, why in data.get("failed_steps", {}).items())


def _rate(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    rates = [found[unit] for unit in ("gb_per_s", "tflops", "reason") if unit in found]
    below = {k: _rate(x) for k, x in found.items() if isinstance(x, dict) and k != "ms"}
    return rates[0] if rates else below


def did_not_run(data: dict[str, Any]) -> list[str]:
    """What was asked for and did not run, each with the reason; of a dry run that it was one."""
    text = []
    if data.get("dry_run"):
        text.append("NOTHING RAN ON A GPU: a dry run, at toy sizes on a CPU; times say nothing")
    for name, x in data.get("tests", {}).items():
        if skipped := x.get("skipped_for"):
            reasons = ", ".join(f"{why!r} ({n})" for why, n in skipped.items())
            text.append(f"not run: {name}: {reasons}")
    for part in ("sanitizer", "layouts"):
        entries = _statuses(data.get(part, {}))
        text += [f"not run: {name}: {_why(x)}" for name, x in entries if x["status"] in NOT_RUN]
    if late := data.get("not_begun"):
        text.append(f"not run: no time for {', '.join(late)}")
    cases = data.get("cases", {}).values()
    providers = [item for case in cases for item in figures.providers(case).items()]
    ran = {name for name, x in providers if figures.ran(x) or x.get("status") == "wrong"}
    why = {name: _why(x) for name, x in providers if name not in ran}
    return text + [f"not run: {name} in any case: {reason}" for name, reason in why.items()]


def _why(entry: dict[str, Any]) -> str:
    return f"{entry.get('status')}, {entry.get('reason', '')[:200]}"


def _statuses(tree: dict[str, Any], *path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if "status" in tree:
        yield ", ".join(path), tree
    for name, x in tree.items():
        if isinstance(x, dict):
            yield from _statuses(x, *path, name)


if __name__ == "__main__":
    sys.exit(main())
