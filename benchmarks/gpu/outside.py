"""The tests that need a GPU, and compute-sanitizer over every kernel, by processes of their own.

Several processes share the GPU where pytest-xdist is there: most of the time goes into compiling kernels. What needs
a large part of the memory runs by itself afterwards. The sanitizers look for accesses out of bounds, and for races in
shared memory, at small and ragged shapes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.smoke import COMMAND, SANITIZED, checks
from benchmarks.process import ROOT, Ran, environment, run
from benchmarks.run import Results

FOLDER = "tests/gpu"
ALONE = ("tests/gpu/test_gpu_memory.py", "tests/gpu/test_gpu_sizes.py")
MOST_WORKERS = 12
ONE_TEST_SECONDS = 150
KEPT = 40  # failures whose text is kept
TOOLS = ("memcheck", "racecheck")
FOUND = 99  # exit status if the tool found something
OPTIONS = (
    f"--error-exitcode={FOUND}",
    "--print-limit=50",
    "--target-processes=application-only",
    "--launch-timeout=120",
)
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/bin")
KERNELS = ROOT / "grpo_kernels" / "backends" / "triton_rows"


def run_tests(results: Results, *, seconds: float, folder: Path, toy: bool) -> None:
    """Run `FOLDER` within `seconds` and put counts and failures into ``tests``."""
    until = time.time() + seconds
    workers = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) * 3 // 4))
    spread = ["-n", str(workers), "--dist", "worksteal"] if importlib.util.find_spec("xdist") is not None else []
    parts = [("together", [FOLDER, *["--ignore=" + name for name in ALONE], *spread], 0.75), ("alone", [*ALONE], 1.0)]
    for name, arguments, share in [("together", [FOLDER], 1.0)] if toy else parts:
        left = until - time.time()
        if left < 5:
            results.merge("tests", name, status="skipped", reason="no time left")
            continue
        results.merge("tests", name, status="running")
        results.merge("tests", name, **_run(name, arguments, left * share, folder, toy))
    counts: dict[str, int] = {}
    for part in list(results.at("tests").values()):
        for outcome, count in part.get("counts", {}).items():
            counts[outcome] = counts.get(outcome, 0) + count
    results.merge("tests", counts=counts)


def _run(name: str, arguments: list[str], seconds: float, folder: Path, toy: bool) -> dict[str, Any]:
    xml = folder / f"tests-{name}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--color=no", "-p", "no:cacheprovider"]
    command += [f"--junitxml={xml}", "--tb=short", "--durations=10", *arguments]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={ONE_TEST_SECONDS}")
    ran = run(command, env=environment(toy=toy), seconds=seconds, log=folder / f"tests-{name}.log")
    return tests_summary(ran, xml)


def tests_summary(ran: Ran, xml: Path) -> dict[str, Any]:
    """Counts and failures, from pytest's XML, or from its output if it did not live to write that."""
    status = (
        "out of time" if ran.code is None else {0: "passed", 1: "failed", 5: "nothing selected"}.get(ran.code, "error")
    )
    found: dict[str, Any] = {"status": status, "exit_status": ran.code, "seconds": ran.seconds}
    try:
        found |= _from_xml(ElementTree.parse(xml).getroot())
    except (OSError, ElementTree.ParseError):
        found["counts"] = _from_output(ran.output)
    if status not in ("passed", "nothing selected"):
        found["output"] = ran.output[-4000:]
    return found


def _from_xml(root: ElementTree.Element) -> dict[str, Any]:
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    failures: list[dict[str, str]] = []
    skips: dict[str, int] = {}
    for test in root.iter("testcase"):
        name = f"{test.get('classname', '')}::{test.get('name', '')}"
        bad = [x for x in test if x.tag in ("failure", "error")]
        skipped = test.find("skipped")
        if bad:
            counts["failed" if bad[0].tag == "failure" else "error"] += 1
            failures.append({"test": name, "text": ((bad[0].get("message") or "") + "\n" + (bad[0].text or ""))[:1500]})
        elif skipped is not None:
            counts["skipped"] += 1
            reason = skipped.get("message") or ""
            skips[reason] = skips.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return {"counts": counts, "failures": failures[:KEPT], "skipped_for": skips}


def _from_output(text: str) -> dict[str, int]:
    """Of the lines of ``-v``, with xdist or without; each has the progress in percent."""
    outcomes = re.findall(r"^(?=.*\[ *\d+%\]).*?\b(PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    return {name.lower(): outcomes.count(name) for name in ("PASSED", "FAILED", "ERROR", "SKIPPED")}


def run_sanitizer(results: Results, *, seconds: float, folder: Path, toy: bool) -> None:
    """Run each tool within its share of `seconds`; the findings go into ``sanitizer``."""
    until = time.time() + seconds
    if toy:
        results.merge("sanitizer", status="absent", reason="dry run")  # there is no tool for an interpreter
        return
    tool = shutil.which("compute-sanitizer") or next(
        (str(path) for place in PLACES if (path := Path(place) / "compute-sanitizer").exists()), None
    )
    if tool is None:
        results.merge("sanitizer", status="absent", reason="compute-sanitizer is not on the path")
        return
    for i, check in enumerate(TOOLS):
        left = (until - time.time()) / (len(TOOLS) - i)
        if left < 5:
            results.merge("sanitizer", check, status="skipped", reason="no time left")
            continue
        results.merge("sanitizer", check, status="running")
        command = [tool, f"--tool={check}", *OPTIONS]
        # without a pool, an access past the end of a tensor is one past the end of an allocation
        env = environment(toy=False) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        names = watched(check)
        ran = run([*command, *COMMAND, "--sanitized", *names], env=env, seconds=left, log=folder / f"{check}.log")
        results.merge("sanitizer", check, **sanitizer_summary(ran, names))


def watched(tool: str) -> list[str]:
    """Names of the smoke checks that a tool watches: every kernel and engine; racecheck, the slow one, has fewer."""
    *groups, _ = checks(SANITIZED, torch.device("cuda"))
    names = [name for group in groups for name in group]
    return names if tool == "memcheck" else [name for name in names if "9001, bfloat16" in name]


def sanitizer_summary(ran: Ran, wanted: Sequence[str]) -> dict[str, Any]:
    """Sum up what the tool said of the checks `wanted`; the vendor's own kernels are not ours to judge."""
    reports = [
        x for x in re.split(r"(?m)^(?==+ (?:Invalid|Error|Warning|Race|Program hit))", ran.output) if x.startswith("=")
    ]
    ours = [x for x in reports if any(re.search(rf"\b{name}\b", x) for name in kernel_names())]
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ran.output)
    said = [json.loads(line) for line in ran.output.splitlines() if line.startswith('{"name"')]
    found = {x["name"]: x["status"] for x in said}
    failed = [f"{name}: {found.get(name, 'not run')}" for name in wanted if found.get(name) not in ("ok", "absent")]
    status = "clean"
    if ran.code is None:
        status = "out of time"
    elif total is None or any(found.get(name) in (None, "running") for name in wanted):
        status = "error"  # the tool or the checks did not get through
    elif ours:
        status = "found"
    elif int(total.group(1)) > 0:
        status = "found elsewhere"
    elif failed:
        status = "checks failed"
    return {
        "status": status,
        "exit_status": ran.code,
        "seconds": ran.seconds,
        "reports": len(reports),
        "in_our_kernels": len(ours),
        "summary": total.group(0) if total else "",
        "ran": len(said),
        "failed": failed,
        "first": [x[:600] for x in (ours or reports)[:3]],
        **({"output": ran.output[-2000:]} if status in ("error", "out of time") else {}),
    }


def kernel_names() -> list[str]:
    """The functions that Triton compiles, by their decorator in the source."""
    text = "\n".join(path.read_text() for path in sorted(KERNELS.glob("*.py")))
    return re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", text)
