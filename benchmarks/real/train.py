"""One training in this process: CPU seconds of each phase, and what it logged."""

from __future__ import annotations

import resource
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig

from benchmarks import step, tiny_run
from benchmarks.figures import ONE_GROUP
from benchmarks.memory import MIB
from benchmarks.real import task

VARIANTS = {
    name: options for name, options in step.VARIANTS.items() if name not in ("skip", ONE_GROUP)
}


def right(model: nn.Module, tokenizer: Any, tokens: int) -> float:
    """Share of right answers to the problems that are held out, four samples each."""
    problems, model = task.problems(task.HELD_OUT * 4), model.eval()
    texts = [
        tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True)
        for x in problems["prompt"]
    ]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    set_seed(0)
    found: Any = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0
    )  # type: ignore[operator]
    answers = tokenizer.batch_decode(
        found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    rewards = task.is_right(answers, problems["answer"])
    return sum(rewards) / len(rewards)


def config(
    folder: str, steps: int, seed: int, *, short: bool = False, **changed: Any
) -> GRPOConfig:
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


def train(
    name: str, model: Path, *, seed: int, steps: int, short: bool, tests: bool
) -> dict[str, Any]:
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
            step.Timed,
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
    return {
        "options": options,
        "steps": trainer.steps,
        "right": answered,
        "peak_mib": round(peak),
        "said": ours,
    }
