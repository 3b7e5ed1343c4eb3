"""``python -m benchmarks.training.worker JSON``: a few optimiser steps of one model, every second one by TRL's trainer.

There is one trainer object, and before each step it gets the class whose turn it is: both have the same weights and
optimizer state, both feel the machine of the same minutes, and the model is in memory once. The first step of each is a
warm-up, in which operations are counted; the others are timed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks import tiny_models, tiny_run
from benchmarks.training.clock import Clock, heads_marked
from benchmarks.training.flops import OURS, TRL, Batch
from benchmarks.training.models import build
from grpo_kernels.integrations.trl import FusedGRPOTrainer

SEED = 7


class Timed:
    """A trainer whose clock knows what it is doing; the mixin goes in front of the trainer class."""

    clock: Clock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("generation")
        try:
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.clock.enter("other")

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Whatever follows it is the optimizer's: clipping, the update, dropping the gradients."""
        self.clock.enter("other")
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.clock.enter("optimizer")
        return loss


class Stock(Timed, GRPOTrainer):
    """TRL's."""


class Ours(Timed, FusedGRPOTrainer):
    """TRL's with our head."""


class Turns(transformers.TrainerCallback):
    """Gives the trainer its class before each step, and notes down what the step took."""

    def __init__(self, trainer: Ours, output: Path) -> None:
        self.trainer, self.output = trainer, output
        self.classes: dict[str, type[Timed]] = {TRL: Stock, OURS: Ours}
        self.found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.classes}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.__class__ = self.classes[self._turn(state.global_step)]
        self.trainer.clock.start(count=state.global_step < len(self.classes))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found[self._turn(state.global_step - 1)].append(self.trainer.clock.stop())
        written = self.output.with_suffix(".part")
        written.write_text(json.dumps(self.found))
        written.replace(self.output)  # whole, whenever this process is stopped

    def _turn(self, step: int) -> str:
        return list(self.classes)[step % len(self.classes)]


def train(model: str, batch: Batch, output: Path, *, toy: bool, device: str, steps: int) -> None:
    """Of each trainer a warm-up step with counted operations and `steps` timed ones, to `output` after each of them."""
    cuda = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    clock = Clock(torch.device(device))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), heads_marked(clock):
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        policy = build(model, toy=toy, device=device, dtype=dtype)
        trainer = Ours(
            model=policy,
            args=options(folder, batch, 2 * (1 + steps), cuda=cuda),
            reward_funcs=lambda completions, **_: [2.0 ** (i % batch.generations) for i in range(len(completions))],
            train_dataset=prompts(batch),
            processing_class=tiny_models.tokenizer(),
            zero_advantage="train",  # with "keep": the body is TRL's, and the head alone differs
            padding="keep",
        )
        trainer.clock = clock
        trainer.remove_callback(transformers.PrinterCallback)
        policy.base_model.register_forward_pre_hook(
            lambda *_: clock.enter("body") if clock.part != "generation" else None
        )
        trainer.add_callback(Turns(trainer, output))
        trainer.train()


def options(folder: str, batch: Batch, steps: int, *, cuda: bool) -> GRPOConfig:
    """TRL's defaults but for the batch and for completions that all have their full length."""
    chosen = {
        "per_device_train_batch_size": batch.sequences,
        "gradient_accumulation_steps": 1,
        "num_generations": batch.generations,
        "max_completion_length": batch.completion,
        "generation_kwargs": {"min_new_tokens": batch.completion},
        "learning_rate": 1e-6,
        "use_cpu": not cuda,
        "bf16": cuda,
    }
    return tiny_run.config(folder, steps, **chosen)


def prompts(batch: Batch) -> Dataset:
    """Prompts of exactly `batch.prompt` tokens."""
    draw = random.Random(SEED)
    words = [[f"w{draw.randrange(tiny_models.WORDS)}" for _ in range(batch.prompt)] for _ in range(64)]
    return Dataset.from_dict({"prompt": [" ".join(prompt) for prompt in words]})


def main() -> None:
    """Run what the command line's JSON says."""
    given = json.loads(sys.argv[1])
    tiny_run.quiet()
    torch.set_num_threads(given.pop("threads"))
    train(given.pop("model"), Batch(**given.pop("batch")), Path(given.pop("output")), **given)


if __name__ == "__main__":
    main()
