"""Estimate how much faster a TRL training run would be, from its lengths alone; nothing runs.

Each figure divides the cost of matrix products in stock TRL by their cost in `FusedGRPOTrainer`,
which regroups samples by prompt. Attention, rewards and the optimizer are left out.

A token of the body (the model below the head) costs 1 in the forward, and 2 in the backward (1 with
LoRA). docs/memory.md counts the cost of the head. Stock TRL is assumed to project only completion
tokens, as its Triton path does on a GPU. It pads prompts to the longest prompt, and completions to
the longest completion, among the samples that a process generates together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import torch

from grpo_kernels.commands import memory
from grpo_kernels.commands.memory import MOST, share, whole_number

NOTE = (
    "Computed from counts of matrix products, not measured. "
    "Attention, rewards and the optimizer are left out."
)
# names in TRL's log
LOGGED = ("completions/mean_length", "completions/max_length", "frac_reward_zero_std")
SAVINGS = {  # in the order of the table
    "padding": "padding is skipped",
    "prompts": "each prompt runs once for all its completions",
    "scoring": "old log-probabilities come from the loss itself",
    "groups": "groups with equal rewards run no backward",
    "head": "the head computes its logits once",
}


class Model(NamedTuple):
    """Sizes that determine the cost of a model's matrix products."""

    name: str
    vocabulary: int
    hidden: int
    body: int  # number of weights in the body's matrices that a token uses


MODELS = {
    name: Model(name, *memory.MODELS[name], body)
    for name, body in (("Qwen3-0.6B", 440_401_920), ("Qwen3-8B", 6_945_767_424))
}


class Batch(NamedTuple):
    """Completions that one process generates together: lengths in tokens, and equal rewards."""

    prompt: float  # mean
    longest_prompt: float
    completion: float  # mean
    longest: float  # the longest completion
    equal: float = 0.0  # share of groups with equal rewards


class Training(NamedTuple):
    """Settings of the training run; comments give the names of TRL's arguments."""

    group: int = 8  # num_generations
    batch: int = 8  # per_device_train_batch_size
    micro_batches: int = 1  # steps_per_generation, by default gradient_accumulation_steps
    iterations: int = 1  # num_iterations
    lora: bool = False  # on the body only; the head is frozen
    kl: bool = False  # beta > 0: every sequence has a gradient, and the reference runs too
    vllm: bool = False  # with TRL's importance sampling correction

    @property
    def completions(self) -> int:
        """Number of completions that one process generates together."""
        return self.batch * self.micro_batches


def longest_of(count: float, lengths: tuple[float, float], most: float = math.inf) -> float:
    """Expected maximum of `count` log-normal lengths, cut at `most`."""
    mean, variation = lengths
    sigma = math.sqrt(math.log1p(variation**2))
    if sigma == 0.0:
        return min(mean, most)
    normal, parts = NormalDist(math.log(mean) - sigma**2 / 2, sigma), 4096
    quantiles = (((i + 0.5) / parts) ** (1 / count) for i in range(parts))
    return fmean(min(math.exp(normal.inv_cdf(x)), most) for x in quantiles)


def factors(model: Model, batches: Sequence[Batch], training: Training) -> dict[str, float]:
    """Compute the speedup of each saving on top of those before it; the total is their product."""
    n, iterations = training.completions, training.iterations
    group = min(training.group, n)  # a group may span processes
    prompts = n / group * math.ceil(group / training.batch)
    scored = training.vllm or iterations > 1
    backward, gradients = (1, 2) if training.lora else (2, 4)
    costs = [0.0] * (1 + len(SAVINGS))
    for batch in batches:
        counted = n * batch.completion
        once = prompts * batch.prompt + counted
        unequal = 1.0 if training.kl else 1.0 - batch.equal
        # (tokens of the body, True to score old log-probabilities, share with a backward, number
        # of products recomputed)
        ways = (
            (n * (batch.longest_prompt + batch.longest), scored, 1.0, 2),  # stock TRL
            (n * batch.prompt + counted, scored, 1.0, 2),
            (once, scored, 1.0, 2),
            (once, False, 1.0, 2),
            (once, False, unequal, 2),
            (once, False, unequal, 0),
        )
        for i, (tokens, scores, live, again) in enumerate(ways):
            others = training.kl + scores  # forwards without gradient
            body = 2 * model.body * tokens * (iterations * (1 + backward * live) + others)
            head = iterations * (2 + (gradients + again) * live) + 2 * others
            costs[i] += body + head * model.hidden * model.vocabulary * counted
    gains = (before / after for before, after in itertools.pairwise(costs))
    return dict(zip(SAVINGS, gains, strict=True))


def whole(gain: float, generation: float) -> float:
    """Speedup of the whole step, if generation takes this share of stock TRL's step."""
    return 1 / (generation + (1 - generation) / gain)


def batches_of_samples(
    rows: Sequence[Any], training: Training, equal: float, tokenizer: str | None
) -> list[Batch]:
    """Make batches of consecutive rows; leave out rows that do not fill a batch."""
    n, group, encode = training.completions, training.group, None
    if len(rows) < n:
        raise ValueError(f"--samples: expected at least {n} completions, got {len(rows)}")
    if tokenizer is not None:
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).encode
    counts: dict[str, list[int]] = {"prompt": [], "completion": []}
    rewards: list[float | None] = []
    for i, row in enumerate(rows, 1):
        for name in counts:
            x = value = row.get(name) if isinstance(row, dict) else None
            if isinstance(x, str) and encode is not None:
                x = encode(x, add_special_tokens=False)
            if isinstance(x, list) and all(type(y) is int for y in x):  # not a list of messages
                x = len(x)
            if type(x) is not int or x < 1:
                text = "expected a number of tokens, a list of ids, or text with --tokenizer"
                raise ValueError(f"--samples, line {i}: {name}: {text}, got {str(value)[:40]!r}")
            counts[name].append(x)
        reward = row.get("reward")
        if not isinstance(reward, (int, float, type(None))):
            text = f"expected a number, got {str(reward)[:40]!r}"
            raise ValueError(f"--samples, line {i}: reward: {text}")
        rewards.append(reward)
    if 0 < rewards.count(None) < len(rows):
        text = "expected a reward in every line or in none"
        raise ValueError(f"--samples: {text}, got none in {rewards.count(None)} of {len(rows)}")
    batches = []
    for start in range(0, len(rows) - n + 1, n):
        prompts, completions = (x[start : start + n] for x in counts.values())
        if None not in rewards and n >= group:
            groups = (rewards[i : i + group] for i in range(start, start + n, group))
            equal = fmean(len({*x}) == 1 for x in groups)
        mean = fmean(completions)
        batches.append(Batch(fmean(prompts), max(prompts), mean, max(completions), equal))
    return batches


def read_log(file: Path) -> tuple[int | None, list[list[float]]]:
    """Read TRL's trainer_state.json: the batch size if it is there, and `LOGGED` of each log."""
    state = json.loads(file.read_text("utf-8-sig"))
    state = state if isinstance(state, dict) else {}
    entries, batch = state.get("log_history"), state.get("train_batch_size")
    entries = entries if isinstance(entries, list) else []
    logged = [[x.get(name) for name in LOGGED] for x in entries if isinstance(x, dict)]
    numbers: list[Any] = [x for x in logged if all(isinstance(y, (int, float)) for y in x)]
    lengths = [x for x in numbers if x[0] > 0]
    if not lengths:
        text = f"expected a trainer_state.json that has {', '.join(LOGGED)}"
        raise ValueError(f"--log: {text}, got {file} without them")
    return batch if type(batch) is int else None, lengths


def read_model(name: str, config: Any) -> Model:
    """Read the sizes of a model from its transformers configuration, built on the meta device."""
    from transformers import AutoModel

    with torch.device("meta"):
        below_the_head = AutoModel.from_config(config, trust_remote_code=False)
    tables = [x for x in below_the_head.modules() if isinstance(x, torch.nn.Embedding)]
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = [getattr(config, x) for x in names if getattr(config, x, None)]
    embeddings, body = {id(x.weight) for x in tables}, 0.0
    for path, x in below_the_head.named_parameters():
        if x.dim() > 1 and id(x) not in embeddings:
            met = config.num_experts_per_tok / experts[0] if ".experts." in path else 1.0
            body += x.numel() * met
    return Model(name, config.vocab_size, config.hidden_size, round(body))


def mean_and_variation(argument: str) -> tuple[float, float]:
    """Parse "512" or "512,0.8"; argparse shows the function's name in its errors."""
    mean, variation = map(float, (argument if "," in argument else f"{argument},0").split(","))
    if not (1 <= mean <= MOST and 0 <= variation <= 100):
        text = "expected a mean of at least 1, and after a comma a variation >= 0"
        raise argparse.ArgumentTypeError(f"{text}, got {argument}")
    return mean, variation


def _coefficient(argument: str) -> float:
    if not 0.0 <= float(argument) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number >= 0, got {argument}")
    return float(argument)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels estimate``."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    about = (
        "mean of log-normal completion lengths; 512,0.8 adds a standard deviation of 0.8 x the mean"
    )
    add("--completion", type=mean_and_variation, metavar="MEAN[,CV]", help=about)
    about = (
        "file with one completion per line and groups on consecutive lines: "
        '{"prompt": ..., "completion": ..., "reward": ...}, the first two as a number of tokens, a '
        "list of ids, or text; rewards are optional"
    )
    add("--samples", type=Path, metavar="JSONL", help=about)
    add("--log", type=Path, metavar="JSON", help="TRL's trainer_state.json; needs --prompt")
    add = parser.add_argument
    add("--prompt", type=mean_and_variation, metavar="MEAN[,CV]", help="the same for prompts")
    add("--max-completion", type=whole_number, help="max_completion_length, for --completion")
    add("--equal", type=share, default=0.0, help="share of groups with equal rewards")
    add("--tokenizer", metavar="NAME", help="folder or Hub name of a tokenizer, for text")
    about = f"{', '.join(MODELS)}, or a folder or Hub name; default: Qwen3-8B"
    add("--model", default="Qwen3-8B", metavar="NAME", help=about)
    add("--lora", action="store_true", help="LoRA on the body; the head is frozen")
    add("--group", type=whole_number, default=8, help="num_generations; default: 8")
    add("--batch", type=whole_number, help="per_device_train_batch_size; default: 8, or the log's")
    about = "gradient_accumulation_steps, equal to steps_per_generation; default: 1"
    add("--accumulate", type=whole_number, default=1, help=about)
    add("--iterations", type=whole_number, default=1, help="num_iterations; default: 1")
    add("--beta", type=_coefficient, default=0.0, help="coefficient of the KL term; default: 0")
    add("--vllm", action="store_true", help="vLLM generates, with TRL's sampler correction")
    about = "share of stock TRL's step spent in generation; default: 0.5, an assumption"
    add("--generation", type=share, default=0.5, help=about)
    add("--json", action="store_true", dest="as_json", help="one JSON object instead of text")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the estimate for the training run that `options` describe."""
    try:
        result = _computed(options)
    except json.JSONDecodeError as error:
        file = options.samples or options.log
        parser.error(f"{file}: expected JSON, got {error.doc[:40]!r} ({error})")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(result, indent=2) if options.as_json else _text(result))
    return 0


def _check_combination(options: argparse.Namespace) -> None:
    """Require what the source of the lengths needs, and none of the options that it ignores."""
    source = next(x for x in ("completion", "samples", "log") if getattr(options, x) is not None)
    if source != "samples" and options.prompt is None:
        raise ValueError("--prompt is required with --completion and --log")
    unread = {
        "completion": ("tokenizer",),
        "samples": ("prompt", "max_completion"),
        "log": ("tokenizer", "max_completion", "equal"),
    }
    for name in unread[source]:
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')}: not used with --{source}; leave it out")
    most = options.max_completion
    if most is not None and most < options.completion[0]:
        expected = f"expected at least the mean of --completion, {options.completion[0]:g}"
        raise ValueError(f"--max-completion: {expected}, got {most}")


def _computed(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as printed with --json."""
    _check_combination(options)
    logged_batch, lengths = None, list[list[float]]()
    if options.log is not None:
        logged_batch, lengths = read_log(options.log)
    batch, kl, iterations = options.batch or logged_batch or 8, options.beta > 0, options.iterations
    training = Training(
        options.group, batch, options.accumulate, iterations, options.lora, kl, options.vllm
    )
    n, group = training.completions, training.group
    if n % group and group % n:
        text = "expected a multiple or a divisor of --group"
        raise ValueError(f"--batch x --accumulate: {text}, got {n} with --group {group}")
    if options.samples is not None:
        # not splitlines(): a JSON string may contain U+2028
        lines = options.samples.read_text("utf-8-sig").split("\n")
        rows = [json.loads(x) for x in lines if x.strip()]
        if options.equal and any(isinstance(x, dict) and "reward" in x for x in rows):
            raise ValueError("--equal: expected none with rewards in --samples, which say it")
        batches = batches_of_samples(rows, training, options.equal, options.tokenizer)
    else:
        if options.log is None:
            longest = longest_of(n, options.completion, options.max_completion or math.inf)
            lengths = [[options.completion[0], longest, options.equal]]
        prompts = options.prompt[0], longest_of(n / min(group, n), options.prompt)
        batches = [Batch(*prompts, *x) for x in lengths]
    model = memory.known_or_read(options.model, MODELS, partial(read_model, options.model))
    gains = factors(model, batches, training)
    gain = math.prod(gains.values())
    means = [fmean(x) for x in zip(*batches, strict=True)]
    return {
        "note": NOTE,
        "model": model._asdict(),
        "training": training._asdict(),
        "lengths": {"batches": len(batches), **Batch(*means)._asdict()},
        "factors": gains,
        "gain": gain,
        "generation": options.generation,
        "gain_whole_step": whole(gain, options.generation),
    }


def _text(result: dict[str, Any]) -> str:
    model, training = Model(**result["model"]), Training(**result["training"])
    lengths = Batch(*[*result["lengths"].values()][1:])
    gains = "\n".join(f"{x:6.2f}  {SAVINGS[name]}" for name, x in result["factors"].items())
    return f"""{result["note"]}

{model.name}: V {model.vocabulary:,}, H {model.hidden:,}, {model.body:,} weights in the body
prompts of {lengths.prompt:,.0f} tokens, the longest {lengths.longest_prompt:,.0f}; \
completions of {lengths.completion:,.0f}, the longest {lengths.longest:,.0f}
groups of {training.group}, {lengths.equal:.0%} of them with equal rewards; \
{training.completions} completions generated together, {training.batch} per micro-batch

speedup from each saving, on top of those above it
{gains}

total speedup over stock TRL
{result["gain"]:6.2f}  without generation
{result["gain_whole_step"]:6.2f}  whole step, if generation takes {result["generation"]:.0%} of \
stock TRL's"""
