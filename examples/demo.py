"""GRPO in TRL's trainer, twice from one seed: with TRL's own head and with ours. `make demo` runs
it.

A small Qwen3 model learns sums from noisy demonstrations, then GRPO trains it on a reward that can
be checked. Printed: the reward of both runs, how far their losses are apart, what the whole
training step cost in each, and what one head of a realistic size costs. Written: summary.json. Exit
code 1 if the reward does not rise clearly or the two runs do not agree.
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
import weakref
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from grpo_kernels import grpo_loss
from grpo_kernels.trl import FusedGRPOTrainer

SEED, MIB = 0, 2**20
PACKAGES = ("torch", "trl", "transformers")
MIN_RISE, MAX_LOSS_DIFFERENCE, MAX_GRADIENT_DIFFERENCE = 0.2, 2e-5, 1e-4
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
    kind: type, warm: Any, tokenizer: Any, problems: list[Problem], options: argparse.Namespace
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
        train_dataset=Dataset.from_list(
            [{"prompt": x.prompt, "answer": x.answer} for x in problems]
        ),
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

    Two right implementations differ in the last bits, and a sampled token that lies exactly on such
    a bit may come out differently: from there on the runs see other data and are not comparable.
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


# One head of a realistic size.


class Meter(TorchDispatchMode):
    """Counts FLOPs, by torch's formulas, and the most bytes alive of what was allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.live_bytes = self.peak_bytes = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # in-place products (addmm_) are not in torch's table; they cost what their namesakes do
        name = func._overloadpacket.__name__.rstrip("_")
        formula = flop_registry.get(getattr(torch.ops.aten, name, None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given} | self._live
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in known:
                self._live.add(key)
                self.live_bytes += x.untyped_storage().nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(
                    x.untyped_storage(), self._freed, key, x.untyped_storage().nbytes()
                )
        return result

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.live_bytes -= size


def trl_loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """TRL's head function, as its trainer calls it, under its default loss (dapo, on-policy)."""
    chunk = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    rows = hidden.flatten(0, 1), weight, None, ids.flatten(), 1.0, chunk, None, 1.0
    logps, *_ = trl_utils._ChunkedLogProbFunction.apply(*rows, ("log_probs", "entropy"))
    ratio, gain = torch.exp(logps - logps.detach()).view_as(ids), advantages[:, None]
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def our_loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """The same loss by `grpo_loss`."""
    return grpo_loss(hidden, weight, ids, None, advantages).loss


def compare_heads(vocab: int, width: int, sequences: int, length: int) -> dict[str, dict[str, Any]]:
    """Both heads on one batch: all advantages non-zero, then those of half of the groups zero.

    Best time of three each, taken in turn; the first calls of anything are slow and not counted.
    """
    draw = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(sequences, length, width, generator=draw).requires_grad_()
    weight = torch.randn(vocab, width, generator=draw).mul_(0.02).requires_grad_()
    ids = torch.randint(vocab, (sequences, length), generator=draw)
    every = torch.linspace(-1.5, 1.5, sequences)
    found: dict[str, dict[str, Any]] = {}
    for case, live in (("all", sequences), ("half", sequences // 2)):
        advantages = every.where(torch.arange(sequences) < live, 0.0)
        gradients, figures = {}, {}
        for turn in range(4):
            for name, loss in (("trl", trl_loss), ("ours", our_loss)):
                hidden.grad = weight.grad = None
                meter, started = Meter(), time.perf_counter()
                with meter:
                    loss(hidden, weight, ids, advantages).backward()
                seconds = time.perf_counter() - started
                best = figures[name]["seconds"] if turn > 1 else seconds
                flops_nvh = meter.flops / (ids.numel() * weight.numel())
                figures[name] = {"seconds": min(best, seconds), "flops_nvh": flops_nvh}
                figures[name]["peak_bytes"] = meter.peak_bytes
                gradients[name] = hidden.grad, weight.grad
        pairs = zip(gradients["trl"], gradients["ours"], strict=True)
        apart = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
        found[case] = {**figures, "gradient_difference": apart}
        theirs, ours = (figures[x]["seconds"] for x in ("trl", "ours"))
        share = f"{live / sequences:.0%} of the sequences with gradient"
        print(f"  {share}: stock TRL {theirs:.1f} s, grpo_kernels {ours:.1f} s", flush=True)
    return found


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
    print("One head of a realistic size, forward and backward:", flush=True)
    versions = {name: version(name) for name in PACKAGES}
    return {
        "reward_start": start,
        "reward_end": ends["ours"],
        "reward_end_trl": ends["trl"],
        **apart,
        "runs": runs,
        "head_shape": options.head,
        "head": compare_heads(*options.head),
        "steps": options.steps,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **versions},
    }


def table(summary: dict[str, Any]) -> str:
    """The figures of the demo as text."""

    def row(label: str, theirs: float, ours: float, form: str, ratio: bool = True) -> str:
        better = f"{theirs / ours:.1f} times" if ratio else ""
        return f"  {label:<36}{theirs:>14{form}}{ours:>14{form}}{better:>13}".rstrip()

    theirs, ours = summary["runs"]["trl"], summary["runs"]["ours"]
    vocab, width, sequences, length = summary["head_shape"]
    steps = f"{summary['steps_compared']} of {summary['steps']} steps"
    start = summary["reward_start"]
    lines = [
        "",
        f"  {'':<36}{'stock TRL':>14}{'grpo_kernels':>14}{'better by':>13}",
        row("reward at the start", start, start, ".3f", ratio=False),
        row("reward at the end", summary["reward_end_trl"], summary["reward_end"], ".3f", False),
        f"  largest difference of the losses {summary['max_loss_difference']:.1e}, of the gradient "
        "norms",
        f"  {summary['max_gradient_norm_difference']:.1e}, over {steps} (those with the same "
        "completions)",
        "",
        "  A whole training step, generation left out",
        row("CPU seconds", theirs["step_cpu_seconds"], ours["step_cpu_seconds"], ".3f"),
        *(row(x, theirs[x], ours[x], ".1%", ratio=False) for x in SHARES),
    ]
    for case, words in (("all", "all sequences"), ("half", "half of the sequences")):
        pair = summary["head"][case]
        lines += [
            "",
            f"  A head, V {vocab}, H {width}, {sequences * length} tokens, {words} with gradient",
        ]
        of_head = [
            (pair["trl"][x], pair["ours"][x]) for x in ("seconds", "peak_bytes", "flops_nvh")
        ]
        lines.append(row("seconds, the best of three", *of_head[0], ".3f"))
        lines.append(row("peak memory, MiB", *(x / MIB for x in of_head[1]), ".1f"))
        lines.append(row("operations, in units of N V H", *of_head[2], ".2f"))
        lines.append(f"  gradients apart by {pair['gradient_difference']:.0e} of the largest entry")
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    lines += [
        "",
        "  On a CPU stock TRL also projects prompt and padding. Peak: the most bytes of the head's",
        "  tensors alive at once, gradients included; scratch inside one operation is not seen.",
        f"  CPU, threads: {summary['threads']}, fp32, {versions}",
        "",
    ]
    return "\n".join(lines)


def complaints(summary: dict[str, Any]) -> list[str]:
    """What the demo promises and this run did not keep."""
    found, rise = [], summary["reward_end"] - summary["reward_start"]
    if rise < MIN_RISE:
        found.append(f"the reward rose by {rise:.3f}, expected at least {MIN_RISE}")
    apart, steps = summary["max_loss_difference"], summary["steps_compared"]
    if not apart <= MAX_LOSS_DIFFERENCE:
        found.append(f"the losses are up to {apart:.1e} apart, expected {MAX_LOSS_DIFFERENCE}")
    if steps < min(10, summary["steps"]):
        found.append(f"the runs sampled the same completions in only {steps} steps")
    for name, pair in summary["head"].items():
        if not pair["gradient_difference"] <= MAX_GRADIENT_DIFFERENCE:
            apart = pair["gradient_difference"]
            found.append(f"head, {name}: the gradients are {apart:.1e} of the largest apart")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps of each run")
    smoke = "a few steps and a small head; the reward is not judged"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, the second is timed, got {options.steps}")
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
