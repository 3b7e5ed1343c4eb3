"""The choice of a row backend, in the place of the library's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo_kernels import backends

Choose = Callable[..., Any]


def choose_by(monkeypatch: pytest.MonkeyPatch, make: Callable[[Choose], Choose]) -> None:
    """Let every call choose by ``make(choose_backend)``, wherever that is imported."""
    original = backends.choose_backend
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_kernels") and vars(module).get("choose_backend") is original:
            monkeypatch.setattr(module, "choose_backend", make(original))
