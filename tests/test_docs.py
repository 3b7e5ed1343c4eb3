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
from typing import Any

import pytest
import torch

import grpo_kernels
from docs.tools import check
from grpo_kernels import typing
from grpo_kernels.advantages import group_advantages

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOORS = tuple(f"grpo_kernels.{name}" for name in ("liger", "transformers", "trl", "verl"))
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
RECIPES = [f"examples/recipes/{path.name}" for path in DOCS.parent.glob("examples/recipes/*.py")]


def blocks(page: str) -> list[str]:
    return BLOCK.findall((DOCS / page).read_text())


def imports(code: str) -> Iterator[ast.ImportFrom]:
    """Those from grpo_kernels and its modules."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_kernels"):
            yield node


@pytest.mark.parametrize("page", [*PAGES, *RECIPES])
def test_shown_code_is_python_and_imports_what_there_is(page: str) -> None:
    for block in blocks(page) if page in PAGES else [(DOCS.parent / page).read_text()]:
        for node in imports(block):
            if node.module.startswith(DOORS):  # whose packages are slow to import
                known = [x.rpartition(".")[2] for x in check.public_names(node.module)]
            else:
                known = dir(importlib.import_module(node.module))
            assert {alias.name for alias in node.names} <= {*known}


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
    """The calls of functions and classes of grpo_kernels itself in a block of code."""
    known = {name: getattr(grpo_kernels, name) for name in grpo_kernels.__all__}
    known["grpo_kernels"] = grpo_kernels
    for node in imports(block):
        if node.module in ("grpo_kernels", "grpo_kernels.transformers"):
            module = importlib.import_module(node.module)
            known |= {x.asname or x.name: getattr(module, x.name) for x in node.names}
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call):
            first, *path = ast.unparse(node.func).split(".")
            try:
                called = functools.reduce(getattr, path, known[first])
            except (KeyError, AttributeError):
                continue
            if callable(called):
                yield ".".join([first, *path]), called, node


@pytest.mark.parametrize("page", PAGES)
def test_shown_calls_have_arguments_that_there_are(page: str) -> None:
    for block in blocks(page):
        for name, function, call in shown_calls(block):
            takes = keywords_of(function)
            given = [x.arg for x in call.keywords if x.arg is not None]
            assert takes is None or [x for x in given if x not in takes] == [], name


def test_the_code_of_custom_losses_runs_as_it_stands() -> None:
    names: dict[str, Any] = {}
    for block in blocks("custom-losses.md"):
        exec(block, names)
    assert names["hidden"].grad.abs().sum() > 0


def test_the_advantages_on_the_page_of_names_run_as_they_stand() -> None:
    names: dict[str, Any] = {"n": 4, "rewards": torch.arange(8.0), "torch": torch}
    names |= {"completion_mask": torch.ones(8, 6), "group_advantages": group_advantages}
    for block in blocks("names.md"):
        exec(block, names)
    for advantages in (names["opo"], names["passk"], names["gpg"]):  # of groups of four
        assert advantages.numel() == 8
    assert torch.equal(names["passk"], torch.tensor([[0.0, 0, 0, 1]] * 2))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<a href='#top'></a><a href='api/x.html#grpo_kernels.grpo_loss'></a>"
         "<img src='a.svg'><a href='https://example.org'></a>", None),
        ("<a href='missing.html'></a>", "leads to missing.html, which is not there"),
        ("<a href='api/x.html#no'></a>", "leads to api/x.html#no, which has no such anchor"),
        ("<img src='https://a.org/a.png'>", "loads https://a.org/a.png from elsewhere"),
        ("<pre class='mermaid'></pre>", "has a mermaid diagram"),
    ],
)  # fmt: skip
def test_a_fault_of_the_site_is_named(body, fault, tmp_path, capsys):
    public = (name for module in check.PUBLIC for name in check.public_names(module))
    (tmp_path / "api").mkdir()
    (tmp_path / "api/x.html").write_text("".join(f"<h2 id='{name}'></h2>" for name in public))
    (tmp_path / "a.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(f"<h1 id='top'></h1>{body}")
    assert check.main(tmp_path) == (fault is not None)
    assert fault is None or f"index.html: {fault}" in capsys.readouterr().out
