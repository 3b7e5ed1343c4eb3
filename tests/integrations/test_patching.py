"""What the doors share: replaced attributes come back, shares of rows, errors of imports."""

from __future__ import annotations

import importlib
import logging
import random
import sys
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels.patching import Patches, Shares, all_replaced, divided, needed, numbered, replaced

pytestmark = pytest.mark.unit


def ours() -> None: ...


def theirs() -> None: ...


@pytest.fixture
def owner() -> ModuleType:
    module = ModuleType("owner")
    module.f = theirs
    return module


def test_what_others_replace_in_between_stays_theirs_and_the_log_says_so(owner, caplog):
    patches, parent = Patches("someone's package"), type("Parent", (), {"f": theirs})
    child = type("Child", (parent,), {"__module__": "somewhere"})
    with caplog.at_level(logging.INFO, "grpo_kernels"):
        patches.replace(owner, "f", ours)
        patches.replace(child, "f", ours)
        owner.f = print
        patches.restore()
    assert owner.f is print
    assert "f" not in vars(child)
    for said, expected in zip(caplog.messages, (
        "patched someone's package: owner.f now comes from grpo_kernels",
        "somewhere.Child.f now comes", "somewhere.Child.f is restored", "owner.f is kept",
    ), strict=True):  # fmt: skip
        assert expected in said
    for each in (parent, child, owner):  # the child has inherited ours
        patches.replace(each, "f", ours)
    owner.f = len
    patches.replace(owner, "f", ours)  # once more
    patches.restore()
    assert parent.f is child.f is theirs
    assert owner.f is len


def test_what_is_replaced_for_a_call_comes_back_if_it_raises(owner: ModuleType) -> None:
    child = type("Child", (type("Parent", (), {"f": theirs}),), {})
    for each in (owner, SimpleNamespace(f=theirs), child, child()):
        before = dict(vars(each))
        with pytest.raises(KeyError), replaced(each, "f", ours):
            {theirs: "before"}[vars(each)["f"]]
        assert dict(vars(each)) == before
    with pytest.raises(AttributeError), all_replaced([(owner, "f", ours), (owner, "g", ours)]):
        pass
    assert owner.f is theirs, "the second could not be replaced"


def test_shares_are_of_all_calls_since_the_last_log() -> None:
    shares = Shares()
    shares.add({"tokens": (1, 4)})
    shares.add({"tokens": (torch.tensor(2), 4), "none of none": (0, 0)})
    assert shares.take() == {"tokens": 3 / 8, "none of none": 0.0}
    shares.add({"none of none": (0, 0)})
    assert shares.take() == {}, "nothing was counted"


def test_samples_are_divided_by_prompts_within_a_budget() -> None:
    prompts = numbered([(1, 2, 3)] * 4 + [(4,) * 6] * 4 + [(5,) * 2] * 4)
    lengths, live = [7, 8, 9, 6, 6, 6, 6, 6, 1, 1, 2, 1], [False] * 4 + [True] * 8
    parts = divided(prompts, lengths, live, 4, tokens=40)
    assert parts == [[4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3], [], []]
    draw = random.Random(0)
    for i in range(100):
        groups, size, count = draw.randrange(1, 6), draw.randrange(1, 5), 4
        samples, budget = size * count, size * 14
        most = {"tokens": budget} if i % 2 == 0 else {"rows": size}
        prompts = [(draw.randrange(groups), 5) for _ in range(samples)]
        lengths = [draw.randrange(1, 9) for _ in range(samples)]
        parts = divided(prompts, lengths, [True] * samples, count, **most)
        assert sorted(i for part in parts for i in part) == [*range(samples)]
        for part in parts:
            used = sum(lengths[i] for i in part) + 5 * len({prompts[i] for i in part})
            assert used <= budget if "tokens" in most else len(part) == size


@pytest.mark.parametrize(
    ("package", "use", "install"),
    [
        ("trl", "import grpo_kernels.trl", "'trl>=1.16,<1.17'"),
        ("transformers", "import grpo_kernels.transformers", "transformers"),
        ("liger_kernel", "from grpo_kernels.liger import patch_liger; patch_liger()",
         "liger-kernel"),
        ("verl", "from grpo_kernels.verl import patch_verl; patch_verl()", "'verl>=0.9'"),
    ],
)  # fmt: skip
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    package: str, use: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without(PathFinder):
        @classmethod
        def find_spec(cls, name: str, *more: Any) -> Any:
            return None if name.partition(".")[0] == package else super().find_spec(name, *more)

    for name in [*sys.modules]:
        if f"{name}.".startswith((f"{package}.", f"grpo_kernels.{package}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(vars(grpo_kernels), package, None)  # may be imported anew
    finders = [Without if x is PathFinder else x for x in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(ModuleNotFoundError) as error:
        exec(use)
    said = f"expected the package {package}, which is not installed: pip install {install}"
    assert (str(error.value), error.value.name) == (said, package)


def test_a_release_without_what_is_imported_is_named_with_its_version(tmp_path, monkeypatch):
    for folder, file, text in (
        ("old_trainer", "__init__.py", ""),
        ("old_trainer-0.9.dist-info", "METADATA", "Name: old_trainer\nVersion: 0.9\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    expected = (
        r"^expected a release of old_trainer that grpo_kernels supports, got old_trainer 0\.9, "
        r".*--upgrade 'x\[y\]'$"
    )
    for line in ("from old_trainer import LaterTrainer", "import old_trainer.later"):
        with pytest.raises(ImportError, match=expected), needed("'x[y]'", "old_trainer"):
            exec(line)
    monkeypatch.delitem(sys.modules, "old_trainer")


def test_an_error_of_another_package_is_left_as_it_is() -> None:
    wanted = r"^No module named 'no_such_package'$"
    with pytest.raises(ModuleNotFoundError, match=wanted), needed("trl", "trl"):
        importlib.import_module("no_such_package")
