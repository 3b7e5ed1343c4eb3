"""Training steps that are run, each model in a process of its own; `measure_all` adds what is computed."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness.child import environment, run
from benchmarks.training import flops
from benchmarks.training.clock import PARTS
from benchmarks.training.flops import Batch
from benchmarks.training.models import MODELS, Sizes, sizes

CPU_BATCH = Batch(sequences=8, prompt=8, completion=32, generations=4)
GPU_BATCH = Batch(sequences=64, prompt=128, completion=256, generations=8)
TOY_BATCH = Batch(sequences=4, prompt=3, completion=5, generations=2)
SECONDS = 600.0
GIB = 2**30


def measure_all(
    models: Sequence[str] | None = None, *, device: str | None = None, toy: bool = False, **options: Any
) -> dict[str, Any]:
    """``data["training"]``: measured entries of the models that fit (or of `models`), computed ones of all.

    ``not_measured`` says why a model has no measured entry, or fewer steps in it than were wanted. `device` is by
    default a GPU if there is one; `options` are those of `measure`.
    """
    if toy or device is None:
        device = "cuda" if torch.cuda.is_available() and not toy else "cpu"
    wanted = list(MODELS) if models is None else list(models)
    missing = {name: reason for name in wanted if (reason := obstacle(sizes(name, toy=toy), device))}
    found = measure([name for name in wanted if name not in missing], device=device, toy=toy, **options)
    return {
        "conditions": {"measured": found["conditions"], "computed": flops.conditions(Batch())},
        "models": found["models"] + flops.computed(toy=toy),
        "not_measured": missing | found["failed"],
    }


def measure(
    models: Sequence[str],
    *,
    device: str = "cpu",
    toy: bool = False,
    batch: Batch | None = None,
    steps: int = 2,
    threads: int = 2,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """``conditions`` in words, ``models`` with an entry for each model and trainer, and what ``failed``.

    A model whose process was stopped has the steps that were complete, if that is at least one timed step of each.

    Args:
        models: names of `MODELS`; each takes at most `seconds`.
        device: "cpu" (fp32) or "cuda" (bf16).
        toy: tiny shapes, on the CPU.
        batch: by default one that the device can do in minutes.
        steps: timed steps of each trainer, after a warm-up; an entry's seconds are their means.
        threads: of the CPU.
    """
    device, threads = ("cpu", 1) if toy else (device, threads)
    batch = batch or (TOY_BATCH if toy else CPU_BATCH if device == "cpu" else GPU_BATCH)
    entries: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in models:
        given = {"model": name, "batch": asdict(batch), "toy": toy, "device": device, "steps": steps}
        found, failure = _child({**given, "threads": threads}, toy=toy, seconds=seconds)
        size = sizes(name, toy=toy)
        if failure:
            failed[name] = failure
        if found and all(len(each) > 1 for each in found.values()):
            entries += [_entry(size, batch, trainer, each) for trainer, each in found.items()]
    return {"conditions": _conditions(batch, device, toy, steps, threads), "models": entries, "failed": failed}


def _conditions(batch: Batch, device: str, toy: bool, steps: int, threads: int) -> str:
    where = f"CPU, fp32, {threads} threads" if device == "cpu" else f"{torch.cuda.get_device_name(device)}, bf16"
    rows = "; TRL's head runs on every position of a sequence but the last there, ours on completion tokens"
    return (
        f"{where}; {'toy' if toy else 'real'} shapes, random weights; {batch}; TRL's defaults otherwise; the two "
        f"trainers take turns step by step on the same weights, means of {steps} steps each after a warm-up in which "
        f"operations are counted; optimizer: clipping, AdamW, dropping the gradients{rows if device == 'cpu' else ''}"
    )


def obstacle(size: Sizes, device: str) -> str | None:
    """Why the model cannot be trained here, None if there is room for it.

    For weights, gradients and Adam's two moments, the gradient of the head in fp32 twice, and some for activations.
    """
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    itemsize, activations = (4, 2 * GIB) if device == "cpu" else (2, 16 * GIB)
    needed = 4 * itemsize * size.parameters + 8 * size.vocab * size.hidden + activations
    return None if needed <= free else f"needs about {needed / GIB:.0f} GiB, {free / GIB:.0f} GiB are free"


def _child(given: dict[str, Any], *, toy: bool, seconds: float) -> tuple[dict[str, Any], str]:
    """Steps by trainer, those that were complete when the process ended, and how it failed ("" if it did not)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        command = [sys.executable, "-m", "benchmarks.training.worker", json.dumps({**given, "output": str(output)})]
        env = environment(toy=toy) | {"OMP_NUM_THREADS": str(given["threads"]), "HF_HUB_DISABLE_TELEMETRY": "1"}
        ran = run(command, env=env, seconds=seconds, log=Path(folder) / "log")
        steps = json.loads(output.read_text()) if output.exists() else {}
    failed = {None: f"took more than {seconds:g} s", 0: ""}.get(ran.code, f"exit status {ran.code}")
    return steps, f"{failed}: {ran.output[-500:]}" if ran.code else failed


def _entry(size: Sizes, batch: Batch, trainer: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    warm_up, *timed = steps
    seconds = {part: statistics.fmean(step["seconds"][part] for step in timed) for part in PARTS}
    counted = {part: warm_up["flops"][part] for part in ("head", "body", "generation")}
    peaks = [step["peak_mib"] for step in timed if step["peak_mib"] is not None]
    return {
        **flops.described(size),
        "kind": "measured",
        "trainer": trainer,
        "seconds": seconds,
        "samples": [step["seconds"] for step in timed],
        "flops": counted,
        "head_nvh": counted["head"] / (batch.tokens * size.vocab * size.hidden),
        **flops.shares(seconds),
        "head_share_of_flops": flops.shares(counted)["head_share"],
        "peak_mib": max(peaks) if peaks else None,
        "tokens": batch.tokens,
        "batch": asdict(batch),
    }
