"""The whole optimizer step of TRL's GRPO trainer: stock, and `FusedGRPOTrainer` with each of its savings.

A round trains each variant of a scene from the same weights, in another order each round::

    first round      not timed: metrics are compared with stock TRL's, and what the graphs save is counted
    other rounds     CPU seconds of each step but the first, which warms up
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from benchmarks import parity, tiny_run
from benchmarks.machine import Watch
from benchmarks.memory import MIB, freed_memory_kept
from benchmarks.run import Results, describe
from benchmarks.step_run import SCENES, VARIANTS, Scene, policy, train
from benchmarks.tables import SHARES, STOCK
from benchmarks.timing import order

REGROUPED_TOLERANCE = 2e-5  # sums in another order; without regrouping: `parity.TOLERANCE`
SGD_STEPS = 20
CONDITIONS = {
    "time": "process CPU seconds of an optimizer step on one thread: rewards, forward, backward, clipping, AdamW. "
    "Completions are given, and their generation is not counted. A round trains each variant from the same weights, "
    "one variant after the other, in another order each round; the first step of a training is not timed. Seconds: for "
    "each step the median over the rounds, then the mean over the steps; stock / it: in brackets, the least and the "
    "most of the rounds. glibc keeps freed memory, so that page faults do not count: without that, stock TRL takes "
    "longer",
    "saved": "MiB that the graph of a micro-batch has saved for the backward when its loss is computed, without "
    "parameters; counted in a round that is not timed",
    "shares": "as the trainer logs them, of sequences and of padded tokens",
    "differences": "from stock TRL, the largest over the steps, as in docs/parity.md. Without old log-probabilities "
    "the value of the loss does not depend on the model, so its gradient norm tells more. skip leaves sequences out of "
    "the metrics' means, and regrouping changes the micro-batches that they are means of: there the metrics differ by "
    "intent",
    "parameters": "distance from stock TRL's after SGD at toy size, two updates a generation, over the length of the "
    "way that stock TRL's have gone",
}


def measure_all(results: Results, *, toy: bool = False, rounds: int | None = None) -> None:
    """Write ``step`` into the results, after each training: ``conditions``, ``scenes``, and ``sgd``."""
    threads = torch.get_num_threads()
    tiny_run.quiet()
    gc.freeze()  # every training collects garbage, of which what is imported is none
    try:
        with freed_memory_kept():
            _measure_all(results, toy=toy, rounds=rounds)
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def _measure_all(results: Results, *, toy: bool, rounds: int | None) -> None:
    results.merge("step", conditions=CONDITIONS)
    results.merge("runs", step={"threads": 1})
    for name, scene in SCENES.items():
        scene = scene.toy() if toy else scene
        _measure(results, ("step", "scenes", name), scene if rounds is None else replace(scene, rounds=rounds))
    _sgd(results, replace(Scene().toy(), steps=4 if toy else SGD_STEPS))


def _measure(results: Results, path: tuple[str, ...], scene: Scene) -> None:
    """All variants of one scene."""
    watch = Watch()
    about = {k: x for k, x in asdict(scene).items() if k != "variants"}
    variants = {name: {"options": VARIANTS[name], "status": "not run"} for name in scene.variants}
    results.merge(*path, **about, about=scene.about, variants=variants)
    stock: list[dict[str, float]] = []
    for i in range(1 + scene.rounds):
        for name in scene.variants if i == 0 else order(scene.variants, i):
            at = (*path, "variants", name)
            try:
                _, found = train(scene, name, watched=i == 0)
                if name == STOCK and i == 0:
                    stock = found["logs"]
                if i == 0:
                    results.merge(*at, **_compared(name, stock, found))
                else:
                    samples = [*results.at(*at).get("samples", []), [round(x, 5) for x in found["seconds"][1:]]]
                    results.merge(*at, samples=samples, seconds=seconds(samples))
            except Exception as error:
                results.merge(*at, status="error", reason=describe(error))
    results.merge(*path, cpu_of_others=watch.others())


def _compared(name: str, stock: list[dict[str, float]], found: dict[str, Any]) -> dict[str, Any]:
    """Status, differences from stock TRL, saved MiB, and shares, of the first round of a variant."""
    options, logs = VARIANTS[name] or {}, found["logs"]
    apart = _apart(stock, logs)
    metrics = {k: x for k, x in apart.items() if k not in ("loss", "grad_norm")}
    worst = max(metrics, key=lambda k: metrics[k])
    differences = {"loss": apart["loss"], "grad_norm": apart["grad_norm"], "metrics": metrics[worst], "worst": worst}
    other_means = options.get("regroup") or options.get("zero_advantage") == "skip"  # by intent
    bound = REGROUPED_TOLERANCE if options.get("regroup") else parity.TOLERANCE
    checked = [differences[k] for k in ("loss", "grad_norm", *(() if other_means else ("metrics",)))]
    return {
        "status": "ok" if max(checked) <= bound else "wrong",
        "differences": differences,
        "saved_mib": {"mean": statistics.fmean(found["saved"]) / MIB, "max": max(found["saved"]) / MIB},
        "shares": {k: statistics.fmean(log[k] for log in logs) for k in SHARES if k in logs[0]},
    }


def _apart(stock: list[dict[str, float]], logs: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference over the steps of each figure that stock TRL logs."""
    if not stock:
        raise RuntimeError(f"expected the logs of {STOCK} to compare with, got none")
    return parity.differences(stock, [{k: x for k, x in log.items() if k in stock[0]} for log in logs])


def seconds(samples: Sequence[Sequence[float]]) -> float:
    """Seconds of a step, of the steps of each round: the median over the rounds, the mean over the steps."""
    return statistics.fmean(statistics.median(step) for step in zip(*samples, strict=True))


def _sgd(results: Results, scene: Scene) -> None:
    """``sgd``: how far each variant is from stock TRL after plain SGD, in which nothing hides small gradients."""
    start = nn.utils.parameters_to_vector(policy(scene).parameters()).detach()
    for name in VARIANTS:
        model, found = train(scene, name, optim="sgd", learning_rate=0.1, num_iterations=2)
        end = nn.utils.parameters_to_vector(model.parameters()).detach()
        if name == STOCK:
            stock, logs = end, found["logs"]
        apart = {"parameters": ((end - stock).norm() / (stock - start).norm()).item()}
        apart |= {k: x for k, x in _apart(logs, found["logs"]).items() if k in ("loss", "grad_norm")}
        results.merge("step", "sgd", name, **apart)
