"""vLLM's log-probabilities and ours of the same tokens; TRL with a colocated vLLM, stock and ours.

Each engine runs in a fresh process: what it samples depends on the prefixes that it has cached."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import _ChunkedLogProbFunction

from grpo_kernels import Head, KeptIds, linear_logps
from grpo_kernels.transformers import causal_lm_logps, head_inputs
from tests.vllm import engine, training
from tests.vllm.engine import CASES

FP32, BF16 = os.environ["REAL_MODEL"], os.environ["REAL_MODEL_BF16"]
# of the engine's log-probability: torch's fp32 log-softmax over V 49,152 is 1.5e-5 off by itself
NEAR = 2e-4
Samples = list[dict[str, Any]]


def fresh(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `function` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **options).result()


def batch(samples: Samples) -> dict[str, Tensor]:
    """Arguments of `causal_lm_logps`, prompts padded on the left."""
    longest = [max(len(x[name]) for x in samples) for name in ("prompt", "ids")]
    ids, mask, counted = torch.zeros(3, len(samples), sum(longest), dtype=torch.int64)
    for i, x in enumerate(samples):
        start, end = longest[0] - len(x["prompt"]), longest[0] + len(x["ids"])
        ids[i, start:end] = torch.tensor(x["prompt"] + x["ids"])
        mask[i, start:end] = 1
        counted[i, longest[0] : end] = 1
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": counted[:, longest[0] :]}


def of_samples(logps: Tensor, samples: Samples) -> Tensor:
    """The (B, T) log-probabilities of the sampled tokens, one after the other."""
    return torch.cat([row[: len(x["ids"])] for row, x in zip(logps, samples, strict=True)]).double()


def of_engine(samples: Samples) -> Tensor:
    return torch.tensor([x for one in samples for x in one["logps"]]).double()


@pytest.fixture(scope="module")
def sampled() -> Any:
    return fresh(engine.sample, FP32, "float32", [*CASES])


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_in_fp32_are_the_engines(name: str, sampled: dict[str, Samples]) -> None:
    samples, options = sampled[name], CASES[name]
    given, model = batch(samples), AutoModelForCausalLM.from_pretrained(FP32, dtype=torch.float32)
    score = functools.partial(causal_lm_logps, model, **given, entropy=False)
    score = functools.partial(score, temperature=options["temperature"])
    sets = {}
    if "top_k" in options:
        kept = KeptIds.from_logprobs([x["top"] for x in samples], given["completion_mask"])
        sets["kept_ids"] = kept
    with torch.no_grad():
        logps = score(**sets).logps
    gaps = (of_samples(logps, samples) - of_engine(samples)).abs()
    print(f"{name}: {len(gaps)} tokens, off by {gaps.mean():.1e}, {gaps.max():.1e} at most")
    assert gaps.max() < NEAR


def scorers(model: Any, samples: Samples, temperature: float) -> dict[str, Tensor]:
    """Log-probabilities of the samples by each way to round the logits."""
    given = batch(samples)
    columns = given["completion_mask"].shape[1]
    with torch.no_grad():
        with head_inputs(model) as found:
            model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        hidden, ids = found.hidden[:, -columns - 1 : -1], given["input_ids"][:, -columns:]
        weight = found.of_model.weight.weight
        score = functools.partial(linear_logps, temperature=temperature, entropy=False)
        rounded = Head(weight, logits_dtype="input")
        ours = {"ours": score(hidden, Head(weight), ids).logps}
        ours['ours, `logits_dtype="input"`'] = score(hidden, rounded, ids).logps
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = (hidden @ weight.t()).float() / temperature
        product = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        theirs = _ChunkedLogProbFunction.apply(
            flat, weight, None, ids.reshape(-1), temperature, 2048, None, 1.0, ("log_probs",)
        )
        return {**ours, "the sampler's own product": product, "TRL": theirs[0].view_as(ids)}


@pytest.mark.parametrize("head", [None, "float32"])
def test_in_bf16_ours_are_as_near_to_the_engines_as_trls_or_nearer(head):
    """The table of docs/samplers.md; most of the gap is that of the hidden states."""
    cases = ["temperature 1", "temperature 0.7"]
    sampled = fresh(engine.sample, BF16, "bfloat16", cases, head)
    model = AutoModelForCausalLM.from_pretrained(BF16, dtype=torch.bfloat16)
    for name in cases:
        gaps = {}
        scored = scorers(model, sampled[name], CASES[name]["temperature"])
        for scorer, logps in scored.items():
            gap = of_samples(logps, sampled[name]) - of_engine(sampled[name])
            gaps[scorer] = gap.abs().mean()
            model_is = "bf16" if head is None else "bf16, fp32 head"
            numbers = f"{gap.abs().mean():.1e} | {gap.abs().max():.2f} | {gap.exp().std():.1e}"
            print(f"| {model_is} | {name} | {scorer} | {numbers} | {len(gap)} |")
        assert gaps["ours"] < 1.05 * gaps["TRL"]  # 0.84 to 1.01 of it


def trained(kind: str, **options: bool) -> Any:
    found = fresh(training.train, kind, FP32, **options)
    for log in found["logs"]:
        wanted = ("loss", "grad_norm", "ratio/mean", "kept")
        shown = {k: round(x, 5) for k, x in log.items() if any(name in k for name in wanted)}
        print(kind, *options, shown, f"scored {found['scored']}, losses {found['losses']}")
    return found


RATIO = "sampling/importance_sampling_ratio/mean"


def test_trl_with_a_colocated_engine_trains_alike_and_scores_less() -> None:
    stock, ours = trained("stock"), trained("ours")
    for theirs, mine in zip(stock["logs"], ours["logs"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine[RATIO] == pytest.approx(theirs[RATIO], rel=1e-3)
    assert stock["losses"] == ours["losses"] == stock["scored"] == 2
    assert ours["scored"] == 0


def test_with_truncation_the_sets_keep_the_ratio_at_one() -> None:
    """Stock TRL multiplies the loss by a ratio far below 1."""
    stock, ours = trained("stock", truncated=True), trained("ours", truncated=True, sets=True)
    assert all(log[RATIO] < 0.7 for log in stock["logs"])
    assert all(log[RATIO] == pytest.approx(1.0, abs=2e-3) for log in ours["logs"])
    assert all(1 < log["kept/size"] <= 50 and log["kept/without_set"] == 0 for log in ours["logs"])
