"""What is said where a trainer's package is missing or too old."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels.host import needed

USES = {  # package -> what needs it, and how to install that
    "trl": ("import grpo_kernels.trl", "'trl>=1.16'"),
    "transformers": ("import grpo_kernels.transformers", "transformers"),
    "liger_kernel": ("from grpo_kernels.liger import patch_liger; patch_liger()", "liger-kernel"),
    "verl": ("from grpo_kernels.verl import patch_verl; patch_verl()", "'verl>=0.9'"),
}
WITHOUT = f"""
import json, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        return None if name.partition(".")[0] in {[*USES]} else super().find_spec(name, *more)

sys.meta_path[:] = [Without if x is PathFinder else x for x in sys.meta_path]
said = {{}}
for package, (use, _) in {USES}.items():
    try:
        exec(use)
    except ImportError as error:
        said[package] = [type(error).__name__, str(error), error.name]
print(json.dumps(said))
"""


def test_a_package_that_is_not_installed_is_named_with_its_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == {
        package: [
            "ModuleNotFoundError",
            f"expected the package {package}, which is not installed: pip install {install}",
            package,
        ]
        for package, (_, install) in USES.items()
    }


@pytest.mark.parametrize(
    ("name", "what"), [("", "LaterTrainer"), (".later", "it")], ids=["name", "module"]
)
def test_a_release_without_what_is_imported_is_named_with_its_version(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old_trainer").mkdir()
    (tmp_path / "old_trainer" / "__init__.py").touch()
    (tmp_path / "old_trainer-0.9.dist-info").mkdir()
    (tmp_path / "old_trainer-0.9.dist-info" / "METADATA").write_text(
        "Name: old_trainer\nVersion: 0.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = r"^expected a release of old_trainer that grpo_kernels knows, got old_trainer 0\.9, .*--upgrade 'x\[y\]'$"
    with pytest.raises(ImportError, match=expected), needed("'x[y]'", "old_trainer"):
        exec(f"from old_trainer{name} import {what}")
    monkeypatch.delitem(sys.modules, "old_trainer")


def test_an_error_of_another_package_is_left_as_it_is() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"),
        needed("trl", "trl"),
    ):
        importlib.import_module("no_such_package")
