"""Tiny language models, a tokenizer and a recorded TRL run, all built locally: nothing is downloaded.

Shared by the tests, the examples and the benchmarks. It knows TRL and transformers, and nothing of `grpo_kernels`.
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig

WORDS = 200
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCAB = WORDS + len(SPECIAL)
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
# Wall-clock figures and the learning-rate schedule say nothing of the loss.
NOT_COMPARED = ("time", "runtime", "per_second", "epoch", "learning_rate", "total_flos")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
# kind -> (config class, model class, fields): one kind for every property of a head that the integration must carry.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "tied": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "softcap": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, "final_logit_softcapping": 2.0}),
    "logit_scale": ("CohereConfig", "CohereForCausalLM", {"num_key_value_heads": 2, "logit_scale": 0.25}),
    "logits_scaling": ("GraniteConfig", "GraniteForCausalLM", {"num_key_value_heads": 2, "logits_scaling": 2.0}),
    "bias": ("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 4}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0 .. w199`, split at white space; ids 0, 1, 2 are padding, end of sequence and unknown."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def model(kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model of one of `KINDS` with random weights, the same ones for the same seed.

    The head is drawn wide (0.3 instead of 0.02), so that the distributions are far from uniform, and every embedding
    leans towards the end-of-sequence row of the head, so that completions end after 2 to 12 tokens.
    """
    config_name, model_name, fields = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**_SHAPE, **fields})
    made = getattr(transformers, model_name)(config)
    with torch.no_grad():
        head, lean = made.get_output_embeddings(), torch.tensor([1.0, -1.0]).repeat(_SHAPE["hidden_size"] // 2)
        head.weight.normal_(0.0, 0.3)
        if head.bias is not None:
            head.bias.normal_(0.0, 0.3)
        made.get_input_embeddings().weight.add_(0.3 * lean)
        head.weight[_SHAPE["eos_token_id"]] = 0.12 * lean
    return made.to(dtype)


def dataset(rows: int = 64, seed: int = 0) -> Dataset:
    """Prompts of 2 to 6 words. Every second one starts with `w0`, and `reward` scores all its completions alike."""
    draw = random.Random(seed)
    prompts = []
    for row in range(rows):
        words = [f"w{draw.randrange(1, WORDS)}" for _ in range(draw.randrange(1, 6))]
        prompts.append(" ".join([f"w{row % 2}", *words]))
    return Dataset.from_dict({"prompt": prompts})


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for groups whose prompt starts with `w0` (advantage 0), else the share of ids that are multiples of three."""
    scores = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        share = sum(i % 3 == 0 for i in ids) / max(len(ids), 1)
        scores.append(1.0 if prompt.startswith("w0 ") else share)
    return scores


def common_options(output_dir: str, steps: int) -> dict[str, Any]:
    """Options every TRL configuration has: a CPU run in fp32 that logs every step and writes nothing."""
    return {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "seed": 7,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def config(output_dir: str, steps: int = 4, config_class: type[GRPOConfig] = GRPOConfig, **options: Any) -> GRPOConfig:
    """A GRPO configuration of 16 completions of at most 12 tokens a step, in 2 accumulated micro-batches, on a CPU."""
    base: dict[str, Any] = {
        **common_options(output_dir, steps),
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "shuffle_dataset": False,
    }
    return config_class(**{**base, **options})


@dataclass
class History:
    """What a run logged: one mapping per optimiser step, and the loss of every micro-batch."""

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
) -> History:
    """Trains a fresh tiny model with a TRL trainer and returns everything that was logged.

    `prepare` gets the trainer before it starts; `arguments` are the trainer's own, by default those of GRPO.
    """
    quiet()
    history = History()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = model(kind, dtype=dtype)
        policy.save_pretrained(args.output_dir)  # TRL loads the reference model from where the policy came
        policy.config._name_or_path = args.output_dir
        given: dict[str, Any] = {"reward_funcs": reward} if isinstance(args, GRPOConfig) else {}
        given = {"train_dataset": dataset(), **given, **arguments}
        trainer = trainer_class(model=policy, args=args, processing_class=tokenizer(), **given)
        trainer.remove_callback(transformers.PrinterCallback)
        _record(trainer, history)
        if prepare is not None:
            prepare(trainer)
        trainer.train()
    return history


def _record(trainer: Any, history: History) -> None:
    step, log = trainer.training_step, trainer.log

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        history.losses.append(loss.item())
        return loss

    def recorded_log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        seen = dict(logs)
        if "loss" in seen:
            seen.update({name: sum(v) / len(v) for name, v in trainer._metrics["train"].items()})
            history.steps.append(compared(seen))
        log(logs, *args, **kwargs)

    trainer.training_step = training_step
    trainer.log = recorded_log


def compared(logs: dict[str, float]) -> dict[str, float]:
    """The logged values that the loss and the sampled text decide, without clocks and schedules."""
    return {name: float(v) for name, v in logs.items() if not any(part in name for part in NOT_COMPARED)}


def quiet() -> None:
    """One thread and no log lines: the runs are compared, not read."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
