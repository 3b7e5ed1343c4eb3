"""The documentation: code that is shown, and what the checker of the built site finds (`make docs`
builds it)."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import grpo_kernels
from docs.tools import check
from grpo_kernels import typing
from grpo_kernels.advantages import group_advantages

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOORS = tuple(f"grpo_kernels.{name}" for name in ("liger", "transformers", "trl", "verl"))
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def blocks(page: str) -> list[str]:
    return BLOCK.findall((DOCS / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_shown_code_is_python_and_imports_what_there_is(page: str) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if not (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "grpo_kernels"
            ):
                continue
            trainers = node.module.startswith(DOORS)  # whose packages are slow to import
            known = (
                check.public_names(node.module)
                if trainers
                else dir(importlib.import_module(node.module))
            )
            known = [name.rpartition(".")[2] for name in known]
            assert [alias.name for alias in node.names if alias.name not in known] == []


def keywords_of(function: Callable[..., Any]) -> set[str] | None:
    """Names of the keyword arguments that `function` takes; None: any."""
    found: set[str] = set()
    for x in inspect.signature(function).parameters.values():
        if x.kind is not x.VAR_KEYWORD:
            found.add(x.name)
            continue
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(x.annotation))
        if unpacked is None:
            return None
        found |= set(getattr(typing, unpacked[1]).__annotations__)
    return found


def shown_calls(block: str) -> Iterator[tuple[str, Any, ast.Call]]:
    """The calls in a block of code, of functions and classes that it imports from grpo_kernels
    itself."""
    known: dict[str, Any] = {"grpo_kernels": grpo_kernels}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module in (
            "grpo_kernels",
            "grpo_kernels.transformers",
        ):
            module = importlib.import_module(node.module)
            known |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
    every = {**{name: getattr(grpo_kernels, name) for name in grpo_kernels.__all__}, **known}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call):
            path = ast.unparse(node.func).split(".")
            try:
                called = functools.reduce(getattr, path[1:], every[path[0]])
            except (KeyError, AttributeError):
                continue
            if callable(called):
                yield ".".join(path), called, node


@pytest.mark.parametrize("page", PAGES)
def test_shown_calls_have_arguments_that_there_are(page: str) -> None:
    for block in blocks(page):
        for name, function, call in shown_calls(block):
            takes = keywords_of(function)
            given = [x.arg for x in call.keywords if x.arg is not None]
            assert takes is None or [x for x in given if x not in takes] == [], name


def test_calls_are_found_and_wrong_arguments_in_them() -> None:
    block = "import grpo_kernels as g\nfrom grpo_kernels import GRPOLoss as Loss\n"
    block += "Loss(epsilom=1)\ng.grpo_loss(beta=1)"
    calls = shown_calls(block.replace("g.", "grpo_kernels."))
    unknown = [
        call.keywords[0].arg not in (keywords_of(function) or ()) for _, function, call in calls
    ]
    assert unknown == [True, False]


class PositionalModel(nn.Module):
    """A body with learned positions that attends to what came before, and a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def model(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ):
        x = (self.tokens(input_ids) + self.positions(position_ids)) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(last_hidden_state=torch.tanh(x.cumsum(dim=1)))


def test_the_plain_loop_of_the_start_page_is_right_with_prompts_padded_on_the_left() -> None:
    shown: dict = {}
    (block,) = (x for x in blocks("start/plain-loop.md") if "def hidden_states(" in x)
    exec(block, shown)
    model = PositionalModel(vocabulary=23, width=8).double()
    prompts = [torch.randint(1, 23, (n,)) for n in (2, 5, 3, 4, 5, 1, 2, 3)]
    prompt_ids = torch.stack([nn.functional.pad(ids, (5 - len(ids), 0)) for ids in prompts])
    prompt_mask = (prompt_ids != 0).long()
    completion_ids = torch.randint(1, 23, (8, 6))
    completion_mask = (torch.arange(6) < torch.tensor([6, 1, 4, 5, 2, 6, 3, 6])[:, None]).long()
    batch = prompt_ids, prompt_mask, completion_ids, completion_mask

    logps = shown["score"](model, *batch)
    out = shown["step"](model, *batch, torch.arange(8.0).double(), old=logps)

    for row, prompt in enumerate(prompts):  # each by itself, without padding, through all logits
        n = int(completion_mask[row].sum())
        ids = torch.cat([prompt, completion_ids[row, :n]])[None]
        body = model.model(ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None])
        alone = model.lm_head(body.last_hidden_state).log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = alone.gather(1, completion_ids[row, :n, None])[:, 0]
        torch.testing.assert_close(logps[row, :n], expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(out.logps * completion_mask, logps * completion_mask, rtol=0, atol=0)
    assert model.tokens.weight.grad.abs().max() > 0


def test_the_code_of_custom_losses_runs_as_it_stands() -> None:
    names: dict[str, Any] = {"n": 4, "rewards": torch.arange(8.0)}
    names |= {"completion_mask": torch.ones(8, 6), "group_advantages": group_advantages}
    for block in blocks("custom-losses.md"):
        exec(block, names)
    assert names["hidden"].grad.abs().sum() > 0
    for advantages in (names["opo"], names["passk"], names["gpg"]):  # of groups of four
        assert advantages.numel() == 8
    assert torch.equal(names["passk"], torch.tensor([[0.0, 0, 0, 1]] * 2))


def site_of(tmp_path: Path, body: str) -> Path:
    (tmp_path / "api").mkdir()
    entries = "".join(
        f"<h2 id='{name}'></h2>" for module in check.PUBLIC for name in check.public_names(module)
    )
    (tmp_path / "api" / "all.html").write_text(entries)
    (tmp_path / "picture.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(f"<h1 id='top'></h1>{body}")
    return tmp_path


def test_a_site_without_faults_passes(tmp_path: Path) -> None:
    body = "<a href='#top'></a><a href='api/all.html#grpo_kernels.grpo_loss'></a>"
    body += "<img src='picture.svg'>"
    assert check.main(site_of(tmp_path, body + "<a href='https://example.org'></a>")) == 0


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<a href='missing.html'></a>", "leads to missing.html, which is not there"),
        ("<a href='#nowhere'></a>", "leads to #nowhere, which has no such anchor"),
        (
            "<a href='api/all.html#nowhere'></a>",
            "leads to api/all.html#nowhere, which has no such anchor",
        ),
        ("<a href='../README.md'></a>", "leads to ../README.md, which is not there"),
        ("<img src='missing.png'>", "leads to missing.png, which is not there"),
        ("<img src='https://example.org/a.png'>", "loads https://example.org/a.png from elsewhere"),
        ("<script src='//example.org/a.js'></script>", "loads //example.org/a.js from elsewhere"),
        ("<pre class='mermaid'></pre>", "has a mermaid diagram"),
    ],
)
def test_a_fault_of_the_site_is_named(
    body: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert check.main(site_of(tmp_path, body)) == 1
    assert f"index.html: {fault}" in capsys.readouterr().out


def test_a_fault_beside_the_pages_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    site = site_of(tmp_path, "")
    (site / "extra.css").write_text("@import 'https://fonts.example.org/font.css';")
    page = site / "api" / "all.html"
    page.write_text(page.read_text().replace("<h2 id='grpo_kernels.LoRA'></h2>", ""))
    assert check.main(site) == 1
    said = capsys.readouterr().out
    assert "extra.css: loads a style or font from elsewhere" in said
    assert "api/: grpo_kernels.LoRA is public and has no entry" in said
