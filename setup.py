"""What pyproject.toml cannot say.

csrc/ is shipped as data, a wheel may hold the library compiled from it, and a package index gets
README.md without what leads nowhere there.

A wheel is pure unless the option ``--native`` is given (`make wheel`); then torch has to be
installed, and the wheel works with any torch and Python of its platform, since the library uses
torch's stable ABI and nothing of Python.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY = "grpo_kernels.backends.cpp_rows.grpo_kernels_cpp"


ELSEWHERE = r"(?:https?:|mailto:)"
REFERENCE = rf"^\[([^]]+)\]:[ \t]*(?!\s|{ELSEWHERE})\S.*\n?"  # [name]: of a file in the checkout


def long_description(readme: str) -> str:
    """`readme` (markdown) without pictures and links to files; code stays as it is."""
    # code at the odd places
    pieces = re.split(r"(^```.*?^```[^\n]*$)", readme, flags=re.DOTALL | re.MULTILINE)
    names = [
        name for piece in pieces[::2] for name in re.findall(REFERENCE, piece, flags=re.MULTILINE)
    ]
    pieces[::2] = [without_files(piece, names) for piece in pieces[::2]]
    return "".join(pieces)


def without_files(prose: str, names: list[str]) -> str:
    """`prose` without pictures and links to files; `names` are links defined elsewhere."""
    pictures = r"<picture\b.*?</picture>|<img\b[^>]*>|!\[[^]]*\](?:\([^)]*\)|\[[^]]*\])"
    prose = re.sub(pictures, "", prose, flags=re.DOTALL)
    prose = re.sub(r"\[\s*\]\([^)]*\)", "", prose)  # links that were a picture
    prose = re.sub(REFERENCE, "", prose, flags=re.MULTILINE)
    for name in names:
        prose = re.sub(rf"\[([^]]*)\]\[{re.escape(name)}\]", r"\1", prose)
    prose = re.sub(rf"\[([^]]*)\]\((?!{ELSEWHERE})[^)]*\)", r"\1", prose)
    prose = re.sub(rf"<a\s+href=\"(?!{ELSEWHERE})[^>]*>(.*?)</a>", r"\1", prose, flags=re.DOTALL)
    return re.sub(r"\n{3,}", "\n\n", prose)


class NativeWheel(bdist_wheel):
    """Takes the option, and tags the wheel with its platform alone."""

    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("native", None, "with the C++ library inside"),
    ]

    def initialize_options(self):
        super().initialize_options()
        self.native = False

    def finalize_options(self):
        if self.native:
            self.distribution.ext_modules = [Extension(LIBRARY, sources=[])]
        super().finalize_options()

    def get_tag(self):
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if self.native else tag


class Modules(build_py):
    """Without csrc/generate.py, which writes csrc/formulas.h in a checkout."""

    def find_package_modules(self, package, package_dir):
        return (
            []
            if package == "grpo_kernels.csrc"
            else super().find_package_modules(package, package_dir)
        )


class BuildLibrary(build_ext):
    """Has the package itself build its library, in a process of its own."""

    def get_ext_filename(self, name):
        return f"{name.replace('.', '/')}.so"

    def build_extension(self, extension):
        folder = Path(self.get_ext_fullpath(extension.name)).resolve().parent
        command = [
            sys.executable,
            "-m",
            "grpo_kernels.backends.cpp_rows.build",
            "--into",
            str(folder),
        ]
        subprocess.run(command, cwd=ROOT, check=True)


setup(
    long_description=long_description((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["grpo_kernels*"]), "grpo_kernels.csrc"],
    package_dir={"grpo_kernels.csrc": "csrc"},
    cmdclass={"bdist_wheel": NativeWheel, "build_ext": BuildLibrary, "build_py": Modules},
)
