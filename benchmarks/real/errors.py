"""Gradients of one batch of the real model against float64: TRL's loss, stock and with our head and
training step.

The oracle is TRL's loss on log-probabilities of all logits of the model in float64. Old
log-probabilities are disturbed, so that ratios differ from 1; in bf16 in several draws, since most
of the error comes from a few tokens whose ratio falls on the other side of its clip bound.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from benchmarks import parity, step
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, STOCK
from benchmarks.real.train import VARIANTS, config, is_right, training_problems
from benchmarks.run import Results

DRIFT = 0.1  # standard deviation of old against new log-probabilities
DRAWS = {"bf16": 4}  # of the disturbance; else 1
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
KL = {"loss_type": "grpo", "beta": 0.04}
OURS = [name for name in VARIANTS if name not in (STOCK, DEFAULTS, ALL_OPTIONS)]


class Exact:
    """In front of TRL's trainer: log-probabilities of all logits, in the model's precision."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any,
        **__: Any,
    ) -> Any:  # fmt: skip
        z = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        log_probs = (z[:, -logits_to_keep - 1 : -1] / self.temperature).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None


def cases() -> Iterator[tuple[str, dict[str, Any], str, list[str]]]:
    """(name, options of TRL, precision or "lora", variants) of each row of the table."""
    levels = {"gspo": "sequence", "luspo": "sequence"}
    for name in parity.LOSS_TYPES:
        yield name, parity.loss_options(name, levels.get(name, "token")), "fp32", [STOCK, DEFAULTS]
    yield "grpo, beta 0.04", KL, "fp32", [STOCK, DEFAULTS]
    yield "dapo, every layout", {"loss_type": "dapo"}, "fp32", OURS
    for precision in ("lora", "bf16"):
        for name, options in (("dapo", {"loss_type": "dapo"}), ("grpo, beta 0.04", KL)):
            yield f"{name}, {precision}", options, precision, [STOCK, DEFAULTS]


def trainer_of(
    folder: Path, options: dict[str, Any], variant: str, *mixins: type, lora: bool = False
) -> Any:
    torch.manual_seed(0)
    of_ours = VARIANTS[variant]
    return step.trainer_of(
        None if of_ours is None else {**of_ours, "regroup": "auto"},  # not with every loss
        *mixins,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config(tempfile.gettempdir(), 1, 0, **options),
        reward_funcs=is_right,
        train_dataset=training_problems(16, 0),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **({"peft_config": LoraConfig(**LORA)} if lora else {}),
    )


def gradient(trainer: Any, batch: dict[str, Any], dtype: torch.dtype, *, lora: bool) -> Tensor:
    """All gradients of the loss of `batch`, of the model in `dtype`, in one vector of float64."""
    model = trainer.model.train()
    if lora:  # a fresh adapter adds 0, and half of its parameters would have no gradient
        draw = torch.Generator().manual_seed(2)
        for x in model.parameters():
            if x.requires_grad:
                x.data = 0.02 * torch.randn(x.shape, generator=draw)
    model.to(dtype)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(model, batch).backward()
    return torch.cat([x.grad.double().flatten() for x in model.parameters() if x.grad is not None])


def generated(folder: Path) -> tuple[dict[str, Any], Tensor]:
    """TRL's first micro-batch, of 8 completions, and their log-probabilities (8, T)."""
    trainer = trainer_of(folder, {}, STOCK)
    set_seed(0)
    inputs = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    batch: dict[str, Any] = trainer._prepare_inputs(inputs)
    with torch.no_grad():
        pairs = ([batch[f"{of}_{x}"] for of in ("prompt", "completion")] for x in ("ids", "mask"))
        given = *(torch.cat(pair, dim=1) for pair in pairs), batch["completion_ids"].shape[1]
        return batch, trainer._get_per_token_logps_and_entropies(model, *given)[0]


def disturbed(batch: dict[str, Any], logps: Tensor, draw: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(draw)
    names = ("old_per_token_logps", "ref_per_token_logps")
    return batch | {
        name: logps + DRIFT * torch.randn(logps.shape, generator=generator) for name in names
    }


def measure(results: Results, folder: Path) -> None:
    """Write ``errors``, by case and variant, of each draw: the norm of the difference from float64
    over that of the gradient."""
    batch, logps = generated(folder)
    live = (batch["advantages"] != 0).sum().item()
    results.merge("errors", sequences=len(batch["advantages"]), with_gradient=live, cases={})
    for name, options, precision, variants in cases():
        at, found = ("errors", "cases", name), {variant: [] for variant in variants}
        lora, dtype = precision == "lora", torch.bfloat16 if precision == "bf16" else torch.float32
        with results.noting(*at):
            for i in range(DRAWS.get(precision, 1)):
                drawn = disturbed(batch, logps, 1 + i)
                trainer = trainer_of(folder, options, STOCK, Exact, lora=lora)
                exact = gradient(trainer, drawn, torch.float64, lora=lora)
                for variant in variants:
                    trainer = trainer_of(folder, options, variant, lora=lora)
                    got = gradient(trainer, drawn, dtype, lora=lora)
                    found[variant].append(((got - exact).norm() / exact.norm()).item())
            results.merge(*at, status="ok", found=found, precision=precision)
        print(f"{name}: {results.at(*at)}", flush=True)
