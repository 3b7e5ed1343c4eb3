"""`make parity`: does training with `FusedGRPOTrainer` give what TRL's `GRPOTrainer` gives?

Trains the same tiny model with each, from the same seed, and compares the loss, the gradient norm
and every logged metric of every optimizer step. Counts the floating-point operations of the head
alone. Writes docs/dev/parity.md and exits with 1 if a configuration is out of tolerance.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.machine import ROOT
from grpo_kernels.commands.scripts import LOSS_FLOOR, METRIC_FLOOR, difference
from grpo_kernels.objective.loss_types import LOSSES

TOLERANCE = 1e-5
LOSS_TYPES = [name for name in LOSSES if name != "gmpo"]  # which has a trainer of its own in TRL


@dataclass(frozen=True)
class Case:
    """One configuration: options, model, what is mixed into both; `ours`: arguments of ours."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "qwen3"
    dtype: str = "float32"
    lora: bool = False
    mixin: str | None = None
    tolerance: float = TOLERANCE
    most_steps: int = 1000
    ours: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    case: Case
    loss: float
    grad_norm: float
    metric: float
    worst: str
    clipped: float  # largest share of clipped tokens of a step, for the loss types that log it
    seconds: float

    @property
    def equal(self) -> bool:
        return max(self.loss, self.grad_norm, self.metric) <= self.case.tolerance


INJECTED: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    # importance ratios as vLLM's sampler would give them
    "ratio": lambda ids: {"importance_sampling_ratio": 0.4 + (ids % 7) * 0.2},
    # every fifth id counts as a tool's output
    "tools": lambda ids: {"tool_mask": (ids % 5 != 0).long()},
    # of a sampler that differs from the policy, for the off-policy mask
    "sampling": lambda ids: {"sampling_per_token_logps": -3.5 + 0.5 * (ids % 5)},
}


def grid() -> Iterator[Case]:
    for loss_type, level, beta, n in product(
        LOSS_TYPES, ("token", "sequence"), (0.0, 0.04), (1, 2)
    ):
        options = loss_options(loss_type, level, beta=beta, num_iterations=n)
        yield Case(f"{loss_type}, {level}, beta {beta:g}, num_iterations {n}", options)


def loss_options(loss_type: str, level: str = "token", **others: Any) -> dict[str, Any]:
    """Options whose clip range is narrow enough for the tiny run to leave it."""
    options: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level, **others}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.05
    elif level == "sequence":
        options["epsilon"] = 0.02
    return options


TWICE = {"num_iterations": 2, "beta": 0.04}
ADAPTIVE = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 3.4}
ADAPTIVE |= {"entropy_coef_delta": 0.005}
BOTH_ENTROPIES = {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}
EXTRAS = [  # every other option that reaches the head or the gradient that comes back to it
    Case("entropy bonus 0.01", {"entropy_coef": 0.01}),
    Case("entropy bonus 0.01, grpo", {"entropy_coef": 0.01, "loss_type": "grpo", **TWICE}),
    Case("adaptive entropy bonus", ADAPTIVE),
    Case("top-entropy mask 0.5", {"top_entropy_quantile": 0.5, **TWICE}),
    Case("top-entropy mask 0.5, entropy bonus", BOTH_ENTROPIES),
    Case("off-policy mask", {"off_policy_mask_threshold": 0.02, **TWICE}),
    Case("off-policy mask, sampling logps", {"off_policy_mask_threshold": 0.5}, mixin="sampling"),
    Case("delta 1.1", {"delta": 1.1, **TWICE}),
    Case("no KL correction", {"use_bias_correction_kl": False, **TWICE}),
    Case("importance ratios as inputs", TWICE, mixin="ratio"),
    Case("importance ratios as inputs, vespo", loss_options("vespo", **TWICE), mixin="ratio"),
    Case("tool mask", TWICE, mixin="tools"),
    Case("temperature 0.7", {"temperature": 0.7, **TWICE}),
    Case("mask_truncated_completions", {"mask_truncated_completions": True, **TWICE}),
    Case("steps_per_generation 4", {"steps_per_generation": 4, "entropy_coef": 0.01}),
    Case("gradient checkpointing", {"gradient_checkpointing": True}),
    # a saturated cap leaves many small gradients, whose last bits Adam's first steps turn into
    # directions
    Case("soft-capping (Gemma 2)", TWICE, kind="softcap", tolerance=1e-3),
    Case("logit_scale, tied head (Cohere)", TWICE, kind="logit_scale"),
    Case("logits_scaling (Granite)", TWICE, kind="logits_scaling"),
    Case("bias (Phi)", TWICE, kind="bias"),
    Case("tied head (Qwen3)", TWICE, kind="tied"),
    Case("LoRA body, frozen head", {"learning_rate": 1e-2, **TWICE}, lora=True),
    Case("LoRA body, frozen head, entropy bonus",
        {"learning_rate": 1e-2, "entropy_coef": 0.01}, lora=True),
    # A 16-bit body rounds at every layer: a different last bit of an fp32 gradient becomes 2^-9
    # there, and after some ten steps another token is sampled. (So it is with stock TRL when only
    # its head is replaced by log_softmax.) In 16 bits a tree rounds otherwise than padded rows, and
    # a clip decision that flips is more than a rounding
    Case("bf16 body, fp32 head, padded, 6 steps", {"cast_lm_head_to_fp32": True, **TWICE},
        dtype="bfloat16", tolerance=5e-2, most_steps=6, ours={"layout": "padded"}),
]  # fmt: skip


def run(case: Case, steps: int) -> Result:
    from trl import GRPOTrainer

    from benchmarks import tiny_run
    from grpo_kernels.trl import FusedGRPOTrainer

    began = time.perf_counter()
    histories = []
    for base in (GRPOTrainer, FusedGRPOTrainer):
        arguments = {"peft_config": lora()} if case.lora else {}
        arguments |= case.ours if base is FusedGRPOTrainer else {}
        with tempfile.TemporaryDirectory() as folder:
            options = tiny_run.config(folder, min(steps, case.most_steps), **case.options)
            model = {"kind": case.kind, "dtype": getattr(torch, case.dtype)}
            histories.append(tiny_run.train(mixed(case, base), options, **model, **arguments))
    stock, ours = histories
    worst = differences(stock.steps, ours.steps)
    loss, norm = worst.pop("loss"), worst.pop("grad_norm")
    name = max(worst, key=lambda key: worst[key])
    names = ("clip_ratio/region_mean", "cispo_clip_ratio")
    clipped = max(s.get(x, 0.0) for s in stock.steps for x in names)
    took = time.perf_counter() - began
    return Result(case, loss, norm, worst[name], name, clipped, took)


def mixed(case: Case, base: type) -> type:
    """`base`, whose batches have the case's `INJECTED` inputs as well, made up from the ids."""
    if case.mixin is None:
        return base
    name = case.mixin

    class Mixed(base):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            self.use_vllm = name == "ratio"
            try:
                given = INJECTED[name](inputs["completion_ids"])
                return super()._compute_loss(model, inputs | given)
            finally:
                self.use_vllm = False

    Mixed.__name__ = base.__name__
    return Mixed


def lora() -> Any:
    from peft import LoraConfig

    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM")


def differences(stock: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """For each logged name the largest difference over the steps; infinite if one lacks it."""
    if len(stock) != len(ours):
        raise RuntimeError(f"stock logged {len(stock)} steps, ours {len(ours)}")
    worst: dict[str, float] = {}
    for left, right in zip(stock, ours, strict=True):
        for name in sorted(left.keys() | right.keys()):  # of equals the first is named
            apart = difference(name, left.get(name), right.get(name))
            worst[name] = max(worst.get(name, 0.0), apart)
    return worst


def from_stock(stock: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """The same, of what stock TRL logs alone."""
    return differences(stock, [{k: x for k, x in log.items() if k in stock[0]} for log in ours])


def table(results: list[Result]) -> list[str]:
    from benchmarks import tables

    return tables.markdown([
        {
            "configuration": r.case.name, "loss": f"{r.loss:.1e}",
            "gradient norm": f"{r.grad_norm:.1e}", "worst metric": f"{r.metric:.1e}",
            "which": r.worst, "clipped at most": f"{r.clipped:.1%}",
            "equal": ("yes" if r.equal else "NO")
            + (f" (within {r.case.tolerance:g})" if r.case.tolerance != TOLERANCE else ""),
        }
        for r in results
    ])  # fmt: skip


def page(results: list[Result], flops: list[str], steps: int) -> str:
    import transformers
    import trl

    from benchmarks import tables, tiny_models
    from grpo_kernels.backends import choose_backend

    exact = [r for r in results if r.case.tolerance == TOLERANCE]
    most = max(max(r.loss, r.grad_norm, r.metric) for r in exact)
    backend = choose_backend("auto", torch.device("cpu")).name
    conditions = f"""Conditions: TRL {trl.__version__}, transformers {transformers.__version__},
        torch {torch.__version__}, CPU, backend {backend}, one thread, fp32. A Qwen3-shaped model
        (2 layers, hidden size 32, vocabulary {tiny_models.VOCAB}, random weights), {steps}
        optimizer steps of AdamW, 2 accumulated micro-batches of 8 completions of at most 12 tokens,
        groups of 4, half of the groups with equal rewards. `GRPOTrainer` and `FusedGRPOTrainer`
        start from the same seed."""
    figures = f"""Each figure is the largest over all steps of |ours - stock| / max(|stock|, floor).
        The floor is {METRIC_FLOOR:g}, and {LOSS_FLOOR:g} for losses, which are sums of terms of
        that size that nearly cancel. Every logged value is compared except clocks, the epoch and
        the learning rate."""
    agree = f"""{sum(r.equal for r in results)} of {len(results)} configurations agree;
        {len(exact)} of them to {most:.1e} (tolerance {TOLERANCE:g}); the others' tolerance is in
        their row."""
    head = ["# Parity with TRL", "Generated by `make parity`; do not edit."]
    prose = [
        x for text in (*head, conditions, figures, agree) for x in (" ".join(text.split()), "")
    ]
    sections = ["## Head FLOPs per optimizer step", "", *flops, "", "## Every configuration", ""]
    return tables.page([*prose, *sections, *table(results)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="names that contain this; writes no page")
    asked = parser.parse_args()
    from benchmarks import head_flops

    cases = [case for case in [*grid(), *EXTRAS] if asked.only in case.name]
    results = []
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        for result in pool.map(run, cases, [asked.steps] * len(cases)):
            results.append(result)
            print(table([result])[-1], f"{result.seconds:.1f} s", flush=True)
    flops = head_flops.table()
    print("\n".join(flops))
    if not asked.only:
        (ROOT / "docs" / "dev" / "parity.md").write_text(page(results, flops, asked.steps))
    different = [r.case.name for r in results if not r.equal]
    print(f"{len(results) - len(different)} of {len(results)} equal", *different, sep="\n  ")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
