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
SOURCES = {
    path.name for path in (CHECKOUT / "csrc").iterdir() if path.suffix in (".cpp", ".h", ".inl")
}
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


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def modules() -> set[str]:
    return {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "grpo_kernels").rglob("*.py")}


def in_installed(code: str, wheel: Path, folder: Path) -> list[str]:
    zipfile.ZipFile(wheel).extractall(folder)
    environment = {
        "PYTHONPATH": folder,
        "PATH": "",
        "CXX": "",
        "TORCH_EXTENSIONS_DIR": folder / "cache",
    }
    words = run(sys.executable, "-c", code, cwd=folder.parent, **environment).split()
    assert not (folder / "cache").exists()
    return words


@pytest.mark.slow
def test_wheels_native_and_pure(tree, tmp_path):
    """In one test, since what one leaves behind must not get into the other."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text(
        "raise ImportError('a plain build imports no torch')"
    )
    copier = script(tmp_path / "cxx", f'cp "{build.load().path}" "$out"')
    native = pack(tree, "wheel", tmp_path / "native", NATIVE, CXX=copier)
    pure = pack(tree, "wheel", tmp_path / "pure", PYTHONPATH=tmp_path / "broken")

    assert pure.name.endswith("-py3-none-any.whl")
    shipped = {name for name in names(pure) if ".dist-info/" not in name}
    data = {"grpo_kernels/py.typed", "grpo_kernels/backends/triton_rows/tuned.json"}
    assert shipped == modules() | data | {f"grpo_kernels/csrc/{name}" for name in SOURCES}
    ask = "from grpo_kernels.backends.cpp_rows.build import *; "
    ask += "print(source_folder(), cache_key())"
    found, key = in_installed(ask, pure, tmp_path / "site1")
    assert Path(found) == tmp_path / "site1" / "grpo_kernels" / "csrc"
    assert key == build.cache_key()

    assert re.search(r"-py3-none-(\w+)\.whl$", native.name)[1] in platform_tags()
    assert {name for name in names(native) if ".dist-info/" not in name} == shipped | {LIBRARY}
    ask = "from grpo_kernels.backends.cpp_rows.build import *; print(load().origin, load().path)"
    origin, path = in_installed(ask, native, tmp_path / "site2")
    assert (origin, Path(path)) == ("prebuilt", tmp_path / "site2" / LIBRARY)


def test_native_wheel_without_a_compiler_is_refused(tree, tmp_path):
    with pytest.raises(AssertionError, match="no-such-compiler, which CXX names, is not on PATH"):
        pack(tree, "wheel", tmp_path / "native", NATIVE, CXX="no-such-compiler")
    assert not list((tmp_path / "native").iterdir())


def test_a_source_archive_has_all_that_a_wheel_is_made_of_and_no_part_of_the_tests(tree, tmp_path):
    (tree / "tests").mkdir()
    (tree / "tests" / "test_something.py").write_text(
        "# setuptools would take it, and leave what it imports"
    )
    with tarfile.open(pack(tree, "sdist", tmp_path / "sdist")) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.name != "sdist")
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    data = {"grpo_kernels/py.typed", "grpo_kernels/backends/triton_rows/tuned.json"}
    wanted = TOP | MADE | modules() | data | {f"csrc/{name}" for name in SOURCES}
    assert {name for name in packed if ".egg-info/" not in name} == wanted

    wheel = pack(unpacked, "wheel", tmp_path / "wheel")
    shipped = modules() | data | {f"grpo_kernels/csrc/{name}" for name in SOURCES}
    assert {name for name in names(wheel) if ".dist-info/" not in name} == shipped


def test_one_version_everywhere():
    texts = {name: (CHECKOUT / name).read_text() for name in ("pyproject.toml", "CITATION.cff")}
    found = {
        name: re.search(r'^version(?:: | = ")([^"\n]+)', text, re.MULTILINE)
        for name, text in texts.items()
    }
    assert {name: match and match[1] for name, match in found.items()} == dict.fromkeys(
        texts, grpo_kernels.__version__
    )


def test_our_readme_has_no_link_to_a_file_on_a_package_index(tree):
    run(sys.executable, "setup.py", "--quiet", "egg_info", cwd=tree)
    shown = (tree / "grpo_kernels.egg-info" / "PKG-INFO").read_text().partition("\n\n")[2]
    prose = "".join(re.split(r"^```.*?^```", shown, flags=re.DOTALL | re.MULTILINE))
    assert shown.startswith("# ")
    assert len(prose) > 1000
    assert not re.findall(r"<img|<picture|!\[", prose)
    assert not [
        target for target in re.findall(r"\]\(([^)]*)\)", prose) if not target.startswith("http")
    ]
