"""A tiny run of TRL's trainers on `tiny_models`, and what it logged. Nothing is downloaded.

It knows TRL and nothing of `grpo_kernels`.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig

from benchmarks.tiny_models import WORDS, model, tokenizer

# Wall-clock figures and the learning-rate schedule say nothing of the loss.
NOT_COMPARED = ("time", "runtime", "per_second", "epoch", "learning_rate", "total_flos")


def dataset(rows: int = 64, words: tuple[int, int] = (2, 6)) -> Dataset:
    """Prompts of so many words; every second one starts with `w0`: `reward` scores it alike."""
    draw = random.Random(0)
    prompts = []
    for row in range(rows):
        others = [f"w{draw.randrange(1, WORDS)}" for _ in range(draw.randint(*words) - 1)]
        prompts.append(" ".join([f"w{row % 2}", *others]))
    return Dataset.from_dict({"prompt": prompts})


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for prompts that start with `w0`, else the share of ids divisible by three."""
    scores = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        share = sum(i % 3 == 0 for i in ids) / max(len(ids), 1)
        scores.append(1.0 if prompt.startswith("w0 ") else share)
    return scores


def common_options(output_dir: str, steps: int) -> dict[str, Any]:
    """Options of every TRL configuration: on a CPU, in fp32, each step logged, no files."""
    return {
        "output_dir": output_dir, "max_steps": steps, "per_device_train_batch_size": 8,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "seed": 7,
        "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip


def config(
    output_dir: str, steps: int = 4, config_class: type[GRPOConfig] = GRPOConfig, **options: Any
) -> GRPOConfig:
    """GRPO of 16 completions of at most 12 tokens a step, in 2 micro-batches, on a CPU."""
    base: dict[str, Any] = {
        **common_options(output_dir, steps), "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 12, "shuffle_dataset": False,
    }  # fmt: skip
    return config_class(**{**base, **options})


@dataclass
class Run:
    """A trainer's run: what it logged for each optimizer step, and the loss of each micro-batch."""

    trainer: Any
    steps: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(
    trainer_class: type[Any],
    args: Any,
    *,
    kind: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] | None = None,
    **arguments: Any,
) -> Run:
    """Train a fresh tiny model; `prepare` gets the trainer before it starts, whose own `arguments`
    are by default those of GRPO."""
    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = model(kind, dtype=dtype)
        # TRL loads the reference model from where the policy came
        policy.save_pretrained(args.output_dir)
        policy.config._name_or_path = args.output_dir
        given: dict[str, Any] = {"reward_funcs": reward} if isinstance(args, GRPOConfig) else {}
        given = {"train_dataset": dataset(), **given, **arguments}
        trainer = trainer_class(model=policy, args=args, processing_class=tokenizer(), **given)
        trainer.remove_callback(transformers.PrinterCallback)
        run = recorded(trainer)
        if prepare is not None:
            prepare(trainer)
        trainer.train()
    return run


def recorded(trainer: Any) -> Run:
    """The run that `trainer` is about to begin."""
    run, step, log = Run(trainer), trainer.training_step, trainer.log

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        run.losses.append(loss.item())
        return loss

    def recorded_log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            metrics = {name: sum(v) / len(v) for name, v in trainer._metrics["train"].items()}
            run.steps.append(compared(logs | metrics))
        log(logs, *args, **kwargs)

    trainer.training_step, trainer.log = training_step, recorded_log
    return run


def compared(logs: dict[str, float]) -> dict[str, float]:
    """The logged values that the loss and the sampled text decide, without clocks and schedules."""
    return {
        name: float(v) for name, v in logs.items() if not any(part in name for part in NOT_COMPARED)
    }


def quiet() -> None:
    """One thread and no log lines: the runs are compared, not read."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
