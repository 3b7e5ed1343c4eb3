"""`grpo_kernels.host`: whatever is given back is what was there, and only where it is still
ours."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace

import pytest

from grpo_kernels.host import HostFunction, Patches, during, replaced


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


def test_the_log_says_what_is_replaced_and_given_back(
    owner: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_replaced_for_a_call_that_raises(owner: ModuleType) -> None:
    child = type("Child", (type("Parent", (), {"f": theirs}),), {})
    seen = []

    def fail(x: object) -> None:
        seen.append(x)
        raise KeyError

    for each in (owner, SimpleNamespace(f=theirs), child, child()):
        before = dict(vars(each))
        with pytest.raises(KeyError), replaced(each, "f", ours):
            fail(vars(each)["f"])
        assert dict(vars(each)) == before
    assert seen == [ours] * 4


def test_a_context_variable_for_a_call_that_raises() -> None:
    variable = ContextVar("variable", default=0)
    with during(variable, 1) as value:
        assert variable.get() == value == 1
        with pytest.raises(KeyError), during(variable, 2):
            {1: "before"}[variable.get()]
        assert variable.get() == 1
    assert variable.get() == 0


def test_a_function_of_another_release_is_left_alone(owner: ModuleType) -> None:
    def other(x: int) -> None: ...

    owner.__version__ = "9"
    function = HostFunction(owner, "f", ours, unknown="function f", needed=("g",))
    for f, g, is_known in (
        (theirs, True, True),
        (theirs, False, False),
        (other, True, False),
        (ours, False, True),
    ):
        owner.f = f
        vars(owner).pop("g", None)
        if g:
            owner.g = theirs
        assert (function.is_known(), function.is_ours()) == (is_known, f is ours)
        with function.replaced():
            assert owner.f is (ours if is_known else f)
        assert owner.f is f
