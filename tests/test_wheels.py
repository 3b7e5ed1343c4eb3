"""What is packed: pure wheels, source archives, and a wheel with the C++ library inside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.tags import platform_tags

import grpo_kernels
from grpo_kernels.backends.cpp_rows import build
from tests.support.acted_build import script

pytestmark = pytest.mark.unit

CHECKOUT = Path(grpo_kernels.__file__).parents[1]
SOURCES = {x.name for x in (CHECKOUT / "csrc").iterdir() if x.suffix in (".cpp", ".h", ".inl")}
SHIPPED = {str(x.relative_to(CHECKOUT)) for x in (CHECKOUT / "grpo_kernels").rglob("*.py")}
SHIPPED |= {"grpo_kernels/py.typed", "grpo_kernels/backends/triton_rows/tuned.json"}
IN_WHEEL = SHIPPED | {f"grpo_kernels/csrc/{name}" for name in SOURCES}
LIBRARY = "grpo_kernels/backends/cpp_rows/grpo_kernels_cpp.so"
TOP = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
MADE = {"PKG-INFO", "setup.cfg"}
NATIVE = '{"--build-option": "--native"}'


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in ("grpo_kernels", "csrc"):
        shutil.copytree(
            CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    for name in TOP:
        shutil.copy(CHECKOUT / name, folder)
    return folder


def run(*command: str, cwd: Path, **environment: object) -> str:
    env = os.environ | {name: str(value) for name, value in environment.items()}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pack(tree: Path, kind: str, into: Path, options: str = "{}", **environment: object) -> Path:
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r}, {options})"
    run(sys.executable, "-c", code, cwd=tree, **environment)
    (made,) = into.iterdir()
    return made


def files_of(wheel: Path) -> set[str]:
    return {x for x in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in x}


def installed(wheel: Path, folder: Path, shown: str) -> list[str]:
    """What the build module of a wheel shows, where there is no compiler."""
    zipfile.ZipFile(wheel).extractall(folder)
    code, cache = "from grpo_kernels.backends.cpp_rows.build import *; print(", folder / "cache"
    environment = {"PYTHONPATH": folder, "PATH": "", "CXX": "", "TORCH_EXTENSIONS_DIR": cache}
    words = run(sys.executable, "-c", f"{code}{shown})", cwd=folder.parent, **environment).split()
    assert not cache.exists()
    return words


@pytest.mark.slow
def test_wheels_native_and_pure(tree, tmp_path):
    """In one test, since what one leaves behind must not get into the other."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text("raise ImportError('a plain build imports no torch')")
    copier = script(tmp_path / "cxx", f'cp "{build.load().path}" "$out"')
    native = pack(tree, "wheel", tmp_path / "native", NATIVE, CXX=copier)
    pure = pack(tree, "wheel", tmp_path / "pure", PYTHONPATH=tmp_path / "broken")

    assert pure.name.endswith("-py3-none-any.whl")
    assert files_of(pure) == IN_WHEEL
    found, key = installed(pure, tmp_path / "site1", "source_folder(), cache_key()")
    assert Path(found) == tmp_path / "site1" / "grpo_kernels" / "csrc"
    assert key == build.cache_key()

    assert re.search(r"-py3-none-(\w+)\.whl$", native.name)[1] in platform_tags()
    assert files_of(native) == IN_WHEEL | {LIBRARY}
    origin, path = installed(native, tmp_path / "site2", "load().origin, load().path")
    assert (origin, Path(path)) == ("prebuilt", tmp_path / "site2" / LIBRARY)


@pytest.mark.slow
def test_native_wheel_without_a_compiler_is_refused(tree, tmp_path):
    with pytest.raises(AssertionError, match="no-such-compiler, which CXX names, is not on PATH"):
        pack(tree, "wheel", tmp_path / "native", NATIVE, CXX="no-such-compiler")
    assert not list((tmp_path / "native").iterdir())


def test_a_source_archive_has_all_that_a_wheel_is_made_of_and_no_part_of_the_tests(tree, tmp_path):
    (tree / "tests").mkdir()
    (tree / "tests" / "test_something.py").write_text("# setuptools would take it")
    with tarfile.open(pack(tree, "sdist", tmp_path / "sdist")) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.name != "sdist")
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    wanted = TOP | MADE | SHIPPED | {f"csrc/{name}" for name in SOURCES}
    assert {name for name in packed if ".egg-info/" not in name} == wanted
    assert files_of(pack(unpacked, "wheel", tmp_path / "wheel")) == IN_WHEEL


def test_one_version_everywhere():
    for name in ("pyproject.toml", "CITATION.cff"):
        text = (CHECKOUT / name).read_text()
        found = re.findall(r'^version(?:: | = ")([^"\n]+)', text, re.MULTILINE)
        assert found == [grpo_kernels.__version__], name


def test_our_readme_has_no_link_to_a_file_on_a_package_index(tree):
    run(sys.executable, "setup.py", "--quiet", "egg_info", cwd=tree)
    shown = (tree / "grpo_kernels.egg-info" / "PKG-INFO").read_text().partition("\n\n")[2]
    prose = "".join(re.split(r"^```.*?^```", shown, flags=re.DOTALL | re.MULTILINE))
    assert shown.startswith("# ") and len(prose) > 1000
    assert not re.findall(r"<img|<picture|!\[", prose)
    assert all(target.startswith("http") for target in re.findall(r"\]\(([^)]*)\)", prose))
