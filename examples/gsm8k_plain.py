r"""GRPO on GSM8K with a Qwen3 model in a plain PyTorch loop, in one file.

    python examples/gsm8k_plain.py                         # on the GPU if there is one
    python examples/gsm8k_plain.py --model DIR --data DIR  # offline: the model, a copy of the data
    python examples/gsm8k_plain.py --smoke                 # a tiny model, made here; on a CPU

The data: a folder of `save_to_disk`, a folder of json, jsonl or parquet files named after their
splits, or such a file. Each step samples --group completions for each of --prompts problems,
rewards a right answer in \boxed{} or after ####, and takes --updates optimizer steps, --micro-batch
sequences (whole groups) at a time, against the log-probabilities of the policy that sampled. The
model's layers compute no padding and each prompt once, and updates leave out sequences without
gradient. The model answers --test problems before and after, and is saved in the folder --output.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from grpo_kernels import GRPOLoss
from grpo_kernels.advantages import group_advantages
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss

try:
    from math_verify import parse, verify
except ImportError:
    verify = None

READS = "math-verify" if verify else "equal numbers (math-verify is not installed)"
ASK = "Think step by step, and write the final answer as \\boxed{number}."
NOTHING_LEARNT = (
    "no group has had unequal rewards so far, so nothing was learnt: "
    "is the task too hard, or too easy?"
)
OPTIONS = {
    "model": "Qwen/Qwen3-0.6B", "data": "openai/gsm8k", "prompts": 16, "group": 8, "updates": 2,
    "micro_batch": 32, "steps": 100, "lr": 1e-6, "max_new_tokens": 512, "test": 128, "seed": 0,
    "output": "gsm8k-plain",
}  # fmt: skip
SMOKE = {"lr": 1e-3, "max_new_tokens": 8, "test": 6, "steps": 10, "micro_batch": 24}
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
# the distribution that the loss is of
WHOLE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32 weights, bf16 products: at this learning rate most updates are smaller than half a step of a
# bf16 weight.
AUTOCAST = torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def splits(name: str) -> Any:
    """Read the splits "train" and "test", from the hub or from a copy; of data without splits a
    tenth is "test"."""
    path = Path(name)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        found = datasets.load_from_disk(name)
    elif path.is_file():
        kind = "parquet" if path.suffix == ".parquet" else "json"
        found = datasets.load_dataset(kind, data_files=name, split="train")
    else:
        found = datasets.load_dataset(name, *([] if path.is_dir() else ["main"]))
    if not isinstance(found, datasets.Dataset) and set(found) == {"train"}:
        found = found["train"]
    if isinstance(found, datasets.Dataset):
        found = found.train_test_split(0.1, seed=0)
    columns = {x: found[x].column_names if x in found else None for x in ("train", "test")}
    if not all(x and {"question", "answer"} <= {*x} for x in columns.values()):
        raise SystemExit(
            f"data: expected splits train and test with columns question and answer, got {columns}"
        )
    return found


def is_right(text: str, answer: str) -> bool:
    """Compare the last answer in \\boxed{} or after #### with GSM8K's; without either, a text is
    wrong."""
    pieces = re.split(r"(?=\\boxed\{)|####", text)
    found, gold = pieces[-1].split("\n")[0], answer.split("####")[-1].strip().replace(",", "")
    if len(pieces) > 1 and verify is not None:
        return verify(parse(gold), parse(found))
    number = re.search(r"-?\d[\d,]*(\.\d+)?", found)
    number = float(number[0].replace(",", "")) if number else None
    return len(pieces) > 1 and number == float(gold)


@torch.no_grad()
@AUTOCAST
def complete(
    model: Any, tokenizer: Any, problems: list, limit: int, **how: Any
) -> tuple[torch.Tensor, dict]:
    """Generate a completion for each problem: rewards (B,), and what the loss takes of prompts and
    completions."""
    chats = [[{"role": "user", "content": f"{problem['question']} {ASK}"}] for problem in problems]
    prompts = tokenizer.apply_chat_template(
        chats, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    options = {"padding": True, "add_special_tokens": False, "return_tensors": "pt"}
    batch = tokenizer(prompts, **options).to(DEVICE)
    ids = model.generate(**batch, max_new_tokens=limit, pad_token_id=tokenizer.pad_token_id, **how)
    completion_ids = ids[:, batch["input_ids"].shape[1] :]
    eos = torch.tensor(model.generation_config.eos_token_id, device=DEVICE)
    ends = torch.isin(completion_ids, eos).long()
    mask = (ends.cumsum(1) - ends == 0).long()  # up to the first end of sequence, which counts
    texts = tokenizer.batch_decode(
        completion_ids.where(mask == 1, tokenizer.pad_token_id), skip_special_tokens=True
    )
    pairs = zip(texts, problems, strict=True)
    rewards = [float(is_right(text, problem["answer"])) for text, problem in pairs]
    attention_mask = torch.cat([batch["attention_mask"], mask], dim=1)
    inputs = {"input_ids": ids, "attention_mask": attention_mask, "completion_mask": mask}
    return torch.tensor(rewards, device=DEVICE), inputs


def made_here() -> tuple[Any, Any, list[dict]]:
    """Model, tokenizer and problems of `--smoke`; the model has been taught answers of which half
    are right."""
    ways = [(who, a, b) for who in ("Ann", "Ben", "Eve May") for a in range(1, 6) for b in (1, 2)]
    sums = [
        (f"{who} has {a} apples and buys {b} more. How many apples are there now?", a + b)
        for who, a, b in ways
    ]
    words = ["<pad>", "<eos>", *sorted(set(re.findall(r"\w+|\W", f"{sums} {ASK}\n")))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.padding_side, tokenizer.chat_template = "left", "{{ messages[0].content + '\n' }}"
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, initializer_range=0.1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=len(words),
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        drawn = random.choices(sums, k=32)
        taught = [(q, random.choice([x, random.randint(2, 7)])) for q, x in drawn]
        texts = [f"{q} {ASK}\n\\boxed{{{x}}}<eos>" for q, x in taught]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[:, :-6] = -100  # but for the tokens of the answer: \ boxed { 7 } <eos>
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    problems = [{"question": q, "answer": f"#### {x}"} for q, x in random.sample(sums, 30)]
    return model, tokenizer, problems


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    about = "ten steps of a tiny model on problems made here"
    parser.add_argument("--smoke", action="store_true", help=about)
    for name, value in {**OPTIONS, **(SMOKE if "--smoke" in sys.argv else {})}.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"{value} by default")
    args = parser.parse_args()
    for name, value in vars(args).items():
        least = 0 if name in ("seed", "steps") else 1
        if type(value) is int and value < least:
            parser.error(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
    if args.micro_batch % args.group:
        expected = f"expected whole groups of {args.group}"
        parser.error(f"--micro-batch: {expected}, got {args.micro_batch}")
    if Path(args.output).is_file():
        expected = "expected a folder, or a name that is free"
        parser.error(f"--output: {expected}, got the file {args.output}")
    transformers.set_seed(args.seed)
    if args.smoke:
        model, tokenizer, problems = made_here()
        train, test = problems[args.test :], problems[: args.test]
    else:
        found = splits(args.data)
        train, test = list(found["train"]), list(found["test"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(DEVICE)
    print(f"device: {DEVICE}; reward: {READS}")
    before, _ = complete(model, tokenizer, test[: args.test], args.max_new_tokens, **GREEDY)
    print(f"right before training: {before.mean():.3f} of {len(before)} test problems")
    ever_live = 0.0
    loss_fn = GRPOLoss(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(1, args.steps + 1):
        sampled = random.sample(train, args.prompts)
        problems = [problem for problem in sampled for _ in range(args.group)]
        rewards, inputs = complete(model, tokenizer, problems, args.max_new_tokens, **WHOLE)
        advantages = group_advantages(rewards, num_generations=args.group)
        count = inputs["completion_mask"].sum()  # of the whole batch, so that micro-batches add up
        slices = [slice(i, i + args.micro_batch) for i in range(0, len(problems), args.micro_batch)]
        parts = [{name: x[rows] for name, x in inputs.items()} for rows in slices]
        with torch.no_grad(), AUTOCAST:
            scores = [causal_lm_logps(model, **part, loss_fn=loss_fn) for part in parts]
        entropies = torch.cat([x.entropies for x in scores])
        entropy = (entropies * inputs["completion_mask"]).sum() / count
        for _ in range(args.updates):
            live = 0.0
            for part, old, rows in zip(parts, [x.logps for x in scores], slices, strict=True):
                given = {"advantages": advantages[rows], "old_per_token_logps": old}
                given["num_items_in_batch"] = count
                with AUTOCAST:
                    out = causal_lm_loss(model, loss_fn, **part, **given, zero_advantage="skip")
                out.loss.backward()
                live += out.metrics["sequences/gradient"].item() * len(old) / len(problems)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(
            f"step {step}: reward {rewards.mean():.3f}, entropy {entropy:.3f}, gradient norm "
            f"{norm:.3f}, sequences with gradient {live:.3f}",
            flush=True,
        )
        ever_live += live
        if step == min(5, args.steps) and not ever_live:
            print(NOTHING_LEARNT)
    after, _ = complete(model, tokenizer, test[: args.test], args.max_new_tokens, **GREEDY)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    change = f"{before.mean():.3f} before, {after.mean():.3f} after"
    print(f"saved in {args.output}; test problems right: {change}")


if __name__ == "__main__":
    main()
