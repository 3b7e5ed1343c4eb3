"""One training in this process: CPU seconds of each phase, and what it logged."""

from __future__ import annotations

import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig

from benchmarks import step, tiny_run
from benchmarks.figures import ONE_GROUP
from benchmarks.memory import MIB
from benchmarks.real import task

VARIANTS = {name: options for name, options in step.VARIANTS.items() if name not in ("skip", ONE_GROUP)}
PHASES = ("generation", "scoring", "loss", "optimizer")


class Phases:
    """CPU seconds of each phase of a step; what a phase contains of another is not its own."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._open: list[float] = []  # seconds of the phases within each open one

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self._open.append(0.0)
        started = time.process_time()
        try:
            yield
        finally:
            took = time.process_time() - started
            self.spent[name] += took - self._open.pop()
            if self._open:
                self._open[-1] += took


class Timed:
    """In front of a trainer: phases, and one record a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.phases, self.steps = Phases(), []  # type: ignore[var-annotated]
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.phases.within("generation"):
            return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.phases.within("loss" if torch.is_grad_enabled() else "scoring"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.phases.within("loss"):
            found: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return found

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        step = optimizer.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phases.within("optimizer"):
                return step(*args, **kwargs)

        optimizer.step = timed
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        if "loss" in logs:  # TRL has added its metrics by now
            last = self.state.log_history[-1]  # type: ignore[attr-defined]
            seconds = {name: round(self.phases.spent[name], 4) for name in PHASES}
            self.steps.append({"logs": tiny_run.compared(last), "seconds": seconds})
            self.phases.spent.clear()


def right(model: nn.Module, tokenizer: Any, tokens: int) -> float:
    """Share of right answers to the problems that are held out, four samples each."""
    problems, model = task.problems(task.HELD_OUT * 4), model.eval()
    texts = [tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True) for x in problems["prompt"]]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    set_seed(0)
    found: Any = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0)  # type: ignore[operator]
    answers = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = task.is_right(answers, problems["answer"])
    return sum(rewards) / len(rewards)


def config(folder: str, steps: int, seed: int, *, short: bool = False, **changed: Any) -> GRPOConfig:
    """TRL's configuration: 4 prompts a step with 8 completions each of at most 32 tokens, full fine-tuning in fp32."""
    options: dict[str, Any] = {
        **tiny_run.common_options(folder, steps),
        "gradient_accumulation_steps": 2 if short else 4,
        "num_generations": 8,
        "max_completion_length": 16 if short else 32,
        "temperature": 1.0,
        "learning_rate": 2e-5,
        "seed": seed,
        "gradient_checkpointing": False,
        **changed,
    }
    return GRPOConfig(**options)


def train(name: str, model: Path, *, seed: int, steps: int, short: bool, tests: bool) -> dict[str, Any]:
    """Return what one training logged, by step, and how many answers were right before and after it.

    Args:
        tests: answer the problems that are held out, before and after.
    """
    tiny_run.quiet()
    options, tokenizer = VARIANTS[name], AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answered = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        args = config(folder, steps, seed, short=short)
        if tests:
            answered.append(right(policy, tokenizer, args.max_completion_length))
        set_seed(seed)
        trainer = step.trainer_of(
            options,
            Timed,
            model=policy,
            args=args,
            reward_funcs=task.is_right,
            train_dataset=task.training_problems(400, seed),
            processing_class=tokenizer,
        )
        trainer.train()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
        if tests:
            answered.append(right(policy, tokenizer, args.max_completion_length))
    ours = sorted({str(x.message) for x in said if "grpo_kernels" in x.filename})
    return {"options": options, "steps": trainer.steps, "right": answered, "peak_mib": round(peak), "said": ours}
