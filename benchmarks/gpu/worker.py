"""The process that measures. It may crash or hang: the supervisor then starts another one, without what did it."""

from __future__ import annotations

import json
import os
import site
import sys
import time
from pathlib import Path
from typing import Any


def main(plan_file: str, events_file: str) -> None:
    """Do the items of a plan, from the one it says."""
    plan: dict[str, Any] = json.loads(Path(plan_file).read_text())
    for folder in plan["peers"]:
        site.addsitedir(folder)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

    import torch

    from benchmarks.harness.events import Events

    toy = plan["toy"]
    device = torch.device("cpu" if toy else "cuda")
    if toy:
        torch.set_num_threads(1)
    events = Events(Path(events_file))
    if plan["first"] == 0:
        from benchmarks.harness.machine import peer_versions

        events.begin("worker")
        events.result("versions", **peer_versions())
    for i in range(plan["first"], len(plan["items"])):
        item = plan["items"][i]
        events.item = i
        if time.time() > plan["until"]:
            events.result(*_place(item), status="skipped", reason="no time left")
            events.done()
            continue
        with events.noting(*_place(item)):
            _do(item, plan, device, events, toy)
            _release(device)
        events.done()


def _do(item: dict[str, Any], plan: dict[str, Any], device: Any, events: Any, toy: bool) -> None:
    from benchmarks.gpu import measure_case, micro, profiling
    from benchmarks.plan import gpu_cases

    kind = item["kind"]
    if kind == "ceilings":
        micro.measure_ceilings(device, events, toy=toy)
    elif kind == "rows":
        micro.measure_rows(device, events, toy=toy)
    elif kind == "scoring":
        micro.measure_scoring(device, events, toy=toy)
    else:
        case = next(case for case in gpu_cases() if case.name == item["case"])
        case = case.toy() if toy else case
        if kind == "profile":
            profiling.profile_step(case, device, events, toy=toy)
            return
        this = measure_case.Pass(
            item["pass"],
            item["last"],
            item["providers"],
            excluded=item.get("excluded", ()),
            done=item.get("done", ()),
            seconds=item["seconds"],
            until=plan["until"],
            toy=toy,
            flush=plan["flush"],
        )
        measure_case.measure_case(case, device, events, this)


def _place(item: dict[str, Any]) -> tuple[str, ...]:
    """Where in the results what is said of an item belongs."""
    kind = item["kind"]
    if kind in ("rows", "scoring"):
        return ("micro", kind)
    if kind == "case" and item["pass"] > 0:  # what earlier passes found stays
        return ("cases", item["case"], "passes", str(item["pass"]))
    return {"case": ("cases", item.get("case", "")), "profile": ("profile", item.get("case", ""))}.get(kind, (kind,))


def _release(device: Any) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:3])
