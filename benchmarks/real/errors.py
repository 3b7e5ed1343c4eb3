"""Gradients of one batch of the real model against float64: TRL's loss, stock and with our head and training step.

The oracle is TRL's loss on log-probabilities of all logits of the model in float64. Old log-probabilities are those
of the model, disturbed, so that ratios differ from 1. In 16 bits most of the error comes from a few tokens whose ratio
falls on the other side of its clip bound: there several draws of the disturbance are measured.
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
from benchmarks.figures import DEFAULTS, STOCK
from benchmarks.real import task
from benchmarks.real.train import VARIANTS, config
from benchmarks.run import Results

DRIFT = 0.1  # standard deviation of old against new log-probabilities
DRAWS = {"bf16": 4}  # of the disturbance; else 1
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
KL = {"loss_type": "grpo", "beta": 0.04}
OURS = [name for name in VARIANTS if name not in (STOCK, DEFAULTS, "regrouped", "skip, regrouped")]


class Exact:
    """In front of TRL's trainer: log-probabilities and entropies of all logits, in the model's precision."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> Any:
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
    variant: dict[str, Any] | None, model: Any, folder: str, options: dict[str, Any], *mixins: type, lora: bool = False
) -> Any:
    """A trainer of the real run's configuration with `options`, of `model`."""
    torch.manual_seed(0)
    return step.trainer_of(
        variant,
        *mixins,
        model=model,
        args=config(folder, 1, 0, **options),
        reward_funcs=task.is_right,
        train_dataset=task.training_problems(16, 0),
        processing_class=AutoTokenizer.from_pretrained(model.config._name_or_path),
        **({"peft_config": LoraConfig(**LORA)} if lora else {}),
    )


def gradient(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """All gradients of the loss of `batch` in one vector of float64."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    found = [x.grad.double().flatten() for x in trainer.model.parameters() if x.grad is not None]
    trainer.model.zero_grad(set_to_none=True)
    return torch.cat(found)


def generated(folder: Path) -> tuple[dict[str, Any], Tensor]:
    """TRL's first micro-batch, of 8 completions, and their log-probabilities under the model, (8, T)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as out:
        trainer = trainer_of(None, model, out, {})
        set_seed(0)
        inputs = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        batch: dict[str, Any] = trainer._prepare_inputs(inputs)
        with torch.no_grad():
            ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
            columns = batch["completion_ids"].shape[1]
            logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, columns)[0]
    return batch, logps


def disturbed(batch: dict[str, Any], logps: Tensor, draw: int) -> dict[str, Any]:
    """`batch` with old and reference log-probabilities near `logps`."""
    generator = torch.Generator().manual_seed(draw)
    names = ("old_per_token_logps", "ref_per_token_logps")
    return batch | {name: logps + DRIFT * torch.randn(logps.shape, generator=generator) for name in names}


def measure(results: Results, folder: Path) -> None:
    """Write ``errors``, by case and variant, of each draw: the norm of the difference from float64 over that of the
    gradient."""
    batch, logps = generated(folder)
    live = (batch["advantages"] != 0).sum().item()
    results.merge("errors", sequences=len(batch["advantages"]), with_gradient=live, cases={})
    for name, options, precision, variants in cases():
        at = ("errors", "cases", name)
        with results.noting(*at):
            draws = [disturbed(batch, logps, 1 + i) for i in range(DRAWS.get(precision, 1))]
            found = [_errors(folder, x, options, precision, variants) for x in draws]
            by_variant = {name: [x[name] for x in found] for name in variants}
            results.merge(*at, status="ok", found=by_variant, precision=precision)
        print(f"{name}: {results.at(*at)}", flush=True)


def _errors(
    folder: Path, batch: dict[str, Any], options: dict[str, Any], precision: str, variants: list[str]
) -> dict[str, float]:
    found: dict[str, float] = {}
    lora, dtype = precision == "lora", torch.bfloat16 if precision == "bf16" else torch.float32
    for variant in (None, *variants):
        wanted = torch.float64 if variant is None else dtype
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as out:
            mixins = (Exact,) if variant is None else ()
            trainer = trainer_of(VARIANTS[variant or STOCK], model, out, options, *mixins, lora=lora)
            if lora:  # a fresh adapter adds 0, and half of its parameters would have no gradient
                draw = torch.Generator().manual_seed(2)
                for x in trainer.model.parameters():
                    if x.requires_grad:
                        x.data = 0.02 * torch.randn(x.shape, generator=draw)
            trainer.model.to(wanted)
            got = gradient(trainer, batch)
        if variant is None:
            exact = got
        else:
            found[variant] = ((got - exact).norm() / exact.norm()).item()
    return found
