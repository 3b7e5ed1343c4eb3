"""The stored cases: small calls through public names, with inputs that the case's name decides.

Run as a script, this file computes every case with the `grpo_kernels` on the path and writes the
results: ``python tests/stored/cases.py OUT.npz``. It imports nothing else of this repository, so
that it runs on any commit. Hidden states and heads are small multiples of 1/16, whose products are
exact in any order.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import Head, KeptIds, LoRA, LossConfig, Run

B, T, N = 3, 4, 12
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask")
ENGINES = ("auto", "one_pass", "two_pass", "lean", "frozen")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)

Results = dict[str, Any]  # name -> tensor or text


def loss_config(**fields: Any) -> LossConfig:
    """A loss, where "dr_grpo" divides by 512 unless told otherwise."""
    return LossConfig(**{"max_completion_length": 512, **fields})


class Draw(random.Random):
    """Random numbers that are the same on every machine: uniform ones of Python, four added."""

    def sometimes(self, p: float, value: Any, other: Any = None) -> Any:
        return value if self.random() < p else other

    def normal(
        self, *shape: int, scale: float = 1.0, step: float | None = None, dtype: Any = torch.float32
    ) -> Tensor:
        values = [sum(self.random() for _ in range(4)) - 2 for _ in range(math.prod(shape))]
        x = torch.tensor(values, dtype=torch.float64).reshape(shape) * (3**0.5 * scale)
        return (x if step is None else (x / step).round() * step).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.tensor([self.randrange(high) for _ in range(math.prod(shape))]).reshape(shape)

    def mask(self) -> Tensor:
        """(B, T): ragged, with holes, with a row of zeros, all or nothing."""
        common = ("ragged", "holes", "empty_row", "full")
        kind = self.choice((*common, *common, *common, "none"))
        lengths = torch.tensor([self.randint(1, T) for _ in range(B)])
        mask = (torch.arange(T) < lengths[:, None]).long()
        if kind == "holes":
            mask = mask * self.integers(3, B, T).ne(0)
        if kind == "empty_row":
            mask[self.randrange(B)] = 0
        return {"full": torch.ones_like(mask), "none": torch.zeros_like(mask)}.get(kind, mask)


class Calls:
    """A head, hidden states and ids, drawn; and what a call with them gives."""

    def __init__(
        self,
        d: Draw,
        *,
        backend: str | None = None,
        dtype: Any = None,
        plain: bool = False,
        mixed: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **run: Any,
    ) -> None:
        """`plain`: a weight alone, in fewer combinations; `mixed`: each tensor has a dtype of its
        own; `around` makes the call's context; `run`: fields of `Run`."""
        self.d, self.around = d, around
        self.dtype = d.choice(DTYPES) if dtype is None else dtype
        self.h, rows = d.choice((3, 5, 8)), d.choice((7, 11, 19, 24, 40))
        self.constants = {} if plain else drawn_constants(d)
        if not plain and d.random() < 0.1:
            self.constants["vocab_size"] = rows - 3
        self.v = self.constants.get("vocab_size", rows)
        self.mask, self.ids = d.mask(), d.integers(self.v, B, T)
        spread = d.choice((0.3, 1.0, 1.0, 3.0))
        leaves = {"hidden": d.normal(B, T, self.h, step=1 / 16, dtype=self.dtype)}
        leaves["weight"] = d.normal(rows, self.h, scale=spread, step=1 / 16, dtype=self.dtype)
        frozen: tuple[str, ...] = ()
        self.scaling = 1.0
        if not plain:
            if d.random() < 0.3:
                leaves["bias"] = d.normal(rows, step=1 / 16, dtype=self.dtype)
            if d.random() < 0.2:
                self.scaling = d.choice((0.5, 2.0))
                leaves["lora_a"] = d.normal(2, self.h, step=1 / 4, dtype=self.dtype)
                leaves["lora_b"] = d.normal(rows, 2, step=1 / 4, dtype=self.dtype)
                if d.random() < 0.3:
                    leaves["lora_input"] = d.normal(B, T, self.h, step=1 / 16, dtype=self.dtype)
            frozen = d.choice(((), (), (), ("weight", "bias"), ("hidden",), ("bias",), HEAD))
        if mixed:
            leaves = {k: x.to(d.choice((torch.float32, torch.bfloat16))) for k, x in leaves.items()}
        run = {"backend": backend or d.choice(("torch", "cpp")), "engine": d.choice(ENGINES)} | run
        run.setdefault("workspace_bytes", d.choice((None, None, 4 * self.v, 20 * self.v, 200)))
        if run["engine"] == "frozen" and not plain:
            frozen = HEAD
        self.run = run
        self.leaves = {k: x.requires_grad_(k not in frozen) for k, x in leaves.items()}
        lora = None
        if "lora_a" in leaves:
            lora = LoRA(leaves["lora_a"], leaves["lora_b"], self.scaling, leaves.get("lora_input"))
        self.hidden = leaves["hidden"]
        self.head: Any = Head(leaves["weight"], leaves.get("bias"), lora, **self.constants)
        if plain and d.random() < 0.5:
            self.head = leaves["weight"]

    def logps(self, temperature: float = 1.0, kept: Any = None) -> Tensor:
        """Log-probabilities of the ids, on a grid far coarser than rounding; 0 in a set of one."""
        x = {k: y.detach().double() for k, y in self.leaves.items()}
        z = x["hidden"] @ x["weight"].T + x.get("bias", torch.zeros(1, dtype=torch.float64))
        if "lora_a" in x:
            z = z + self.scaling * x.get("lora_input", x["hidden"]) @ x["lora_a"].T @ x["lora_b"].T
        z = z * self.constants.get("logit_scale", 1.0)
        cap = self.constants.get("final_logit_softcapping")
        z = z if cap is None else cap * torch.tanh(z / cap)
        z = z[..., : self.v]
        if kept is not None:
            rows = kept.ids.view(B, T, -1) if isinstance(kept, KeptIds) else kept
            inside = torch.zeros(*z.shape[:-1], self.v + 1).scatter(-1, rows + 1, 1.0)[..., 1:] != 0
            whole = ~inside.gather(-1, self.ids[..., None])
            z = z.masked_fill(~inside & ~whole, -math.inf)
        logps = (z / temperature).log_softmax(-1).gather(-1, self.ids[..., None])[..., 0]
        return (logps * 2**10).round() / 2**10

    def kept(self, on_missing_set: str) -> Any:
        """Sets of up to six ids, padded with -1, that hold the sampled one unless they need not."""
        d, width = self.d, min(6, self.v)
        rows = torch.full((B, T, width), -1)
        for row, own in zip(rows.view(-1, width), self.ids.flatten().tolist(), strict=True):
            chosen = d.sample(range(self.v), d.randint(1, width))
            if on_missing_set == "error" and own not in chosen:
                chosen[0] = own
            if on_missing_set == "full" and d.random() < 0.3:
                chosen = []
            row[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        return KeptIds.from_padded(rows) if d.random() < 0.5 else rows

    def call(self, function: Callable[..., Any]) -> Results:
        """`function` of a `Run`, with "auto" where its engine refuses; and the gradients."""
        text = {}
        with self.around():
            try:
                out = function(Run(**self.run))
            except ValueError as error:
                if not str(error).startswith("engine:"):
                    raise
                text["refused"] = self.run["engine"]
                out = function(Run(**self.run | {"engine": "auto"}))
        results = text | read(out)
        total = self.upstream(out)
        if total is not None and total.requires_grad:
            total.backward()
        return results | {f"d_{k}": x.grad for k, x in self.leaves.items() if x.grad is not None}

    def score(self, **given: Any) -> Results:
        score = partial(grpo_kernels.linear_logps, self.hidden, self.head, self.ids, **given)
        return self.call(lambda run: score(run=run))

    def upstream(self, out: Any) -> Tensor | None:
        """What is differentiated: the loss, or all scores under any upstream gradient."""
        if hasattr(out, "loss"):
            return out.loss * self.d.choice((1.0, 1.0, -0.75))
        some = self.d.random() < 0.3
        total = None
        for name in ("logps", "entropies", "divergence"):
            x = getattr(out, name)
            if x is not None:
                upstream = self.d.normal(*x.shape, dtype=x.dtype)
                if some:
                    upstream = upstream * self.d.integers(2, *x.shape)
                term = (x * upstream).sum()
                total = term if total is None else total + term
        return total


HEAD = ("weight", "bias", "lora_a", "lora_b")


def drawn_constants(d: Draw) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    if d.random() < 0.25:
        constants["final_logit_softcapping"] = d.choice((1.0, 5.0, 30.0))
    if d.random() < 0.25:
        constants["logit_scale"] = d.choice((-0.5, 0.25, 2.0))
    if d.random() < 0.15:
        constants["logits_dtype"] = "input"
    return constants


def read(out: Any) -> Results:
    if hasattr(out, "metrics") and hasattr(out, "loss"):
        results = {"loss": out.loss.detach(), "logps": out.logps}
        results |= {name: getattr(out, name) for name in ("entropies", "engine", "backend")}
        results |= {f"metric {name}": x for name, x in out.metrics.items()}
        counts = {f"count {name}": count for name, (_, count) in out.metrics.pairs.items()}
        return results | counts
    names = ("logps", "entropies", "divergence", "log_sum_sq_probs", "mean_logits", "is_top1")
    given = {name: getattr(out, name) for name in (*names, "student_mass")}
    return {name: x.detach() for name, x in given.items() if x is not None}


def loss_fields(d: Draw) -> dict[str, Any]:
    kind = d.choice(LOSS_TYPES)
    fields: dict[str, Any] = {
        "loss_type": kind,
        "epsilon": d.choice((0.0, 0.1, 0.2, 0.4)),
        "epsilon_high": d.choice((None, 0.28, 1.5)),
        "beta": d.sometimes(0.5, d.choice((0.01, 0.2)), 0.0),
        "use_bias_correction_kl": d.random() < 0.6,
        "kl_estimator": d.choice(("k1", "k2", "k3", "k3", "full")),
        "temperature": d.sometimes(0.3, d.choice((0.5, 0.9, 1.7)), 1.0),
        "top_entropy_quantile": d.sometimes(0.15, d.choice((0.2, 0.5, 0.8)), 1.0),
        "max_completion_length": d.choice((1, 33, 512)),
    }
    if kind == "sapo" and d.random() < 0.5:
        fields |= {"sapo_temperature_pos": 0.6, "sapo_temperature_neg": 2.3}
    if kind == "vespo" and d.random() < 0.5:
        fields |= {"vespo_k_pos": 1.3, "vespo_lambda_pos": 0.7}
        fields |= {"vespo_k_neg": 0.4, "vespo_lambda_neg": 2.2}
    if kind == "gmpo":
        return fields
    fields["importance_sampling_level"] = d.choice(("token", "sequence"))
    fields["entropy_coef"] = d.sometimes(0.3, d.choice((-0.01, 0.05, 1.0)), 0.0)
    fields["off_policy_mask_threshold"] = d.sometimes(0.2, d.choice((0.0, 0.1, 0.4)))
    if kind not in ("cispo", "sapo", "vespo"):
        fields["delta"] = d.sometimes(0.25, d.choice((1.05, 1.5, 4.0)))
    if d.random() < 0.25:
        fields |= {"vllm_importance_sampling_correction": True}
        fields["vllm_importance_sampling_mode"] = d.choice(MODES)
        fields["vllm_importance_sampling_clip_max"] = d.choice((1.2, 2.0, 3.0))
        fields["vllm_importance_sampling_clip_min"] = d.choice((None, 0.5))
    return fields


def loss_inputs(
    d: Draw, logps: Tensor, mask: Tensor, config: LossConfig, old: bool | None = None
) -> dict[str, Any]:
    """Arguments of a loss beside hidden states, head and ids; often garbage where masked. `old`: to
    be off-policy or not."""
    kind = torch.float64 if d.random() < 0.2 else torch.float32
    inputs: dict[str, Any] = {}

    def near(x: Tensor, each: float, row: float = 0.0) -> Tensor:
        moved = x + d.normal(B, T, scale=each) + d.normal(B, 1, scale=row)
        return torch.where(logps == 0, 0.0, moved.clamp(max=-(2.0**-10)))

    before = near(logps, 0.25, 0.25)
    drawn = d.random() < 0.7
    if drawn if old is None else old:
        inputs["old_per_token_logps"] = before.to(kind)
    unused = d.random() < 0.1 and not config.beta
    if unused or (config.beta and config.kl_estimator != "full"):
        inputs["ref_per_token_logps"] = near(logps, 0.5).to(kind)
    if config.vllm_importance_sampling_correction or d.random() < 0.2:
        inputs["sampling_per_token_logps"] = near(before, 0.3).to(kind)
        if d.random() < 0.2:
            inputs["sampling_per_token_logps"][0, 0] = math.nan
    corrects = config.vllm_importance_sampling_correction
    if d.random() < 0.3 and config.loss_type != "gmpo" and not corrects:
        shape = d.choice(((B, T), (B, T), (B, 1), (B,)))
        ratio = 1.0 + d.normal(*shape, scale=0.3, step=1 / 64).clamp(-0.9, 2.0)
        inputs["importance_sampling_ratio"] = torch.where(ratio > 1.3, 0.0, ratio).to(kind)
    if d.random() < 0.3:
        inputs["num_items_in_batch"] = d.choice((0.0, 3.0, 50.5, torch.tensor(7)))
    per_token = config.loss_type != "gmpo" and d.random() < 0.3
    advantages = d.normal(B, T) if per_token else d.normal(B)
    zero = d.choice(("none",) * 5 + ("some",) * 4 + ("all",))
    if zero == "all":
        advantages = torch.zeros_like(advantages)
    if zero == "some":
        advantages[d.randrange(B)] = 0.0
    inputs["advantages"] = advantages
    if d.random() < 0.4:
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x.shape == mask.shape:
                inputs[name] = x.masked_fill(mask == 0, d.choice(GARBAGE))
    return inputs


def packed(x: Any) -> Any:
    """Tensors of a padded batch (B, T, ...) as those of a packed one (B * T, ...)."""
    return x.flatten(0, 1) if isinstance(x, Tensor) and x.shape[:2] == (B, T) else x


def packed_call(d: Draw, tokens: list[Any], inputs: dict[str, Any]) -> tuple[list[Any], Any]:
    inputs = {name: packed(x) for name, x in inputs.items()} | {"cu_seqlens": bounds(d)}
    ratio = inputs.get("importance_sampling_ratio")
    if ratio is not None and ratio.shape != (N,):
        del inputs["importance_sampling_ratio"]
    return [packed(x) for x in tokens], inputs


def bounds(d: Draw) -> Tensor:
    kind = d.choice((torch.int32, torch.int64))
    return torch.tensor([0, *sorted(d.randrange(N + 1) for _ in range(B - 1)), N], dtype=kind)


def masked_as(d: Draw, mask: Tensor) -> Tensor | None:
    """The mask in any dtype; None where it is full, at times."""
    if bool(mask.all()) and d.random() < 0.5:
        return None
    return mask.to(d.choice((torch.int64, torch.bool, torch.float32, torch.uint8)))


def loss_case(
    d: Draw,
    *,
    fields: dict[str, Any] | None = None,
    config: LossConfig | None = None,
    kept: bool | None = None,
    old: bool | None = None,
    **options: Any,
) -> Results:
    """One `grpo_loss`, with anything not given drawn."""
    c = Calls(d, **options)
    if config is None:
        config = loss_config(**(loss_fields(d) if fields is None else fields))
    full = config.beta and config.kl_estimator == "full"
    sets: dict[str, Any] = {}
    if not full and (d.random() < 0.1 if kept is None else kept):
        sets["on_missing_set"] = d.choice(("error", "full"))
        sets["kept_ids"] = c.kept(sets["on_missing_set"])
    logps = c.logps(config.temperature, sets.get("kept_ids"))
    inputs = loss_inputs(d, logps, c.mask, config, old)
    tokens = [c.hidden, c.head, c.ids, masked_as(d, c.mask), inputs.pop("advantages")]
    if full:
        h = d.choice((2, c.h))
        other = Head(d.normal(c.v, h, step=1 / 16, dtype=c.dtype), **drawn_constants(d))
        inputs["reference"] = d.normal(B, T, h, step=1 / 16, dtype=c.dtype), other
    elif sets:
        inputs |= sets
        c.run["workspace_bytes"] = None
    elif d.random() < 0.15 and "lora_input" not in c.leaves:
        tokens, inputs = packed_call(d, tokens, inputs)
    loss = partial(grpo_kernels.grpo_loss, *tokens, **inputs, config=config)
    return c.call(lambda run: loss(run=run))


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def temperature_of(d: Draw) -> Any:
    if d.random() < 0.3:
        return 0.5 + d.integers(8, B, T) / 8
    return d.choice((1.0, 1.0, 0.7, 1.6))


def scored_with(d: Draw, c: Calls) -> dict[str, Any]:
    return {"completion_mask": masked_as(d, c.mask), "temperature": temperature_of(d)}


def logprob_case(d: Draw, **options: Any) -> Results:
    c = Calls(d, **options)
    given = scored_with(d, c)
    given["entropy"] = d.random() < 0.7
    if d.random() < 0.2:
        on_missing_set = d.choice(("error", "full"))
        given |= {"kept_ids": c.kept(on_missing_set), "on_missing_set": on_missing_set}
        given["entropy"] = d.choice((True, False, "full"))
        c.run["workspace_bytes"] = None
    elif d.random() < 0.4:
        extras = ("log_sum_sq_probs", "mean_logits", "is_top1")
        given["extras"] = tuple(x for x in extras if d.random() < 0.6)
    if d.random() < 0.5:
        a = d.normal(B, T) * d.integers(3, B, T).ne(0)
        b = d.normal(B, T) if given["entropy"] is True else None
        rows = a.flatten(), None if b is None else b.flatten()

        def coefficients(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Any:
            return rows[0][index] * logps, None if rows[1] is None else rows[1][index]

        live = d.integers(3, B, T).ne(0)
        given["expected"] = d.choice((a, (a, b), grpo_kernels.Expectation(coefficients, live)))
    return c.score(**given)


def divergence_case(d: Draw, **options: Any) -> Results:
    c = Calls(d, **options)
    h, rows = d.choice((2, c.h)), c.v + d.choice((0, 0, 0, 3))
    teacher = Head(
        d.normal(rows, h, step=1 / 16, dtype=c.dtype),
        d.sometimes(0.3, d.normal(rows, step=1 / 16, dtype=c.dtype)),
        **drawn_constants(d),
    )
    given = scored_with(d, c)
    given["divergence"] = d.choice(("reverse_kl", "forward_kl", "jsd"))
    if given["divergence"] == "jsd":
        given["beta"] = d.choice((None, 0.0, 0.1, 0.5, 0.9, 1.0))
    given["entropy"] = d.random() < 0.4
    if d.random() < 0.4:
        given["completion_ids"] = c.ids
    if d.random() < 0.3:
        expected = d.normal(B, T)
        given["expected"] = (expected, d.normal(B, T)) if "completion_ids" in given else expected
    hidden = d.normal(B, T, h, step=1 / 16, dtype=c.dtype)
    call = grpo_kernels.linear_divergence
    return c.call(lambda run: call(c.hidden, c.head, (hidden, teacher), run=run, **given))


def top_k_case(d: Draw, **options: Any) -> Results:
    c = Calls(d, **options)
    k = d.choice((1, 3, 4))
    rows = [d.sample(range(c.v), k) for _ in range(N)]
    listed = torch.tensor(rows).view(B, T, k).masked_fill(d.integers(5, B, T, k) == 0, -1)
    raw = d.normal(B, T, k + 1, dtype=torch.float64).log_softmax(-1)[..., :k]
    logps = ((raw * 2**10).round() / 2**10).float()
    given = scored_with(d, c)
    given["divergence"] = d.choice(("forward_kl", "reverse_kl"))
    if given["divergence"] == "forward_kl":
        given["tail"] = d.choice((None, True, False))
        if given["tail"] is not True:
            given["log_prob_min_clamp"] = d.choice((None, -3.0))
    given["loss_max_clamp"] = d.choice((None, None, 0.5))
    given["expected"] = d.sometimes(0.3, d.normal(B, T))
    call = grpo_kernels.topk_divergence
    return c.call(lambda run: call(c.hidden, c.head, listed, logps, run=run, **given))


def every_field(config: LossConfig) -> str:
    values = (f"{x.name}={getattr(config, x.name)!r}" for x in fields(config))
    return f"LossConfig({', '.join(values)})"


PRESETS = (
    "CISPO", "DAPO", "DR_GRPO", "GMPO", "GRPO", "GSPO", "ICEPOP", "LUSPO", "MIS", "OPSM", "PPO",
    "REINFORCE", "RLOO", "SAPO", "TIS", "VESPO",
)  # fmt: skip


def preset_case(d: Draw, name: str, **options: Any) -> Results:
    config = replace(getattr(grpo_kernels.presets, name), max_completion_length=512)
    return loss_case(d, config=config, **options) | {"config": every_field(config)}


def default_case(d: Draw) -> Results:
    return {"config": every_field(loss_config())}


def exact_kl(d: Draw, **options: Any) -> Results:
    return loss_case(d, fields=loss_fields(d) | {"beta": 0.2, "kl_estimator": "full"}, **options)


def cases() -> Iterator[tuple[str, Callable[[Draw], Results]]]:
    """Every case: a name, whose first word is its group, and the function that computes it."""
    yield "config/default", default_case
    for kind, level, old, engine, backend in product(
        LOSS_TYPES, ("token", "sequence"), (False, True), ENGINES[1:], ("torch", "cpp")
    ):
        if kind == "gmpo" and level == "sequence":
            continue
        policy = "off-policy" if old else "on-policy"
        fields = {"loss_type": kind, "importance_sampling_level": level, "epsilon_high": 0.28}
        options: dict[str, Any] = {"engine": engine, "backend": backend, "plain": True}
        options |= {"kept": False, "old": old, "dtype": torch.float32}
        name = f"types/{kind}/{level}/{policy}/{engine}/{backend}"
        yield name, partial(loss_case, fields=fields, **options)
    numbered: dict[str, tuple[int, Callable[[Draw], Results]]] = {
        "loss": (1200, loss_case),
        "exact-kl": (200, exact_kl),
        "kept": (100, partial(loss_case, kept=True)),
        "no-grad": (40, partial(loss_case, around=torch.no_grad)),
        "no-grad-logprob": (30, partial(logprob_case, around=torch.no_grad)),
        "mixed": (60, partial(loss_case, mixed=True)),
        "mixed-logprob": (40, partial(logprob_case, mixed=True)),
        "autocast": (40, partial(loss_case, around=autocast)),
        "logprob": (500, logprob_case),
        "divergence": (400, divergence_case),
        "top-k": (250, top_k_case),
    }
    for group, (count, function) in numbered.items():
        for i in range(count):
            yield f"{group}/{i}", function
    for name in PRESETS:
        for i in range(4):
            yield f"presets/{name}/{i}", partial(preset_case, name=name, dtype=torch.float32)


def interpreted_cases() -> Iterator[tuple[str, Callable[[Draw], Results]]]:
    options = {"backend": "triton", "dtype": torch.float32}
    numbered = {"loss": (30, loss_case), "exact-kl": (8, exact_kl), "logprob": (14, logprob_case)}
    numbered |= {"divergence": (12, divergence_case), "top-k": (6, top_k_case)}
    for group, (count, function) in numbered.items():
        for i in range(count):
            yield f"triton-{group}/{i}", partial(function, **options)


def compute(groups: list[str]) -> dict[str, Results]:
    """The results of all cases, or of some groups; in Triton's interpreter, of its cases."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for name, function in interpreted_cases() if "TRITON_INTERPRET" in os.environ else cases():
        if groups and name.split("/")[0] not in groups:
            continue
        try:
            found[name] = function(Draw(name))
        except Exception as error:
            found[name] = {"raises": type(error).__name__}
    return found


_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def write(path: Path, found: dict[str, Results]) -> None:
    """Write results compactly: an index, and the bytes of all numbers of a dtype, byte by byte."""
    index: dict[str, dict[str, Any]] = {}
    numbers: dict[str, list[Any]] = {}
    for case, results in found.items():
        index[case] = {}
        for name, x in results.items():
            if isinstance(x, str):
                index[case][name] = x
                continue
            x = torch.as_tensor(x).detach().contiguous()
            kind = str(x.dtype).removeprefix("torch.")
            index[case][name] = [kind, list(x.shape)]
            flat = x.view(_BITS[x.dtype]) if x.dtype in _BITS else x
            numbers.setdefault(kind, []).append(flat.numpy().reshape(-1))
    planes = {}
    for kind, parts in numbers.items():
        joined = np.concatenate(parts)
        planes[kind] = joined.view(np.uint8).reshape(len(joined), -1).T
    about = {"torch": torch.__version__.split("+")[0], "numpy": np.__version__, "cases": index}
    text = np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8)
    np.savez_compressed(path, index=text, **planes)


if __name__ == "__main__":
    write(Path(sys.argv[1]), compute(sys.argv[2:]))
