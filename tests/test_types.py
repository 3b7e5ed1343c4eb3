"""What type checkers see of the package: a user's file, and that types say what the functions
themselves do."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from grpo_kernels import GRPOLoss, LossConfig, grpo_loss, typing

ROOT = Path(__file__).parents[1]
USER = ROOT / "tests" / "support" / "typed_user.py"
# Most of torch, and the packages of trainers, have no say in what is checked here, and take mypy
# half a minute.
TORCH = "torch,torch.types,torch._C.*,torch._tensor,torch.autograd,torch.autograd.grad_mode"
MODULES = "torch.nn,torch.nn.modules,torch.nn.modules.linear,torch.nn.modules.module"
MODULES += ",torch.nn.parameter,torch.utils._contextlib"
MYPY = f"""
[mypy]
python_version = 3.10
[mypy-torch.*,transformers.*,ray.*,peft.*]
follow_imports = skip
[mypy-{TORCH},{MODULES}]
follow_imports = silent
"""
PYRIGHT = {"include": [USER.name], "pythonVersion": "3.10", "typeCheckingMode": "standard"}


def run(folder: Path, *arguments: str) -> str:
    environment = {x: os.environ[x] for x in os.environ if x not in ("PYTHONPATH", "MYPYPATH")}
    options = {"capture_output": True, "text": True, "cwd": folder, "env": environment}
    done = subprocess.run([sys.executable, "-m", *arguments], **options)
    assert done.returncode == 1, done.stdout + done.stderr  # errors were found
    return done.stdout


def by_mypy(folder: Path) -> dict[int, str]:
    (folder / "mypy.ini").write_text(MYPY)
    said = run(folder, "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "user"), USER.name)
    found = re.findall(rf"^{USER.name}:(\d+): error: (.*)$", said, re.MULTILINE)
    return {int(line): text for line, text in found}


def by_pyright(folder: Path) -> dict[int, str]:
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    said = json.loads(run(folder, "basedpyright", "--outputjson", "--pythonpath", sys.executable))
    found = [x for x in said["generalDiagnostics"] if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1: x["message"] for x in found}


@pytest.mark.parametrize(("package", "checker"), [("mypy", by_mypy), ("basedpyright", by_pyright)])
def test_a_users_mistakes_are_reported_on_their_lines_and_nothing_else_is(
    package: str, checker: Callable[[Path], dict[int, str]], tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[dev]'")
    shutil.copy(USER, tmp_path)
    lines = enumerate(USER.read_text().splitlines(), start=1)
    planted = {number: line for number, line in lines if line.endswith("# wrong")}
    reported = checker(tmp_path)
    assert len(planted) > 30
    assert {line: text for line, text in reported.items() if line not in planted} == {}
    assert {number: line for number, line in planted.items() if number not in reported} == {}


def test_keywords_that_are_handed_on_have_the_names_and_types_of_the_function() -> None:
    own = {*inspect.signature(GRPOLoss.__init__).parameters}
    arguments = inspect.signature(grpo_loss).parameters.values()
    types = grpo_loss.__annotations__
    keywords = {x.name: types[x.name] for x in arguments if x.kind is x.KEYWORD_ONLY}
    of_config = {field.name: field.type for field in fields(LossConfig)}
    for handed_on, of_function in (
        (typing.LossInputKeywords, {x: y for x, y in keywords.items() if x not in own}),
        (typing.LossFields, of_config),
    ):
        written = {name: x.__forward_arg__ for name, x in handed_on.__annotations__.items()}
        assert written == of_function
