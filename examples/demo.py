"""GRPO in TRL's trainer, twice from one seed: with TRL's own head and with ours. `make demo` runs it.

A small Qwen3 model learns sums from noisy demonstrations, then GRPO trains it on a reward that can be checked. Printed
and drawn: the reward of both runs, how far their losses are apart, what the whole training step cost in each, and what
the head cost, in this training and on one head of a realistic size. Written: summary.json and curves.png. Exit code 1
if the reward does not rise clearly or the two runs do not agree.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from begin import begin

warnings.filterwarnings("ignore", category=FutureWarning)  # TRL and transformers, about each other
if __name__ == "__main__":
    begin(__doc__)

import torch
import transformers
from arithmetic import (
    Problem,
    all_problems,
    build_model,
    build_tokenizer,
    evaluate,
    final_answer,
    warm_start,
)
from datasets import Dataset
from demo_report import SHARES, draw, table
from head_cost import HeadMeter, compare_heads
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.trl import FusedGRPOTrainer

SEED = 0
PACKAGES = ("torch", "trl", "transformers")
LARGEST_DIGIT = 5
MIN_RISE, MAX_LOSS_DIFFERENCE, MAX_GRADIENT_DIFFERENCE = 0.2, 2e-5, 1e-4


def sums_up(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """The reward: 1 where the number after the last "=" is the sum."""
    return [
        float(final_answer(text) == right) for text, right in zip(completions, answer, strict=True)
    ]


class Recorded:
    """What the demo notes down of a trainer's steps; the mixin goes in front of the trainer class.

    A meter that sees every operation slows a step down, so that it is on in every second pair of steps, and times are
    taken in the other pairs. (The steps of a pair share a generation.)
    """

    title = ""
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.completions: list[int] = []
        self.head_seconds: list[float] = []  # of each timed step, as the next line
        self.cpu_seconds: list[float] = []
        self.generation_seconds = 0.0
        self.meter = HeadMeter()
        super().__init__(*args, **kwargs)
        self.add_callback(StepTimes(self))  # type: ignore[attr-defined]

    @property
    def metered(self) -> bool:
        """True in steps in which operations are counted, False in those that are timed."""
        return bool(self.state.global_step // 2 % 2 == 0)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.meter if self.metered else nullcontext():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.generation_seconds += time.process_time() - started

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.losses.append(loss.item())
        self.completions.append(hash(inputs["completion_ids"].numpy().tobytes()))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        steps, total = self.state.global_step, self.args.max_steps  # type: ignore[attr-defined]
        if "loss" in logs and (steps % 10 == 0 or steps in (1, total)):
            rewards = [entry["reward"] for entry in self.state.log_history if "reward" in entry]
            print(
                f"  {self.title}: step {steps:3d} of {total}, reward {rewards[-1]:.3f}", flush=True
            )


class StepTimes(transformers.TrainerCallback):
    """Seconds of the head, and CPU seconds of the whole step without its generation, in the steps that are timed."""

    def __init__(self, trainer: Recorded) -> None:
        self.trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.timed, self.before = not self.trainer.metered, self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.timed:
            head, cpu = (now - then for now, then in zip(self._now(), self.before, strict=True))
            self.trainer.head_seconds.append(head)
            self.trainer.cpu_seconds.append(cpu)

    def _now(self) -> tuple[float, float]:
        return self.trainer.meter.seconds, time.process_time() - self.trainer.generation_seconds


class StockTrainer(Recorded, GRPOTrainer):
    title = "stock TRL   "


class OurTrainer(Recorded, FusedGRPOTrainer):
    title = "grpo_kernels"


def train(
    kind: type[StockTrainer] | type[OurTrainer],
    warm: Any,
    tokenizer: Any,
    problems: list[Problem],
    options: argparse.Namespace,
) -> tuple[Any, dict[str, Any]]:
    """Train a copy of the warm model; returns it with the curves and figures of the run."""
    config = GRPOConfig(
        output_dir=str(options.output / "trainer"),
        per_device_train_batch_size=options.batch_size,
        num_generations=8,
        num_iterations=2,
        max_completion_length=8,
        learning_rate=5e-4,
        adam_epsilon=1e-6,  # so that Adam does not blow up the rounding noise of unused vocabulary entries
        lr_scheduler_type="constant",
        max_steps=options.steps,
        seed=SEED,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    data = Dataset.from_list(
        [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    )
    model = copy.deepcopy(warm)
    trainer = kind(
        model=model,
        reward_funcs=sums_up,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    meter = trainer.meter
    meter.attach(model)
    started = time.perf_counter()
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return model, {
        "losses": trainer.losses,
        "completions": trainer.completions,
        "gradient_norms": [entry["grad_norm"] for entry in history],
        "rewards": [entry["reward"] for entry in history if "reward" in entry],
        "train_seconds": time.perf_counter() - started,
        "head_seconds_per_step": statistics.median(trainer.head_seconds),
        "head_peak_bytes": meter.peak_bytes,
        "head_flops": meter.flops,
        "step_cpu_seconds": statistics.fmean(trainer.cpu_seconds),
        **{name: statistics.fmean(entry.get(name, 1.0) for entry in history) for name in SHARES},
    }


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float | int]:
    """How far the two runs are apart, over the steps in which both sampled the same completions.

    Two right implementations differ in the last bits, and a sampled token that lies exactly on such a bit may come
    out differently: from there on the runs see other data and are not comparable.
    """
    same = [a == b for a, b in zip(theirs["completions"], ours["completions"], strict=True)]
    steps = same.index(False) if False in same else len(same)

    def largest(name: str) -> float:
        pairs = list(zip(theirs[name], ours[name], strict=True))[:steps]
        return max((abs(a - b) for a, b in pairs), default=float("inf"))

    return {
        "max_loss_difference": largest("losses"),
        "max_gradient_norm_difference": largest("gradient_norms"),
        "steps_compared": steps,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole demo; returns the summary."""
    tokenizer = build_tokenizer(options.vocab)
    model = build_model(tokenizer, seed=SEED)
    problems = all_problems(largest=LARGEST_DIGIT)
    held_out, training = problems[: len(problems) // 5], problems[len(problems) // 5 :]
    print(
        f"Qwen3 model, {sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}"
    )
    print(f"Warm start: {options.warm_steps} supervised steps on noisy sums", flush=True)

    def warm(step: int, loss: float) -> None:
        if (step + 1) % 50 == 0:
            print(
                f"  warm start: step {step + 1:3d} of {options.warm_steps}, loss {loss:.3f}",
                flush=True,
            )

    warm_start(
        model, tokenizer, problems, steps=options.warm_steps, noise=0.3, batch_size=64, learning_rate=5e-3, seed=SEED,
        progress=warm,
    )  # fmt: skip

    def reward(trained: Any) -> float:
        return evaluate(trained, tokenizer, held_out * 8, seed=SEED)

    reward_start = reward(model)
    print(f"Reward on {len(held_out)} problems that GRPO does not train on: {reward_start:.3f}")
    runs, ends = {}, {}
    for name, kind in (("trl", StockTrainer), ("ours", OurTrainer)):
        trained, runs[name] = train(kind, model, tokenizer, training, options)
        ends[name] = reward(trained)
    print("One head of a realistic size, forward and backward, each three times:", flush=True)
    shape = dict(zip(("vocab", "hidden_size", "sequences", "length"), options.head, strict=True))
    summary = {
        "reward_start": reward_start,
        "reward_end": ends["ours"],
        "reward_end_trl": ends["trl"],
        **differences(runs["trl"], runs["ours"]),
        "runs": runs,
        "head_shape": shape,
        "head": compare_heads(**shape),
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }
    for figures in runs.values():
        del figures["completions"]  # compared; of no interest to a reader
    return summary


def complaints(summary: dict[str, Any]) -> list[str]:
    """What the demo promises and this run did not keep."""
    found = []
    rise = summary["reward_end"] - summary["reward_start"]
    if rise < MIN_RISE:
        found.append(f"the reward rose by {rise:.3f}, expected at least {MIN_RISE}")
    if not summary["max_loss_difference"] <= MAX_LOSS_DIFFERENCE:
        apart = summary["max_loss_difference"]
        found.append(
            f"the losses are up to {apart:.1e} apart, expected at most {MAX_LOSS_DIFFERENCE}"
        )
    if summary["steps_compared"] < min(10, summary["steps"]):
        found.append(
            f"the runs sampled the same completions in only {summary['steps_compared']} steps"
        )
    for name, pair in summary["head"].items():
        if not pair["gradient_difference"] <= MAX_GRADIENT_DIFFERENCE:
            apart = pair["gradient_difference"]
            found.append(
                f"head, {name} groups: the gradients are {apart:.1e} of the largest entry apart"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps of each run")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a few steps and a small head; the reward is not judged",
    )
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(
            f"--steps: expected at least 3, of which the third is the first that is timed, got {options.steps}"
        )
    options.vocab, options.warm_steps, options.batch_size = 2048, 250, 256
    options.head = (151936, 1024, 16, 32)
    if options.smoke:
        options.steps, options.vocab, options.warm_steps, options.batch_size = 3, 256, 10, 32
        options.head = (4096, 64, 8, 16)
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    summary = run(options)
    summary["seconds"] = time.perf_counter() - started
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(summary, options.output / "curves.png")
    print(table(summary))
    print(
        f"{options.output / 'summary.json'} and curves.png written after {summary['seconds']:.0f} s"
    )
    found = complaints(summary)
    if options.smoke:
        found = [complaint for complaint in found if not complaint.startswith("the reward")]
    for complaint in found:
        print(f"demo: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
