"""``python -m benchmarks.gpu --check-peers``: are the peers importable as `--wheels` installs them; do they compile?

Each peer in a process of its own (`peer_kernels`), on any machine with torch and Triton; no GPU is used. What it cannot
tell is whether kernels of CuTe's DSL (Liger's for Hopper, QuACK's) compile: they want real tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.peer_kernels import PACKAGES
from benchmarks.harness.child import environment, run
from benchmarks.harness.results import Results
from benchmarks.plan import ANCHORS, GOALS, REST
from benchmarks.providers import named

SECONDS = 300.0


def check_peers(results: Results, *, wheels: Sequence[Path], providers: Sequence[str] | None, logs: Path) -> bool:
    """Check all peers, or those named; write and print what was found. True if each is importable and compiles."""
    known = [name for name in GOALS + REST if name not in ANCHORS and named(name).module in PACKAGES]
    chosen = [name for name in known if providers is None or name in providers]
    with tempfile.TemporaryDirectory(prefix="grpo-kernels-peers-", ignore_cleanup_errors=True) as place:
        paths, report = peers.install(wheels, Path(place))
        results.merge("peers", installed=report)
        for name in chosen:
            command = [sys.executable, "-m", "benchmarks.gpu.peer_kernels", name, *paths]
            ran = run(command, env=environment(toy=False), seconds=SECONDS, log=logs / f"{name.replace('/', '-')}.log")
            lines = ran.output.strip().splitlines()
            try:
                found: dict[str, Any] = json.loads(lines[-1]) if ran.code == 0 else {}
            except (IndexError, ValueError):
                found = {}
            if not found:
                found = {"importable": "no", "kernels": {}, "reason": f"exit status {ran.code}: {ran.output[-300:]}"}
            results.merge("checked_peers", name, seconds=ran.seconds, **found)
            print(f"{name}: {summary(found)}", flush=True)
    found_all = results.at("checked_peers")
    for line in table(found_all):
        print(line)
    for name, problem in report.get("problems", {}).items():
        print(f"wheels: {name}: {problem}")
    return "problems" not in report and all(is_well(x) for x in found_all.values())


def is_well(found: dict[str, Any]) -> bool:
    """Importable, and every kernel that was caught compiles."""
    return found["importable"] != "no" and all(x == "compiles" for x in found["kernels"].values())


def summary(found: dict[str, Any]) -> str:
    """What the kernels do, in a few words."""
    compiles = [name for name, x in found["kernels"].items() if x == "compiles"]
    broken = {name: x for name, x in found["kernels"].items() if x != "compiles"}
    words = [f"{len(compiles)} Triton kernels compile"] if compiles else []
    words += [f"{name} does not compile: {x}" for name, x in broken.items()]
    if found["importable"] != "no" and not found["kernels"] and not found["reason"]:
        words.append("launches no Triton kernel of its own")
    return "; ".join([*words, *([found["reason"]] if found["reason"] else [])])


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """In markdown: peer, importable, kernels compiled for sm_90, why not."""
    rows = ["| peer | importable | kernels compiled for sm_90 | what is missing, and why |", "|---|---|---|---|"]
    for name, x in found.items():
        compiles = ", ".join(f"`{kernel}`" for kernel, how in x["kernels"].items() if how == "compiles")
        broken = [f"{kernel}: {how}" for kernel, how in x["kernels"].items() if how != "compiles"]
        why = " ".join("; ".join([*broken, *([x["reason"]] if x["reason"] else [])]).split()).replace("|", "/")
        rows.append(f"| `{name}` | {x['importable']} | {compiles} | {why} |")
    return rows
