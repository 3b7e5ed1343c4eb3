"""The six tasks of docs/start/plain-loop.md, as they stand there, against plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support import tiny_architectures as tiny
from tests.support.tiny_architectures import positions_of_generate, text_batch

PAGE = Path(__file__).parents[1] / "docs/start/plain-loop.md"
SECTION = PAGE.read_text().partition("## Six tasks")[2].partition("\n## ")[0]
(IMPORTS,) = re.findall(r"^```python\n(import torch\n.*?)```", SECTION, re.DOTALL | re.MULTILINE)
TASKS = dict(re.findall(r"\*\*(.*?):?\*\*.*?```python\n(.*?)```", SECTION, re.DOTALL))


def run(title: str) -> SimpleNamespace:
    """The names after a task's lines, on a tiny model, with prompts and rewards that differ."""
    torch.manual_seed(0)
    ids, attention_mask = (x.repeat(3, 1)[:8] for x in text_batch())
    ids = torch.where(attention_mask != 0, torch.randint(3, tiny.VOCAB, ids.shape), ids)
    mask = attention_mask[:, -5:].clone()
    model, reference = tiny.text_model("qwen3"), tiny.text_model("qwen3")
    with torch.no_grad():
        for x in reference.parameters():
            x.add_(0.02 * torch.randn_like(x))
    given: dict[str, Any] = {
        "model": model, "reference_model": reference, "completion_mask": mask,
        "batch": (ids, attention_mask, mask), "rewards": torch.tensor([1.0, 0, 0.5, 0, 1, 1, 0, 0]),
        "advantages": torch.tensor([1.0, -0.5, 0.3, -1, 0.2, 0.7, -0.2, 0.1]),
        "step_rewards": [[0.1, 0.9], [0.5], [0.2, 0.4], [1.0]] * 2,
        "step_ends": [[0, 2], [1], [0, 1], [2]] * 2,
    }  # fmt: skip
    exec(IMPORTS + TASKS[title], given)
    scope = SimpleNamespace(**given, gradients=[x.grad for x in model.parameters()])
    model.zero_grad()
    places = positions_of_generate(model, ids, attention_mask)
    scope.own, scope.theirs = (
        x(input_ids=ids, attention_mask=attention_mask, **places).logits[:, -6:-1].log_softmax(-1)
        for x in (model, reference)
    )
    scope.logps = scope.own.gather(-1, ids[:, -5:, None])[..., 0]
    scope.ref = scope.theirs.gather(-1, ids[:, -5:, None])[..., 0].detach()
    scope.counts = mask != 0
    return scope


def per_sequence(x: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts, x, 0.0).sum(1) / counts.sum(1)


def check(scope: SimpleNamespace, loss: Tensor) -> None:
    """The page's gradients are those of `loss`."""
    parameters = [*scope.model.parameters()]
    want = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    torch.testing.assert_close(scope.gradients, [*want], rtol=1e-5, atol=1e-7)
    if hasattr(scope, "out"):
        torch.testing.assert_close(scope.out.loss, loss.detach(), check_dtype=False)


def test_the_page_has_the_six_in_at_most_eight_lines_each() -> None:
    assert len(TASKS) == 6
    assert max(len(block.strip().splitlines()) for block in TASKS.values()) <= 8


def test_grpo_with_a_kl_term() -> None:
    x = run("GRPO with a KL term")
    groups = x.rewards.view(2, 4)
    a = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ratio, d = torch.exp(x.logps - x.logps.detach()), x.ref - x.logps
    tokens = -ratio * a.view(8, 1) + 0.04 * (torch.exp(d) - d - 1)
    check(x, per_sequence(tokens, x.counts).mean())


def test_gspo() -> None:
    x = run("GSPO")
    log_ratio = per_sequence(x.logps - x.logps.detach(), x.counts)
    check(x, -(torch.exp(log_ratio) * x.advantages).mean())


def test_a_penalty_of_your_own() -> None:
    x = run("A penalty of your own on top of a built-in loss")
    tokens = -torch.exp(x.logps - x.logps.detach()) * x.advantages[:, None]
    tokens = tokens + 0.01 * x.logps.square()
    check(x, tokens[x.counts].mean())


def test_log_probabilities() -> None:
    x = run("Log-probabilities and entropies of a model")
    entropies = -(x.own.exp() * x.own).sum(-1)
    for got, want in ((x.scores.logps, x.logps), (x.scores.entropies, entropies)):
        torch.testing.assert_close(got[x.counts], want[x.counts], check_dtype=False)
        assert got.requires_grad


def test_distillation() -> None:
    x = run("Distillation")
    divergence = (x.own.exp() * (x.own - x.theirs.detach())).sum(-1)
    check(x, divergence[x.counts].mean())


def test_process_rewards() -> None:
    x = run("Process rewards")
    a = torch.zeros(8, 5, dtype=torch.float64)
    for start in (0, 4):
        rows = range(start, start + 4)
        pool = torch.tensor([r for i in rows for r in x.step_rewards[i]], dtype=torch.float64)
        for i in rows:
            for reward, end in zip(x.step_rewards[i], x.step_ends[i], strict=True):
                a[i, : end + 1] += (reward - pool.mean()) / (pool.std() + 1e-4)
    tokens = -torch.exp(x.logps - x.logps.detach()) * a
    check(x, tokens[x.counts].mean())
