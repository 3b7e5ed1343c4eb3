"""The package as a whole: what using it does, and how its layers import each other."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import grpo_kernels
from grpo_kernels import grpo_loss, linear_divergence
from grpo_kernels.commands import report

ROOT = Path(grpo_kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# these follow their trainer
DOORS = {"body", "patching.py", "liger.py", "transformers", "trl", "verl", "verl_plugin.py"}
DOORS |= {"scripts.py"}  # of the commands
CORE = [x for x in FILES if not DOORS & {x.name, x.relative_to(ROOT).parts[0]}]
# a compiler's and a cache's files, and the variables that any user of such knows, none of our own
BUILDING = {
    ROOT / "backends" / "cpp_rows" / "build.py": {"TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME", "CXX"}
}
HEAVY = ["accelerate", "datasets", "liger_kernel", "matplotlib", "pandas", "peft"]
HEAVY += ["transformers", "triton", "trl", "verl"]

# folder -> the folders that its files may reach, through whatever they import; its own is one of
# them
REACHES: dict[str, set[str]] = {"base": set(), "patching": set()}
REACHES |= {name: {"base"} for name in ("advantages", "rewards", "rollouts")}
REACHES |= {name: {"base"} for name in ("backends", "head", "tokens")}
REACHES |= {
    # the vocabulary, and no policy
    "engine": {"base", "backends", "head", "tokens"},
    # the policy, and no vocabulary
    "objective": {"base", "backends", "tokens"},
    # the model below the head, and no loss
    "body": {"base", "head", "patching"},
}
REACHES["calls"] = {*REACHES} - {"advantages", "rewards", "rollouts", "body", "patching"}
REACHES["liger"] = {*REACHES["calls"], "calls", "patching"}
REACHES["transformers"] = {*REACHES["liger"], "body"}
REACHES |= {name: {*REACHES["transformers"], "transformers"} for name in ("trl", "verl")}
REACHES["commands"] = {*REACHES["trl"], "trl"}
FILES_OF = {name: {name} for name in REACHES} | {
    "objective": {"objectives", "presets", "testing"},
    "tokens": {"tokens", "kept_ids"},
    "head": {"head", "head_module"},
    "calls": {"loss", "results", "scores", "typing"},
    "verl": {"verl_plugin"},
    "commands": {"__main__"},
}


def folder(path: Path) -> str:
    """grpo_kernels/engine/sweep.py -> engine; of the files at the top, as `FILES_OF` says."""
    first, *more = path.relative_to(ROOT).parts
    if more:
        return first
    return next(name for name, files in FILES_OF.items() if first.removesuffix(".py") in files)


def imported(path: Path, *, for_types: bool = True) -> set[Path]:
    """What the file imports; with `for_types`, also what it imports for type checkers alone."""
    found: set[str] = set()
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    checked = [x for x in nodes if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
    left_out = [] if for_types else [x for node in checked for x in node.body]
    for node in nodes:
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the whole path"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {MODULES[name] for name in found if name in MODULES}


def reached(path: Path, imports: dict[Path, set[Path]]) -> set[Path]:
    found: set[Path] = set()
    ahead = imports[path]
    while ahead:
        found |= ahead
        ahead = {more for file in ahead for more in imports[file]} - found
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for path in FILES if path.parent != ROOT or path.stem != "__init__"
}
IMPORTS = {path: imported(path) for path in MODULES.values()}


USED = f"""
import sys, torch
before = [name for name in {HEAVY} if name in sys.modules]  # torch itself may load some of them
import grpo_kernels
assert before == [name for name in {HEAVY} if name in sys.modules]
assert "grpo_kernels.liger" not in sys.modules
assert grpo_kernels.liger.patch_liger.__module__ == "grpo_kernels.liger"
run = grpo_kernels.Run(backend="torch")
grpo_kernels.linear_logps(torch.ones(5, 3), torch.ones(7, 3), torch.arange(5), run=run)
"""


def test_use_loads_nothing_that_was_not_asked_for_says_nothing_and_warns_of_nothing():
    command = [sys.executable, "-W", "error::DeprecationWarning:grpo_kernels", "-c", USED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with pytest.raises(AttributeError, match="no attribute 'tlr'"):
        _ = grpo_kernels.tlr


def test_public_names_are_documented_by_one_first_line():
    for module in ("advantages", "objectives", "rewards", "rollouts", "testing"):
        public = importlib.import_module(f"grpo_kernels.{module}")
        for name in public.__all__:
            lines = inspect.getdoc(getattr(public, name)).splitlines()
            assert lines[0].endswith(".") and lines[1:2] in ([], [""]), name


def test_dir_is_what_is_public():
    shown = {name for name in dir(grpo_kernels) if not name.startswith("__")}
    assert shown == {*grpo_kernels.__all__, "typing"}
    assert all(hasattr(grpo_kernels, name) for name in dir(grpo_kernels))


def test_self_check_sees_a_wrong_result(monkeypatch):
    def half(*args: Any, **kwargs: Any) -> Any:
        out = grpo_loss(*args, **kwargs)
        object.__setattr__(out, "loss", out.loss * 0.5)
        return out

    def off(*args: Any, **kwargs: Any) -> Any:
        found = linear_divergence(*args, **kwargs)
        return replace(found, divergence=1.01 * found.divergence)

    monkeypatch.setattr(report, "linear_divergence", off)
    for loss, detail in ((half, "in "), (Mock(side_effect=RuntimeError("no")), "RuntimeError: no")):
        monkeypatch.setattr(report, "grpo_loss", loss)
        for check in report.check():
            assert not check["ok"]
            assert check["detail"].startswith(detail) or "grpo_loss" not in check["name"]


def test_imports_flow_one_way():
    assert {folder(path) for path in IMPORTS} == REACHES.keys()
    for path in IMPORTS:
        allowed = REACHES[folder(path)] | {folder(path)}
        beyond = {file for file in reached(path, IMPORTS) if folder(file) not in allowed}
        assert not beyond, (path, beyond)


def test_no_file_reaches_itself():
    when_run = {path: imported(path, for_types=False) for path in IMPORTS}
    assert [path for path in IMPORTS if path in reached(path, when_run)] == []


def test_core_reads_no_environment_variable():
    for path in CORE:
        text = path.read_text()
        read = re.findall(r'environ\.get\("(\w+)"', text)
        assert set(read) == BUILDING.get(path, set()), path
        assert len(re.findall(r"\b(?:os\.)?(?:environb?|getenv|putenv)\b", text)) == len(read), path


def test_the_library_leaves_logging_to_the_application() -> None:
    assert [type(x) for x in logging.getLogger("grpo_kernels").handlers] == [logging.NullHandler]
