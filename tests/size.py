"""`python -m tests.size`: lines, files, records and marks of test files of the project."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
AREAS = {  # name -> (folder, kinds of files)
    "package": ("grpo_kernels", (".py",)),
    "C++": ("csrc", (".cpp", ".h", ".inl", ".py")),
    "tests": ("tests", (".py",)),
    "tests/support": ("tests/support", (".py",)),
    "benchmarks": ("benchmarks", (".py",)),
    "examples": ("examples", (".py", ".sh", ".yaml")),
    "docs": ("docs", (".md",)),
}
RECORDS = ("dataclass", "NamedTuple", "TypedDict", "Protocol")


def files(folder: str, kinds: Iterable[str]) -> list[Path]:
    """The files of these kinds below `folder`, without hidden and generated folders."""
    found = (x for kind in kinds for x in (ROOT / folder).rglob(f"*{kind}"))
    return sorted(x for x in found if not {"__pycache__", "site"} & {*x.parts})


def records(tree: ast.AST) -> Counter[str]:
    """Classes of a module that only carry values, by kind: their decorators and bases tell."""
    kinds: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            words = " ".join(ast.unparse(x) for x in (*node.decorator_list, *node.bases))
            kinds.update([next((x for x in RECORDS if x in words), "")])
    del kinds[""]
    return kinds


def main() -> None:
    """Print the table."""
    print(f"{'':16}{'lines':>8}{'files':>8}")
    for name, (folder, kinds) in AREAS.items():
        found = files(folder, kinds)
        lines = sum(len(x.read_text(encoding="utf-8").splitlines()) for x in found)
        print(f"{name:16}{lines:8,}{len(found):8}")
    package = [ast.parse(x.read_text(encoding="utf-8")) for x in files("grpo_kernels", (".py",))]
    kinds = sum((records(tree) for tree in package), Counter())
    print(f"records {kinds.total():>16}  " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    tests = [ast.parse(x.read_text(encoding="utf-8")) for x in files("tests", ("/test_*.py",))]
    unit = sum("pytest.mark.unit" in ast.unparse(tree) for tree in tests)
    print(f"test files {len(tests):13}  {unit} unit, {len(tests) - unit} contract")


if __name__ == "__main__":
    main()
