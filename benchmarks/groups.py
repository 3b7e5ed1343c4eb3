"""Layouts of `causal_lm_loss` against each other: forward and backward of one group of completions.

A *group* has one prompt of P random tokens and G completions of C tokens, all of which have a
gradient. Speed is the time of the padded batch over that of the tree; the necessary work allows at
most the ratio of their multiplications::

    P tokens once, C tokens G times    for G (P + C) tokens
    P^2 / 2 + G (P C + C^2 / 2)        for G (P + C)^2 / 2 pairs of a query and a key

A *hybrid* has three layers of gated delta rule for each one of attention, as Qwen3.5. Nothing of
TRL is imported: a GPU's machine may lack it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from benchmarks.machine import Watch
from benchmarks.parity import TOLERANCE
from benchmarks.run import Results
from benchmarks.timing import order
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss

TREE, TRIM, PADDED = "tree", "trim", "padded"
CHUNK = 64  # tokens of a chunk of the gated delta rule
DRIFT = 0.1  # standard deviation of new against old log-probabilities; at 0 no loss would differ
ROUNDS = 5
LOSS = GRPOLoss(loss_type="dapo")


@dataclass(frozen=True)
class Size:
    """A model of Qwen3's kind, or a hybrid of Qwen3.5's."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    linear_dim: int = 0  # of a hybrid's linear heads, as many as `heads`; 0: no hybrid

    def model(self, longest: int, **options: Any) -> PreTrainedModel:
        """With random weights, the same each time, for sequences of at most `longest` tokens."""
        torch.manual_seed(0)
        fields: dict[str, Any] = {
            "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab, "max_position_embeddings": longest,
        }  # fmt: skip
        if self.linear_dim:
            for name in ("key", "value"):
                fields[f"linear_num_{name}_heads"] = self.heads
                fields[f"linear_{name}_head_dim"] = self.linear_dim
        config = Qwen3_5TextConfig(**fields) if self.linear_dim else Qwen3Config(**fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options).train()
        return model

    def work(self, tokens: float, pairs: float) -> float:
        wide, linear = self.heads * self.head_dim, self.heads * self.linear_dim
        attention = 2 * self.hidden * (wide + self.kv_heads * self.head_dim)
        mlp, of_attention = 3 * self.hidden * self.intermediate, self.layers
        recurrence = 0
        if linear:
            of_attention //= 4
            attention += self.hidden * wide  # the gate
            recurrence = 5 * self.hidden * linear + linear * (4 * CHUNK + 3 * self.linear_dim)
        of_token = self.layers * mlp + of_attention * attention
        of_token += (self.layers - of_attention) * recurrence
        return tokens * of_token + of_attention * 2 * pairs * wide


class Shape(NamedTuple):
    """Tokens of the prompt and of each completion, and the number of completions."""

    prompt: int
    completion: int
    group: int = 8

    @property
    def name(self) -> str:
        return f"P {self.prompt}, C {self.completion}, G {self.group}"

    def allowed(self, size: Size) -> float:
        """Speed of a tree that the necessary work allows."""
        p, c, g = self
        padded = size.work(g * (p + c), g * (p + c) ** 2 / 2)
        return padded / size.work(p + g * c, p**2 / 2 + g * (p * c + c**2 / 2))


SHAPES = (Shape(64, 256), Shape(256, 256), Shape(512, 512), Shape(1024, 256))
TOY_SIZE, TOY_SHAPES = Size(32, 64, 2, 2, 1, 16, 500), (Shape(12, 20, 4), Shape(24, 12, 4))
HYBRID = Size(hidden=512, intermediate=1536, linear_dim=128, head_dim=128)
TOY_HYBRID = Size(32, 64, 4, 2, 1, 16, 500, 16)
HYBRID_SHAPES = (*SHAPES, Shape(32, 32), Shape(256, 64), Shape(16, 256), Shape(256, 256, 2))


def group(model: PreTrainedModel, shape: Shape) -> dict[str, Tensor]:
    """Arguments of `causal_lm_loss` for one group; old log-probabilities are near `model`'s."""
    draw, vocab = torch.Generator().manual_seed(1), model.config.vocab_size
    prompt = torch.randint(vocab, (1, shape.prompt), generator=draw).expand(shape.group, -1)
    completions = torch.randint(vocab, (shape.group, shape.completion), generator=draw)
    noise = DRIFT * torch.randn(completions.shape, generator=draw).to(model.device)
    advantages = torch.randn(shape.group, generator=draw).to(model.device)
    ids = torch.cat([prompt, completions], dim=1).to(model.device)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found["completion_mask"] = torch.ones_like(ids[:, shape.prompt :])
    with torch.no_grad():
        logps = causal_lm_logps(model, **found, entropy=False).logps
    return {**found, "advantages": advantages, "old_per_token_logps": logps + noise}


def step(model: PreTrainedModel, inputs: dict[str, Tensor], layout: Any) -> Any:
    model.zero_grad()
    found = causal_lm_loss(model, LOSS, **inputs, zero_advantage="train", layout=layout)
    found.loss.backward()
    return found


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([x.grad.flatten().float() for x in model.parameters() if x.grad is not None])


def measure_groups(results: Results, *, toy: bool = False) -> None:
    """Write ``step.groups`` and ``step.hybrid_groups``: CPU seconds of the layouts for each shape,
    after each shape."""
    rounds = 1 if toy else ROUNDS
    _measure(results, "groups", TOY_SIZE if toy else Size(), TOY_SHAPES if toy else SHAPES, rounds)
    size, shapes = (TOY_HYBRID, TOY_SHAPES[1:]) if toy else (HYBRID, HYBRID_SHAPES)
    _measure(results, "hybrid_groups", size, shapes, rounds)


def _measure(results: Results, key: str, size: Size, shapes: Any, rounds: int) -> None:
    model = size.model(max(x.prompt + x.completion for x in shapes))
    kind = "hybrid like Qwen3.5" if size.linear_dim else "Qwen3-like model"
    about = f"{kind} with V {size.vocab}, H {size.hidden}, {size.layers} layers, fp32; "
    about += "one group, equal lengths, all sequences with gradient"
    watch = Watch()
    results.merge("step", key, about=about, rounds=rounds)
    for shape in shapes:
        path = ("step", key, "shapes", shape.name)
        with results.noting(*path):
            results.merge(*path, **_measured(model, size, shape, rounds))
    results.merge("step", key, cpu_of_others=watch.others())


def _measured(model: PreTrainedModel, size: Size, shape: Shape, rounds: int) -> dict[str, Any]:
    inputs, found, gradients = group(model, shape), {}, {}
    layouts = (PADDED, TRIM, TREE) if size.linear_dim else (PADDED, TREE)
    for layout in layouts:  # which warms up, too
        found[layout], gradients[layout] = step(model, inputs, layout), gradient(model)
    samples: dict[str, list[float]] = {layout: [] for layout in layouts}
    for i in range(rounds):
        for layout in order([*samples], i):
            started = time.process_time()
            step(model, inputs, layout)
            samples[layout].append(time.process_time() - started)
    seconds = {layout: statistics.median(x) for layout, x in samples.items()}
    speed, allowed = seconds[PADDED] / seconds[TREE], shape.allowed(size)
    loss = abs(found[TREE].loss - found[PADDED].loss).item()
    apart = ((gradients[TREE] - gradients[PADDED]).norm() / gradients[PADDED].norm()).item()
    return {
        "status": "ok" if max(loss, apart) <= TOLERANCE else "wrong", "seconds": seconds,
        "samples": samples, "speed": speed, "allowed": allowed, "reached": speed / allowed,
        "computed": found[TREE].metrics["tokens/computed"].item(),
        "differences": {"loss": loss, "gradient": apart},
    }  # fmt: skip
