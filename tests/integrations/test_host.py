"""`grpo_kernels.integrations.host`: whatever is given back is what was there, and only where it is still ours."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest

from grpo_kernels.integrations.host import Patches


def ours() -> None: ...


def theirs() -> None: ...


@pytest.fixture
def owner() -> ModuleType:
    module = ModuleType("owner")
    module.f = theirs
    return module


def test_replaced_once_more_in_between(owner: ModuleType) -> None:
    patches = Patches()
    patches.replace(owner, "f", ours)
    owner.f = print
    patches.replace(owner, "f", ours)
    patches.restore()
    assert owner.f is print
    patches.replace(owner, "f", ours)
    owner.f = len
    patches.restore()
    assert owner.f is len


def test_a_class_that_inherits_what_is_ours() -> None:
    parent = type("Parent", (), {"f": theirs})
    child = type("Child", (parent,), {})
    patches = Patches()
    patches.replace(parent, "f", ours)
    patches.replace(child, "f", ours)
    patches.restore()
    assert parent.f is child.f is theirs


def test_the_log_says_what_is_replaced_and_given_back(owner: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    patches = Patches("someone's package")
    child = type("Child", (type("Parent", (), {"f": theirs}),), {"__module__": "somewhere"})
    with caplog.at_level(logging.INFO, "grpo_kernels"):
        patches.replace(owner, "f", ours)
        patches.replace(child, "f", ours)
        owner.f = print
        patches.restore()
        Patches().replace(owner, "f", ours)
    assert "f" not in vars(child)
    assert caplog.messages == [
        "patched someone's package: owner.f is that of grpo_kernels",
        "patched someone's package: somewhere.Child.f is that of grpo_kernels",
        "unpatched someone's package: somewhere.Child.f is its own again",
        "unpatched someone's package: owner.f is left as somebody else has made it since",
    ]
