"""GRPO in TRL's trainer, twice from one seed: with TRL's own head and with ours (`make demo`).

A small Qwen3 model learns sums from noisy demonstrations. GRPO then trains it on a reward that can
be checked. The script prints the rewards of both runs, how much their losses differ, and the time
of a whole training step in each. It writes summary.json. The exit code is 1 if the reward does not
rise clearly, or if the two runs disagree.
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
    all_problems,
    build_model,
    build_tokenizer,
    evaluate,
    final_answer,
    warm_start,
)
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.trl import FusedGRPOTrainer

SEED = 0
PACKAGES = ("torch", "trl", "transformers")
MIN_RISE, MAX_LOSS_DIFFERENCE = 0.2, 2e-5
SAME_NORM, MIN_SAME_NORMS = 1e-4, 0.9  # relative difference, and share of the compared steps
SHARES = ("sequences/gradient", "tokens/computed")  # that our trainer logs


def sums_up(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """The reward: 1 where the number after the last "=" is the sum."""
    pairs = zip(completions, answer, strict=True)
    return [float(final_answer(text) == right) for text, right in pairs]


class Recorded:
    """What the demo notes down of a trainer's steps; the mixin goes in front of the trainer
    class.
    """

    title = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.completions: list[int] = []
        self.spent: list[float] = []  # CPU seconds without generation, at the end of each step
        self.generating = 0.0
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generating += time.process_time() - started
        return result

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.losses.append(loss.item())
        self.completions.append(hash(inputs["completion_ids"].numpy().tobytes()))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self.spent.append(time.process_time() - self.generating)
        step, total = self.state.global_step, self.args.max_steps
        if "loss" in logs and (step % 10 == 0 or step in (1, total)):
            reward = [x["reward"] for x in self.state.log_history if "reward" in x][-1]
            print(f"  {self.title}: step {step:3d} of {total}, reward {reward:.3f}", flush=True)


class StockTrainer(Recorded, GRPOTrainer):
    title = "stock TRL   "


class OurTrainer(Recorded, FusedGRPOTrainer):
    title = "grpo_kernels"


def train(
    kind: type, warm: Any, tokenizer: Any, problems: list[Any], options: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Train a copy of the warm model; returns it with the figures of the run."""
    config = GRPOConfig(
        output_dir=str(options.output / "trainer"),
        per_device_train_batch_size=options.batch_size,
        num_generations=8,
        num_iterations=2,
        max_completion_length=8,
        learning_rate=5e-4,
        adam_epsilon=1e-6,  # so that Adam does not blow up the noise of unused vocabulary entries
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
    model = copy.deepcopy(warm)
    trainer = kind(
        model=model,
        reward_funcs=sums_up,
        args=config,
        train_dataset=Dataset.from_list([vars(x) for x in problems]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return model, {
        "losses": trainer.losses,
        "completions": trainer.completions,
        "gradient_norms": [entry["grad_norm"] for entry in history],
        "rewards": [entry["reward"] for entry in history if "reward" in entry],
        # of the steps between the first end and the last one
        "step_cpu_seconds": (trainer.spent[-1] - trainer.spent[0]) / (len(trainer.spent) - 1),
        **{name: statistics.fmean(entry.get(name, 1.0) for entry in history) for name in SHARES},
    }


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float | int]:
    """How far the two runs are apart, over the steps in which both sampled the same completions.

    Two right implementations differ in the last bits. A sampled token that depends on such a bit
    may come out differently: from there on, the runs see other data and are not comparable. A ratio
    that lies on its clip bound up to such a bit is clipped in one run alone: then the loss is the
    same, but the gradient is not.
    """
    same = [a == b for a, b in zip(theirs["completions"], ours["completions"], strict=True)]
    steps = same.index(False) if False in same else len(same)

    def pairs(name: str) -> list[tuple[float, float]]:
        return list(zip(theirs[name], ours[name], strict=True))[:steps]

    losses = [abs(a - b) for a, b in pairs("losses")]
    alike = [abs(a - b) <= SAME_NORM * a for a, b in pairs("gradient_norms")]
    return {
        "max_loss_difference": max(losses, default=float("inf")),
        "steps_with_same_norm": sum(alike),
        "steps_compared": steps,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole demo; returns the summary."""
    tokenizer = build_tokenizer(options.vocab)
    model = build_model(tokenizer, seed=SEED)
    problems = all_problems(largest=5)
    held_out, training = problems[: len(problems) // 5], problems[len(problems) // 5 :]
    size = sum(p.numel() for p in model.parameters())
    print(f"Qwen3 model, {size:,} parameters, vocabulary {len(tokenizer)}")
    print(f"Warm start: {options.warm_steps} supervised steps on noisy sums", flush=True)
    warm = {"steps": options.warm_steps, "noise": 0.3, "batch_size": 64, "learning_rate": 5e-3}
    warm_start(model, tokenizer, problems, **warm, seed=SEED)

    def reward(trained: Any) -> float:
        return evaluate(trained, tokenizer, held_out * 8, seed=SEED)

    start, runs, ends = reward(model), {}, {}
    print(f"Reward on {len(held_out)} problems that GRPO does not train on: {start:.3f}")
    for name, kind in (("trl", StockTrainer), ("ours", OurTrainer)):
        trained, runs[name] = train(kind, model, tokenizer, training, options)
        ends[name] = reward(trained)
    apart = differences(runs["trl"], runs["ours"])
    for figures in runs.values():
        del figures["completions"]  # compared; of no interest to a reader
    versions = {name: version(name) for name in PACKAGES}
    return {
        "reward_start": start,
        "reward_end": ends["ours"],
        "reward_end_trl": ends["trl"],
        **apart,
        "runs": runs,
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **versions},
    }


_CLIPPED = (
    "  (Where they do not, a ratio is so close to its clip bound that rounding decides whether",
    "  its token has a gradient.)",
)


def table(summary: dict[str, Any]) -> str:
    """The figures of the demo as text."""

    def row(label: str, theirs: float, ours: float, form: str, better: str = "") -> str:
        return f"  {label:<36}{theirs:>14{form}}{ours:>14{form}}{better:>13}".rstrip()

    theirs, ours = summary["runs"]["trl"], summary["runs"]["ours"]
    seconds = [x["step_cpu_seconds"] for x in (theirs, ours)]
    steps, alike = summary["steps_compared"], summary["steps_with_same_norm"]
    start = summary["reward_start"]
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    lines = [
        f"  {'':<36}{'stock TRL':>14}{'grpo_kernels':>14}{'better by':>13}",
        row("reward at the start", start, start, ".3f"),
        row("reward at the end", summary["reward_end_trl"], summary["reward_end"], ".3f"),
        row("CPU seconds of a step *", *seconds, ".3f", f"{seconds[0] / seconds[1]:.1f} times"),
        *(row(name, theirs[name], ours[name], ".1%") for name in SHARES),
        f"  In {steps} of {summary['steps']} steps, both runs sampled the same completions. There,",
        f"  losses differ by at most {summary['max_loss_difference']:.1e}; gradient norms agree to "
        f"{SAME_NORM:.0e} in {alike}.",
        *(_CLIPPED if alike < steps else ()),
        "  * without generation; on a CPU, stock TRL also projects prompt and padding",
        f"  CPU, threads: {summary['threads']}, fp32, {versions}",
    ]
    return "\n" + "\n".join(lines) + "\n"


def complaints(summary: dict[str, Any]) -> list[str]:
    """What the demo promises and this run did not keep."""
    found, rise = [], summary["reward_end"] - summary["reward_start"]
    if rise < MIN_RISE:
        found.append(f"the reward rose by {rise:.3f}, expected at least {MIN_RISE}")
    apart, steps = summary["max_loss_difference"], summary["steps_compared"]
    if not apart <= MAX_LOSS_DIFFERENCE:
        found.append(f"the losses are up to {apart:.1e} apart, expected {MAX_LOSS_DIFFERENCE}")
    if summary["steps_with_same_norm"] < MIN_SAME_NORMS * steps:
        found.append(
            f"the gradient norms differ in more than {1 - MIN_SAME_NORMS:.0%} of the steps"
        )
    if steps < min(10, summary["steps"]):
        found.append(f"the runs sampled the same completions in only {steps} steps")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run")
    smoke = "a few steps and a small vocabulary; the reward is not judged"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, the second is timed, got {options.steps}")
    options.vocab, options.warm_steps, options.batch_size = 2048, 250, 256
    if options.smoke:
        options.steps, options.vocab, options.warm_steps, options.batch_size = 3, 256, 10, 32
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    summary = run(options)
    summary["seconds"] = time.perf_counter() - started
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    written = options.output / "summary.json"
    print(f"{written} written after {summary['seconds']:.0f} s")
    found = complaints(summary)
    if options.smoke:
        found = [complaint for complaint in found if not complaint.startswith("the reward")]
    for complaint in found:
        print(f"demo: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
