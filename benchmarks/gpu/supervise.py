"""Keeps the measuring going: starts the worker, writes down what it reports, and replaces one that crashed or hangs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.child import environment, start, stop
from benchmarks.harness.results import Results

START_SECONDS = 90.0  # from the start of a process to its first event
GRACE_SECONDS = 20.0  # past the end of the budget
MOST_STARTS = 8
POLL_SECONDS = 0.1
UNFINISHED = (None, "running", "checked", "partial")


class Watch:
    """What the worker did last, according to its events."""

    def __init__(self, file: Path, results: Results) -> None:
        file.touch()
        self._file, self._results = file.open(), results
        self._rest = ""
        self.item = 0
        self.path: tuple[str, ...] | None = None
        self.deadline = time.time() + START_SECONDS

    def start_over(self) -> None:
        """A new process begins."""
        self.path, self.deadline = None, time.time() + START_SECONDS

    def read(self) -> None:
        """Take in what is new."""
        text = self._rest + self._file.read()
        *lines, self._rest = text.split("\n")
        for line in lines:
            event = json.loads(line)
            self.item = event["item"]
            if event["event"] == "begin":
                self.path, self.deadline = tuple(event["path"]), event["at"] + event["limit"]
            elif event["event"] == "result":
                self._results.merge(*event["path"], **event["value"])
            else:
                self.item, self.path = event["item"] + 1, None
                self.deadline = time.time() + START_SECONDS


def supervise(
    items: Sequence[dict[str, Any]],
    plan: dict[str, Any],
    results: Results,
    *,
    folder: Path,
    worker: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu.worker"),
) -> None:
    """Have all `items` done by workers, one after the other, until ``plan["until"]``.

    Args:
        items: what to do; each names its kind, and a case its seconds.
        plan: what the worker needs besides.
        results: where it goes.
        folder: for the worker's files.
        worker: the command; it is given the files of the plan and of the events.
    """
    items = [dict(item) for item in items]
    watch = Watch(folder / "events.jsonl", results)
    for attempt in range(MOST_STARTS):
        if watch.item >= len(items):
            return
        log = folder / f"worker-{attempt}.log"
        code = _run_worker({**plan, "items": items, "first": watch.item}, watch, folder, log, worker)
        if watch.item >= len(items):
            return
        if time.time() > plan["until"]:
            results.merge("worker", status="stopped", reason="no time left", log=_tail(log))
            return
        if watch.path is None:  # it did not get to anything: neither will the next
            results.merge("worker", status="crashed", reason=f"exit status {code}", log=_tail(log))
            watch.item += 1
            continue
        found = results.at(*watch.path)
        if found.get("status") in UNFINISHED:
            how = "hung" if code is None else "crashed"
            results.merge(*watch.path, status=how, reason=f"exit status {code}", log=_tail(log))
        _leave_out(items, watch, results)


def _leave_out(items: list[dict[str, Any]], watch: Watch, results: Results) -> None:
    """Go on without the provider that was running, now and later, and without those that have their results."""
    assert watch.path is not None
    item = items[watch.item]
    provider = watch.path[-1]
    if item["kind"] != "case" or provider not in item["providers"]:
        watch.item += 1
        return
    for later in items[watch.item :]:
        if later["kind"] == "case" and provider in later["providers"]:
            later.setdefault("excluded", []).append(provider)
            found = results.at("cases", later["case"], "providers", provider)
            if not found:
                reason = f"brought the process down in {item['case']}"
                results.merge("cases", later["case"], "providers", provider, status="left out", reason=reason)
    of_case = results.at("cases", item["case"], "providers")
    item["done"] = [x for x in item["providers"] if of_case.get(x, {}).get("status") not in UNFINISHED]
    if set(item["providers"]) <= {*item["done"], *item["excluded"]}:
        results.merge("cases", item["case"], "passes", str(item["pass"]), status="complete")
        results.merge("cases", item["case"], status="complete" if item["last"] else "partial")
        watch.item += 1


def _run_worker(plan: dict[str, Any], watch: Watch, folder: Path, log: Path, worker: Sequence[str]) -> int | None:
    """The worker's exit status, or None if it had to be killed."""
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(plan))
    command = [*worker, str(plan_file), str(folder / "events.jsonl")]
    watch.start_over()
    with log.open("w") as out:
        process = start(command, env=environment(toy=plan["toy"]), out=out)
        try:
            while process.poll() is None:
                watch.read()
                if time.time() > min(watch.deadline, plan["until"] + GRACE_SECONDS):
                    return None
                time.sleep(POLL_SECONDS)
            return process.returncode
        finally:
            stop(process)
            watch.read()


def _tail(file: Path, characters: int = 2000) -> str:
    return file.read_text(errors="replace")[-characters:]
