"""Blocks of docs/recipes.md: run as they stand there, and compared with the trainer's own way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.M)[1:])] * 2, strict=True))
BLOCKS = {
    name: re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    for name, text in SECTIONS.items()
}


def run(section: str, index: int = 0) -> dict[str, Any]:
    """The names that a block makes."""
    names: dict[str, Any] = {"__name__": "my_module"}
    exec(compile(BLOCKS[section][index], f"recipes.md: {section}", "exec"), names)
    return names


def assert_same(
    compute: Callable[[], tuple[Tensor, ...]],
    parameters: list[Tensor],
    section: str,
    index: int = 0,
    bound: float = 1e-10,
) -> None:
    """What `compute` returns, and its gradients, before and after a block of the page has run."""
    found = []
    for recipe in (False, True):
        if recipe:
            run(section, index)
        results = compute()
        torch.manual_seed(3)
        loss = sum((torch.randn_like(x) * x).sum() for x in results if x.requires_grad)
        found.append(([x.detach() for x in results], torch.autograd.grad(loss, parameters)))
    assert_close(found[1], found[0], rtol=bound, atol=bound / 100)
