"""What a training of TRL's would gain, computed from its lengths before anything runs.

Every figure is a ratio of matrix products, those of stock TRL over those of `FusedGRPOTrainer`.
Nothing is measured. Attention, rewards and the optimizer are left out.

A token of the body (the model below the head) costs 1 in the forward and 2 in the backward, with
LoRA 1. The head costs what docs/costs.md counts; stock TRL's projects completion tokens alone, as
its Triton path on a GPU does. Stock TRL computes prompt and completion padded to the longest of
the completions that a process generates together.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import torch

from grpo_kernels import memory
from grpo_kernels.memory import MIB, Size, share, whole_number

COMPUTED = "Computed from counts of matrix products, not measured."
LEFT_OUT = "Attention, rewards and the optimizer are left out."
SAVINGS = {  # in the order in which the table adds them
    "padding": "padding is skipped",
    "prompts": "the completions of a prompt run it once",
    "scoring": "old log-probabilities come from the loss itself",
    "groups": "groups with equal rewards run no backward",
    "head": "the head computes its logits once",
}


class Model(NamedTuple):
    """Sizes that decide the products of a model."""

    name: str
    vocabulary: int
    hidden: int
    body: int  # weights of the body's matrices that a token meets


MODELS = (
    Model("Qwen3-0.6B", 151_936, 1024, 440_401_920),
    Model("Qwen3-8B", 151_936, 4096, 6_945_767_424),
)


class Batch(NamedTuple):
    """Completions that one process generates together: lengths in tokens, and their rewards."""

    prompt: float  # mean
    longest_prompt: float
    completion: float  # mean
    longest: float  # the longest completion
    equal: float = 0.0  # share of the groups whose rewards are equal


class Training(NamedTuple):
    """How the completions are trained on, by TRL's arguments."""

    group: int = 8  # num_generations
    batch: int = 8  # per_device_train_batch_size
    micro_batches: int = 1  # steps_per_generation, by default gradient_accumulation_steps
    iterations: int = 1  # num_iterations
    lora: bool = False  # on the body alone: the head is frozen
    kl: bool = False  # beta > 0: every sequence has a gradient, and the reference runs too
    vllm: bool = False  # with its importance sampling correction

    @property
    def completions(self) -> int:
        """Number of completions that one process generates together."""
        return self.batch * self.micro_batches

    @property
    def distinct(self) -> float:
        """Number of distinct prompts among them."""
        return max(1.0, self.completions / self.group)

    def prompts(self, *, regroup: bool) -> float:
        """Prompts that one process computes: in each micro-batch, each distinct prompt once."""
        n, m = self.completions, self.batch
        group = min(self.group, n)  # a group may be divided over processes
        if regroup:
            return self.distinct * math.ceil(group / m)
        absent = math.comb(n - group, m) / math.comb(n, m)  # from a micro-batch, as TRL shuffles
        return self.micro_batches * self.distinct * (1 - absent)


def products(
    model: Model,
    batch: Batch,
    training: Training,
    saved: Sequence[str] = (),
    *,
    regroup: bool = True,
) -> float:
    """Multiply-adds of a generated batch, times two; stock TRL's if nothing is `saved`.

    Args:
        saved: names in `SAVINGS`.
        regroup: samples are regrouped by prompt; counts only if ``"prompts"`` are saved.
    """
    n = training.completions
    tokens = n * (batch.longest_prompt + batch.longest)
    if "padding" in saved:
        prompts = training.prompts(regroup=regroup) if "prompts" in saved else n
        tokens = prompts * batch.prompt + n * batch.completion
    live = 1.0 - batch.equal if "groups" in saved and not training.kl else 1.0
    scored = "scoring" not in saved and (training.vllm or training.iterations > 1)
    backward, gradients = (1, 2) if training.lora else (2, 4)
    again = 0 if "head" in saved else 2  # logits that the backward computes a second time
    steps, others = training.iterations, training.kl + scored  # others: forwards without gradient
    body = 2 * model.body * tokens * (steps * (1 + backward * live) + others)
    head = steps * (2 + (gradients + again) * live) + 2 * others
    return body + head * model.hidden * model.vocabulary * n * batch.completion


def gain(
    model: Model, batches: Sequence[Batch], training: Training, *, regroup: bool = True
) -> float:
    """Stock TRL's products over ours with all savings, without generation."""
    stock = sum(products(model, x, training) for x in batches)
    return stock / sum(products(model, x, training, [*SAVINGS], regroup=regroup) for x in batches)


def factors(model: Model, batches: Sequence[Batch], training: Training) -> dict[str, float]:
    """Gain of each saving on top of those before it; their product is `gain`."""
    names = [*SAVINGS]
    costs = [
        sum(products(model, x, training, names[:i]) for x in batches) for i in range(len(names) + 1)
    ]
    return {name: costs[i] / costs[i + 1] for i, name in enumerate(names)}


def whole(gained: float, generation: float) -> float:
    """Gain of the whole step, if generation takes a share of stock TRL's time."""
    return 1 / (generation + (1 - generation) / gained)


class Lengths(NamedTuple):
    """Log-normal lengths: their mean in tokens, and standard deviation over mean."""

    mean: float
    variation: float = 0.0

    def longest(self, count: float, most: float = math.inf) -> float:
        """Expected longest of `count` lengths, each cut at `most`."""
        sigma = math.sqrt(math.log1p(self.variation**2))
        if sigma == 0.0:
            return min(self.mean, most)
        normal, parts = NormalDist(math.log(self.mean) - sigma**2 / 2, sigma), 4096
        quantiles = (((i + 0.5) / parts) ** (1 / count) for i in range(parts))
        return fmean(min(math.exp(normal.inv_cdf(x)), most) for x in quantiles)


def batch_of(
    prompt: Lengths, completion: Lengths, training: Training, equal: float, most: float
) -> Batch:
    """A batch of these lengths; no completion is longer than `most`."""
    longest = completion.longest(training.completions, most)
    return Batch(prompt.mean, prompt.longest(training.distinct), completion.mean, longest, equal)


def batches_of_samples(
    rows: Sequence[dict[str, Any]], training: Training, equal: float, tokenizer: str | None
) -> list[Batch]:
    """Batches of consecutive rows with ``prompt``, ``completion`` and, in all or none, ``reward``.

    Rows that do not fill a batch are left out.
    """
    n, group = training.completions, training.group
    if len(rows) < n:
        raise ValueError(f"--samples: expected at least {n} completions, got {len(rows)}")
    names = ("prompt", "completion")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {*names} <= {*row}:
            raise ValueError(f"--samples, line {i}: expected an object with prompt and completion")
    found = {name: _counts(name, [row[name] for row in rows], tokenizer) for name in names}
    prompts, completions = found["prompt"], found["completion"]
    rewards = [row.get("reward") for row in rows]
    if None in rewards and any(x is not None for x in rewards):
        raise ValueError("--samples: expected a reward in every line or in none")
    batches = []
    for start in range(0, len(rows) - n + 1, n):
        of = slice(start, start + n)
        if rewards[0] is not None and n >= group:
            parts = [rewards[i : i + group] for i in range(start, start + n, group)]
            equal = fmean(len({*part}) == 1 for part in parts)
        mean, mean_prompt = fmean(completions[of]), fmean(prompts[of])
        batches.append(Batch(mean_prompt, max(prompts[of]), mean, max(completions[of]), equal))
    return batches


def _counts(name: str, values: Sequence[Any], tokenizer: str | None) -> list[int]:
    """The number of tokens of each value: an integer, a list of ids, or a text."""
    if any(isinstance(x, str) for x in values):
        if tokenizer is None:
            raise ValueError(f"--samples: {name} is text; expected --tokenizer too")
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).encode
        values = [encode(x, add_special_tokens=False) if isinstance(x, str) else x for x in values]
    counts = [len(x) if isinstance(x, list) else x for x in values]
    for i, x in enumerate(counts, 1):
        if type(x) is not int or x < 1:
            text = "expected a text, a list of ids, or a number of tokens of at least 1"
            raise ValueError(f"--samples, line {i}: {name}: {text}")
    return counts


def batches_of_log(
    state: dict[str, Any], prompt: Lengths | None, training: Training, processes: int | None
) -> list[Batch]:
    """Batches with the lengths and equal rewards that TRL has logged in ``trainer_state.json``.

    Without `prompt`, its mean comes from ``num_tokens``, the tokens of all processes so far.
    """
    name = "completions/mean_length"
    entries = [x for x in state.get("log_history", []) if name in x]
    if not entries:
        raise ValueError(f"--log: expected a trainer_state.json whose log_history has {name}")
    if prompt is None:
        if processes is None:
            text = "expected --prompt too, or --processes to compute it from num_tokens"
            raise ValueError(f"--log: {text}")
        last = entries[-1]
        generated = last["step"] / training.iterations * training.completions * processes
        mean = last["num_tokens"] / generated - fmean(x[name] for x in entries)
        if mean < 1:
            text = "expected the run's --batch, --accumulate, --iterations and --processes"
            raise ValueError(f"--log: {text}; with those given a prompt has {mean:.1f} tokens")
        prompt = Lengths(mean)
    longest_prompt = prompt.longest(
        training.completions / min(training.group, training.completions)
    )
    return [
        Batch(
            prompt.mean,
            longest_prompt,
            x[name],
            x["completions/max_length"],
            x["frac_reward_zero_std"],
        )
        for x in entries
    ]


def model_of(name: str) -> Model:
    """The model of `MODELS` with this name, or of a folder's or the Hub's ``config.json``.

    Code that comes with a model is not run.
    """
    for model in MODELS:
        if model.name.casefold() == name.rpartition("/")[2].casefold() and not Path(name).exists():
            return model
    try:
        from transformers import AutoConfig, AutoModel

        read = AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = read.get_text_config(decoder=True)
        with torch.device("meta"):
            below_the_head = AutoModel.from_config(config, trust_remote_code=False)
        tables = [x for x in below_the_head.modules() if isinstance(x, torch.nn.Embedding)]
        embeddings, body = {id(x.weight) for x in tables}, 0.0
        for path, x in below_the_head.named_parameters():
            if x.dim() > 1 and id(x) not in embeddings:
                body += x.numel() * (_chosen_experts(config) if ".experts." in path else 1)
        return Model(name, config.vocab_size, config.hidden_size, round(body))
    except Exception as error:  # the checks of a config may raise anything
        reason = (str(error).splitlines() or [""])[0]
        known = f"{', '.join(x.name for x in MODELS)}, or a model whose config.json can be read"
        raise ValueError(f"--model: expected {known}, got {name} ({reason})") from error


def _chosen_experts(config: Any) -> float:
    """Share of a layer's experts that a token meets."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    [experts] = {getattr(config, x) for x in names if getattr(config, x, None)}
    return config.num_experts_per_tok / experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels estimate``."""
    lengths = "mean[,variation]"
    known = ", ".join(x.name for x in MODELS)
    from_where = parser.add_argument_group("lengths, from one of these")
    add = from_where.add_argument
    add(
        "--completion",
        type=_lengths,
        metavar="MEAN[,CV]",
        help=f"{lengths}, as in 512,0.8: 512 tokens in the mean, and a standard deviation of 0.8 "
        "times that; 0 or none: all are equally long; lengths are taken to be log-normal",
    )
    add(
        "--samples",
        type=Path,
        metavar="JSONL",
        help="a file with one completion per line, a group on consecutive lines: "
        '{"prompt": ..., "completion": ..., "reward": ...}, each of the first two a number of '
        "tokens, a list of ids, or a text (with --tokenizer); rewards may be left out",
    )
    add(
        "--log",
        type=Path,
        metavar="JSON",
        help="trainer_state.json, which TRL saves in each checkpoint; needs --prompt, or "
        "--processes to compute the prompts' mean from num_tokens",
    )
    add("--prompt", type=_lengths, metavar="MEAN[,CV]", help="the same for prompts")
    add = parser.add_argument
    add("--max-completion", type=whole_number, help="max_completion_length; with --completion")
    add("--equal", type=_part, help="share of the groups with equal rewards; default: 0")
    add("--tokenizer", metavar="NAME", help="folder or Hub name of a tokenizer, for texts")
    add("--processes", type=whole_number, help="number of training processes; with --log alone")
    add(
        "--model",
        default="Qwen3-8B",
        metavar="NAME",
        help=f"{known}, or a folder or a name on the Hub with config.json; default: Qwen3-8B",
    )
    add("--lora", action="store_true", help="LoRA on the body; the head is frozen")
    add("--group", type=whole_number, default=8, help="num_generations; default: 8")
    add("--batch", type=whole_number, help="per_device_train_batch_size; default: 8, or the log's")
    add(
        "--accumulate",
        type=whole_number,
        default=1,
        help="gradient_accumulation_steps, as many as steps_per_generation; default: 1",
    )
    add("--iterations", type=whole_number, default=1, help="num_iterations; default: 1")
    add("--beta", type=float, default=0.0, help="coefficient of the KL term; default: 0")
    add("--vllm", action="store_true", help="vLLM generates, and TRL corrects for it")
    add(
        "--generation",
        type=share,
        default=0.5,
        help="share of stock TRL's step that generation takes; default: 0.5, an assumption",
    )
    add("--json", action="store_true", dest="as_json", help="one JSON object instead of text")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print what `options` describe would gain."""
    try:
        result = _computed(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.as_json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(_lines(result)))
    return 0


def _computed(options: argparse.Namespace) -> dict[str, Any]:
    """The result as it is printed with --json."""
    given = [options.completion, options.samples, options.log]
    if sum(x is not None for x in given) != 1:
        raise ValueError("expected one of --completion, --samples and --log")
    state = {} if options.log is None else _json("--log", options.log.read_text())
    training = Training(
        options.group,
        options.batch or state.get("train_batch_size") or 8,
        options.accumulate,
        options.iterations,
        options.lora,
        options.beta > 0,
        options.vllm,
    )
    n, group = training.completions, training.group
    if n % group and group % n:
        raise ValueError(
            "--batch x --accumulate: expected a multiple of --group, or a part of it that divides "
            f"it, got {n} completions and groups of {group}"
        )
    if options.samples is not None:
        texts = options.samples.read_text().splitlines()
        rows = [_json("--samples", line) for line in texts if line.strip()]
        batches = batches_of_samples(rows, training, options.equal or 0.0, options.tokenizer)
    elif options.log is not None:
        batches = batches_of_log(state, options.prompt, training, options.processes)
    else:
        if options.prompt is None:
            raise ValueError("--completion: expected --prompt too")
        most = options.max_completion or math.inf
        equal = options.equal or 0.0
        batches = [batch_of(options.prompt, options.completion, training, equal, most)]
    model = model_of(options.model)
    gained = gain(model, batches, training)
    scattered = gain(model, batches, training, regroup=False)
    longest = max(x.longest for x in batches)
    rows_of_head = round(training.batch * longest)
    masked = 1.0 - fmean(x.completion for x in batches) / longest
    size = Size(
        model.vocabulary,
        model.hidden,
        torch.bfloat16,
        rows_of_head,
        frozen=training.lora,
        masked=max(0.0, masked),
        on_gpu=True,
    )
    return {
        "note": f"{COMPUTED} {LEFT_OUT}",
        "model": model._asdict(),
        "training": training._asdict(),
        "lengths": {
            "batches": len(batches),
            **{
                name: fmean(getattr(x, name) for x in batches)
                for name in ("prompt", "longest_prompt", "completion", "longest", "equal")
            },
        },
        "factors": factors(model, batches, training),
        "gain": gained,
        "gain_without_regroup": scattered,
        "generation": options.generation,
        "gain_whole_step": whole(gained, options.generation),
        "gain_whole_step_without_regroup": whole(scattered, options.generation),
        "head_memory": {
            "rows": rows_of_head,
            "all_logits_mib": rows_of_head * model.vocabulary * 4 / MIB,
            "extra_mib": {x.name: x.extra / MIB for x in memory.estimate(size)},
        },
    }


def _lines(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    model, lengths = Model(**result["model"]), result["lengths"]
    training, head = Training(**result["training"]), result["head_memory"]
    options = [
        "LoRA" if training.lora else "all parameters",
        *(["a KL term"] if training.kl else []),
        *(["vLLM"] if training.vllm else []),
        *([f"{training.iterations} iterations"] if training.iterations > 1 else []),
    ]
    extra = ", ".join(f"{name} {x:,.0f}" for name, x in head["extra_mib"].items())
    lines = [
        result["note"],
        "",
        f"{model.name}: V {model.vocabulary:,}, H {model.hidden:,}, {model.body:,} weights in the "
        f"body; {', '.join(options)}",
        f"prompts of {lengths['prompt']:,.0f} tokens, the longest {lengths['longest_prompt']:,.0f};"
        f" completions of {lengths['completion']:,.0f}, the longest {lengths['longest']:,.0f}",
        f"groups of {training.group}, {lengths['equal']:.0%} of them with equal rewards; "
        f"{training.completions} completions generated together, {training.batch} per micro-batch",
        "",
        "gain of each saving on top of those above it",
        *(f"{x:6.2f}  {SAVINGS[name]}" for name, x in result["factors"].items()),
        "",
        "stock TRL's cost over ours",
        f"{result['gain']:6.2f}  without generation",
        f"{result['gain_whole_step']:6.2f}  whole step, if generation takes "
        f"{result['generation']:.0%} of stock TRL's",
    ]
    if result["gain"] > 1.005 * result["gain_without_regroup"]:
        lines += [
            f"{result['gain_without_regroup']:6.2f}  without generation, with regroup=False",
            f"{result['gain_whole_step_without_regroup']:6.2f}  whole step, with regroup=False",
        ]
    return [
        *lines,
        "",
        f"memory of the head beyond its gradients, {head['rows']:,} rows in bf16 on a GPU with "
        "room, MiB by engine:",
        f"  {extra}; all logits at once in fp32 {head['all_logits_mib']:,.0f}",
    ]


def _lengths(argument: str) -> Lengths:
    """Mean and variation as they are written: 512 or 512,0.8."""
    try:
        lengths = Lengths(*map(float, argument.split(",")))
        if not (1 <= lengths.mean <= 10**9 and 0 <= lengths.variation <= 100):
            raise ValueError
    except (TypeError, ValueError):
        text = "expected a mean of at least 1, and after a comma a variation of at least 0"
        raise argparse.ArgumentTypeError(f"{text}, got {argument}") from None
    return lengths


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: expected JSON, got {text[:40]!r} ({error})") from error


def _part(argument: str) -> float:
    """A number from 0 to 1."""
    if not 0.0 <= float(argument) <= 1.0:
        raise argparse.ArgumentTypeError(f"expected 0 to 1, got {argument}")
    return float(argument)
