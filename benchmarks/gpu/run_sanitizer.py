"""compute-sanitizer over every kernel at small, ragged shapes: out-of-bounds accesses, and races in shared memory."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.child import ROOT, Ran, environment, run
from benchmarks.harness.results import Results

TOOLS = ("memcheck", "racecheck")
SCRIPT = [sys.executable, "-m", "benchmarks.gpu.sanitized"]
FOUND = 99  # exit status if the tool found something
OPTIONS = (
    f"--error-exitcode={FOUND}",
    "--print-limit=50",
    "--target-processes=application-only",
    "--launch-timeout=120",
)
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/bin")
KERNELS = ROOT / "grpo_kernels" / "backends" / "triton_rows"


def run_sanitizer(results: Results, *, seconds: float, folder: Path, toy: bool) -> None:
    """Run each tool within its share of `seconds`; the findings go into ``sanitizer``."""
    until = time.time() + seconds
    if toy:  # there is no tool for an interpreter; that the script runs is what can be shown
        ran = run([*SCRIPT, "dry run"], env=environment(toy=True), seconds=seconds, log=folder / "sanitized.log")
        results.merge("sanitizer", status="absent", reason="dry run", script_exit=ran.code, script=ran.output[-1500:])
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
        ran = run([*command, *SCRIPT, check], env=env, seconds=left, log=folder / f"{check}.log")
        results.merge("sanitizer", check, **summary(ran))


def summary(ran: Ran) -> dict[str, Any]:
    """What the tool said, and how much of it is about our kernels; the vendor's own are not ours to judge."""
    reports = [
        x for x in re.split(r"(?m)^(?==+ (?:Invalid|Error|Warning|Race|Program hit))", ran.output) if x.startswith("=")
    ]
    ours = [x for x in reports if any(re.search(rf"\b{name}\b", x) for name in kernel_names())]
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", ran.output)
    done = re.findall(r"^sanitized: (.*)$", ran.output, re.MULTILINE)
    failed = re.findall(r"^failed: (.*)$", ran.output, re.MULTILINE)
    status = "clean"
    if ran.code is None:
        status = "out of time"
    elif "all done" not in done or total is None:
        status = "error"  # the tool or the script did not get through
    elif ours:
        status = "found"
    elif int(total.group(1)) > 0:
        status = "found elsewhere"
    elif failed:
        status = "parts failed"
    return {
        "status": status,
        "exit_status": ran.code,
        "seconds": ran.seconds,
        "reports": len(reports),
        "in_our_kernels": len(ours),
        "summary": total.group(0) if total else "",
        "ran": done,
        "failed": failed,
        "first": [x[:600] for x in (ours or reports)[:3]],
        **({"output": ran.output[-2000:]} if status in ("error", "out of time") else {}),
    }


def kernel_names() -> list[str]:
    """The functions that Triton compiles, by their decorator in the source."""
    text = "\n".join(path.read_text() for path in sorted(KERNELS.glob("*.py")))
    return re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", text)
