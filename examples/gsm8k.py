"""Options, problems, reward, evaluation and --smoke models, for gsm8k_trl.py and distill.py."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from gsm8k_plain import NOTHING_LEARNT, READS, is_right, splits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

INSTRUCTION = r"Reason step by step, and put the final answer within \boxed{}."

# Values of TRL's options: of every run where they are not TRL's defaults, and then those of
# --smoke.
DEFAULTS = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    # Qwen3's thinking takes more tokens than a completion has here
    "chat_template_kwargs": {"enable_thinking": False},
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "per_device_eval_batch_size": 64,
    "save_steps": 100,
    "save_total_limit": 2,
}
SMOKE = {
    "use_cpu": True,
    "max_steps": 10,
    "save_steps": 5,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_completion_length": 8,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 3,
}


@dataclass
class Options:
    """Options of the two scripts; all others are TRL's."""

    dataset_name: str = field(
        default="openai/gsm8k", metadata={"help": "its name on the Hub, or a copy: gsm8k_plain.py"}
    )
    eval_problems: int = field(default=256, metadata={"help": "test problems, of 1319"})
    resume: bool = field(default=False, metadata={"help": "from the last checkpoint in output_dir"})
    smoke: bool = field(
        default=False,
        metadata={"help": "a tiny model, thirty problems, ten steps; on a CPU, offline"},
    )


def parse(
    doc: str, options: type[Options], config: type, defaults: dict[str, Any], smoke: dict[str, Any]
) -> tuple[Any, Any, ModelConfig]:
    """Read the options, TRL's `config` and its ModelConfig from the command line, and from YAML
    with --config FILE.

    An unknown name is an error. --smoke changes defaults only, so that options beside it still
    count.
    """
    kinds = options, config, ModelConfig
    parser = TrlParser(kinds, description=doc.splitlines()[0], allow_abbrev=False)
    chosen = {**DEFAULTS, **defaults, **({**SMOKE, **smoke} if "--smoke" in sys.argv else {})}
    unknown = parser.set_defaults_with_config(**chosen)
    assert not unknown, unknown
    try:
        parsed, args, model = parser.parse_args_and_config()
    except ValueError as error:  # such as an unknown option
        hint = "; on a CPU: --use_cpu True --bf16 False" if "bf16" in str(error) else ""
        raise SystemExit(f"{error}{hint}") from None
    if parsed.eval_problems < 1:
        raise SystemExit(f"--eval_problems: expected at least 1, got {parsed.eval_problems}")
    if Path(args.output_dir).is_file():
        expected = "expected a folder, or a name that is free"
        raise SystemExit(f"--output_dir: {expected}, got the file {args.output_dir}")
    if args.use_vllm and not is_vllm_available():
        raise SystemExit("--use_vllm: vLLM is not installed; pip install 'trl[vllm]'")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    return parsed, args, model


def model_arguments(model: ModelConfig) -> dict[str, Any]:
    """Arguments of a trainer: the model that trains and, if asked for, LoRA and quantization."""
    return {
        "model": model.model_name_or_path,
        "peft_config": get_peft_config(model),
        "quantization_config": get_quantization_config(model),
    }


def problems(options: Options) -> DatasetDict:
    """The splits "train" and "test": of each problem the prompt and the solution, a number."""
    found = smoke_problems() if options.smoke else splits(options.dataset_name)
    found["test"] = found["test"].select(range(min(options.eval_problems, len(found["test"]))))

    def prepare(row: dict[str, str]) -> dict[str, Any]:
        solution = row["answer"].split("####")[-1].strip().replace(",", "")
        content = f"{row['question']}\n{INSTRUCTION}"
        return {"prompt": [{"role": "user", "content": content}], "solution": solution}

    return found.map(prepare, remove_columns=["question", "answer"])


def exact_match(
    completions: list[list[dict[str, str]]], solution: list[str], **kwargs: Any
) -> list[float]:
    """The reward, 1 for a right answer and else 0: of what stands in \\boxed{} or after ####."""
    pairs = zip(completions, solution, strict=True)
    return [float(is_right(completion[-1]["content"], wanted)) for completion, wanted in pairs]


class SaysThatNothingIsLearnt(TrainerCallback):
    """Says once that the first five logs had no group with unequal rewards, and so no gradient."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Look at the share of groups with equal rewards."""
        if "frac_reward_zero_std" not in logs or len(self.shares) == 5:
            return
        self.shares.append(logs["frac_reward_zero_std"])
        if len(self.shares) == 5 and min(self.shares) == 1.0 and state.is_world_process_zero:
            print(NOTHING_LEARNT)


def train_and_evaluate(trainer: Any, options: Options, metrics: dict[str, str]) -> None:
    """Evaluate, train, evaluate and save; print `metrics`, by TRL's names in its log, before and
    after.

    After --resume the values before are those that the checkpoint has recorded.
    """
    args = trainer.args
    trainer.add_callback(SaysThatNothingIsLearnt())
    checkpoint = args.resume_from_checkpoint or options.resume or None
    # by train(), which first divides the model over the GPUs
    args.eval_on_start = checkpoint is None
    say = trainer.accelerator.print
    say(f"reward: {READS}")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.evaluate()
    trainer.save_model()
    say(f"steps: {trainer.state.global_step}; model and checkpoints in {args.output_dir}")
    for name, title in metrics.items():
        values = [entry[name] for entry in trainer.state.log_history if name in entry]
        change = f"{values[0]:.3f} before, {values[-1]:.3f} after"
        say(f"{title}, {len(trainer.eval_dataset)} test problems: {change}")
    trainer.end()


def smoke_problems() -> DatasetDict:
    """Thirty problems in the form of GSM8K's. Two thirds have the answer 3, which is learnt in a
    few steps."""
    names = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June")
    rows = []
    for name, (a, b) in itertools.product(names, ((1, 1), (1, 2), (2, 1))):
        question = f"{name} has {a} apples and buys {b} more . How many apples has {name} now ?"
        answer = f"{name} has {a} + {b} = {a + b} apples now.\n#### {a + b}"
        rows.append({"question": question, "answer": answer})
    parts = {"train": rows[:21], "test": rows[21:]}
    return DatasetDict({split: Dataset.from_list(part) for split, part in parts.items()})


def smoke_model(folder: Path, hidden_size: int, seed: int) -> str:
    """Write a tiny Qwen3 with random weights and its tokenizer to a folder; return the folder's
    name."""
    state = PartialState()
    if state.is_local_main_process:
        words = {word for row in smoke_problems()["train"] for word in row["question"].split()}
        answers = [rf"\boxed{{{x}}}" for x in range(1, 6)]
        vocab = ["<pad>", "<eos>", "<unk>", *sorted(words), *answers]
        core = Tokenizer(models.WordLevel({x: i for i, x in enumerate(vocab)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
        tokenizer.save_pretrained(folder)
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden_size // 4,
            max_position_embeddings=128,
            tie_word_embeddings=True,  # as that of Qwen3-0.6B
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    state.wait_for_everyone()
    return str(folder)
