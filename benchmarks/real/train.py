"""The task, one-digit sums, and one training in this process, timed by phase."""

from __future__ import annotations

import random
import re
import resource
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig

from benchmarks import step, tiny_run
from benchmarks.figures import ONE_GROUP
from benchmarks.memory import MIB

VARIANTS = {name: options for name, options in step.VARIANTS.items() if name != ONE_GROUP}
PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
HELD_OUT = random.Random(0).sample(PAIRS, 21)


def problems(pairs: list[tuple[int, int]]) -> Dataset:
    system = {"role": "system", "content": "Answer with one number."}
    asked = [{"role": "user", "content": f"Calculate {a} + {b}."} for a, b in pairs]
    answers = [a + b for a, b in pairs]
    return Dataset.from_dict({"prompt": [[system, x] for x in asked], "answer": answers})


def training_problems(count: int, seed: int) -> Dataset:
    draw, pairs = random.Random(seed), [x for x in PAIRS if x not in HELD_OUT]
    return problems([draw.choice(pairs) for _ in range(count)])


def is_right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 for each completion whose last number is the answer, else 0."""
    texts = (x[-1]["content"] if isinstance(x, list) else x for x in completions)
    found = [re.findall(r"-?\d+", text) for text in texts]
    return [float(x[-1:] == [str(want)]) for x, want in zip(found, answer, strict=True)]


def right(model: nn.Module, tokenizer: Any, tokens: int) -> float:
    """Share of right answers to the problems that are held out, four samples each."""
    held_out, model = problems(HELD_OUT * 4), model.eval()
    as_text = {"tokenize": False, "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(x, **as_text) for x in held_out["prompt"]]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    set_seed(0)
    sampling = {"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0}
    found: Any = model.generate(**inputs, **sampling)
    completions = found[:, inputs["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = is_right(answers, held_out["answer"])
    return sum(rewards) / len(rewards)


def config(
    folder: str, steps: int, seed: int, *, short: bool = False, **changed: Any
) -> GRPOConfig:
    """TRL's configuration: 4 prompts a step, 8 completions each, full fine-tuning in fp32."""
    options: dict[str, Any] = {
        **tiny_run.common_options(folder, steps), "gradient_accumulation_steps": 2 if short else 4,
        "num_generations": 8, "max_completion_length": 16 if short else 32, "temperature": 1.0,
        "learning_rate": 2e-5, "seed": seed, "gradient_checkpointing": False, **changed,
    }  # fmt: skip
    return GRPOConfig(**options)


def train(
    name: str, model: Path, *, seed: int, steps: int, short: bool, tests: bool
) -> dict[str, Any]:
    """What one training logged, by step; with `tests` also the share of right answers to the
    problems that are held out, before and after."""
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
            options, step.Timed, model=policy, args=args, reward_funcs=is_right,
            train_dataset=training_problems(400, seed), processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
        if tests:
            answered.append(right(policy, tokenizer, args.max_completion_length))
    ours = sorted({str(x.message) for x in said if "grpo_kernels" in x.filename})
    found = {"options": options, "steps": trainer.steps, "right": answered}
    return {**found, "peak_mib": round(peak), "said": ours}
