"""Shared by the examples: a small Qwen3 model, a tokenizer, and sums with checkable answers.

The prompt is a sum of digits ("3+4+5="). The completion is its working, "7+5=12": the first two
terms added, then the next. Everything is built here, and nothing is downloaded. The warm start
teaches the working from *noisy* demonstrations. The model then knows the format, and gets a sum
wrong about as often as the demonstrations do. GRPO has to improve on that.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Problem:
    """One sum: `prompt` "3+4+5=", `working` "7+5=12", `answer` 12."""

    prompt: str
    working: str
    answer: int


@dataclass(frozen=True)
class Rollout:
    """Sampled completions; row i belongs to problem i // num_generations."""

    prompt_ids: Tensor  # (B, P)
    completion_ids: Tensor  # (B, T), padded on the right
    completion_mask: Tensor  # (B, T) int64, 1 up to and including the first end-of-sequence token
    problems: list[Problem]  # length B
    texts: list[str]  # length B, the completions without special tokens
    scores: Tensor  # (B, T, V), the sampler's logits, -inf where it cuts


def build_tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """A character tokenizer; entries beyond the task's characters are unused, as reserved entries
    are in real ones."""
    used = [PAD, EOS, *CHARACTERS]
    entries = used + [f"<unused_{i}>" for i in range(vocab_size - len(used))]
    tokenizer = Tokenizer(models.WordLevel({x: i for i, x in enumerate(entries)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int = 64, layers: int = 2, seed: int = 0
) -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 causal language model in fp32 with an untied head."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def make_problem(terms: Sequence[int]) -> Problem:
    """The problem of adding `terms` (digits), with the working a perfect model would write."""
    if len(terms) not in (2, 3):
        raise ValueError(f"terms: expected 2 or 3 digits, got {len(terms)}")
    prompt = "+".join(map(str, terms)) + "="
    carried = [f"{sum(terms[:i])}+{terms[i]}=" for i in range(2, len(terms))]
    working = "".join(carried) + str(sum(terms))
    return Problem(prompt, working, sum(terms))


def all_problems(largest: int = 9) -> list[Problem]:
    """Every sum of three digits up to `largest`, shuffled."""
    digits = list(itertools.product(range(largest + 1), repeat=3))
    random.Random(0).shuffle(digits)
    return [make_problem(row) for row in digits]


def final_answer(text: str) -> int | None:
    """The number after the last "=" of a completion; None where there is none."""
    number = text.rsplit("=", 1)[-1]
    return int(number) if number.isdigit() else None


def noisy_working(problem: Problem, noise: float, generator: random.Random) -> str:
    """The working, where each sum is off by up to 3 with probability `noise` (errors are carried
    on, as people do)."""

    def slip() -> int:
        return generator.choice((-3, -2, -1, 1, 2, 3)) if generator.random() < noise else 0

    terms = [int(term) for term in problem.prompt[:-1].split("+")]
    total = max(terms[0] + terms[1] + slip(), 0)
    if len(terms) == 2:
        return str(total)
    return f"{total}+{terms[2]}={max(total + terms[2] + slip(), 0)}"


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Token ids (B, P) of texts of one length (as all prompts of the task with the same number of
    terms are)."""
    return torch.tensor(tokenizer(list(texts), add_special_tokens=False)["input_ids"])


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    steps: int,
    noise: float,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> None:
    """Supervised learning on noisy workings, in place: the format is learnt, the sums are right
    some of the time."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    prompt_length = len(problems[0].prompt)
    model.train()
    for _ in range(steps):
        batch = generator.choices(problems, k=batch_size)
        workings = [noisy_working(problem, noise, generator) for problem in batch]
        longest = max(map(len, workings))
        pairs = zip(batch, workings, strict=True)
        texts = [p.prompt + w + EOS + PAD * (longest - len(w)) for p, w in pairs]
        ids = encode(tokenizer, texts)
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)[:, prompt_length:]
        logits = model(input_ids=ids).logits[:, prompt_length - 1 : -1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        take_step(optimizer, loss)
        schedule.step()


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    num_generations: int = 1,
    **how: Any,
) -> Rollout:
    """Sample `num_generations` completions per problem at temperature 1, from the whole
    distribution if `how`, options of ``generate``, says nothing else."""
    repeated = [problem for problem in problems for _ in range(num_generations)]
    prompt_ids = encode(tokenizer, [problem.prompt for problem in repeated])
    training = model.training
    model.eval()
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}
    found = model.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=8,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    model.train(training)
    ids = found.sequences[:, prompt_ids.shape[1] :]
    is_eos = ids == tokenizer.eos_token_id
    mask = (is_eos.cumsum(1) - is_eos.long() == 0).long()
    shown = ids.where(mask.bool(), tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(shown, skip_special_tokens=True)
    return Rollout(prompt_ids, ids, mask, repeated, texts, torch.stack(found.scores, dim=1))


def warm_model() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[Problem]]:
    """Where the short examples start, in a few seconds: (model, tokenizer, problems)."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    problems = all_problems(largest=3)
    print("warm start: 150 supervised steps, in which a small model learns to write sums")
    how = {"steps": 150, "noise": 0.3, "batch_size": 32, "learning_rate": 5e-3}
    warm_start(model, tokenizer, problems, **how)
    return model, tokenizer, problems


def hidden_states(model: Qwen3ForCausalLM, rollout: Rollout) -> Tensor:
    """The states that predict the completion: (B, T, H), aligned with `completion_ids`. The head is
    not run."""
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    real = torch.cat([torch.ones_like(rollout.prompt_ids), rollout.completion_mask], dim=1)
    states = model.model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
    return states[:, rollout.prompt_ids.shape[1] - 1 : -1]


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimizer step down the gradient of `loss`."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accuracy(rollout: Rollout) -> Tensor:
    """1.0 where the final answer is right, else 0.0: (B,)."""
    pairs = zip(rollout.texts, rollout.problems, strict=True)
    return torch.tensor([float(final_answer(text) == problem.answer) for text, problem in pairs])


def evaluate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    seed: int = 0,
) -> float:
    """Share of right answers, sampled at temperature 1 with a fixed seed; the global random state
    is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return accuracy(sample(model, tokenizer, problems)).mean().item()
