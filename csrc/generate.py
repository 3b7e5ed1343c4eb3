"""Write csrc/formulas.h: the functions of grpo_kernels/backends/formulas.py, in C++.

``python csrc/generate.py`` after a change of those. They are elementwise, of floats: arithmetic,
comparisons and calls mean in C++ what they mean in Python, once numbers are of the type T.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HEADER = Path(__file__).with_name("formulas.h")
FORMULAS = Path(__file__).parents[1] / "grpo_kernels" / "backends" / "formulas.py"
OPENING = """\
// The policy surrogates and KL estimators: made from backends/formulas.py by csrc/generate.py.
#pragma once

#include <cstdint>

#include "primitives.h"

namespace grpo_kernels {
"""


class Numbers(ast.NodeTransformer):
    """0.5 -> T(0.5)."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        assert isinstance(node.value, float), (
            f"line {node.lineno}: expected floats only, got {node.value!r}"
        )
        return ast.Call(ast.Name("T"), [node], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        assert not isinstance(node.op, ast.Pow), f"line {node.lineno}: C++ has no **; write x * x"
        return self.generic_visit(node)


def header(source: str) -> str:
    """The text of formulas.h, from that of formulas.py."""
    functions = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)}
    surrogates, estimators = (table(source, name) for name in ("SURROGATES", "ESTIMATORS"))
    counts = [len(functions[name].args.args) - 3 for name in surrogates]
    lines = [OPENING]
    for name in table(source, "HELPERS"):
        lines += [*function(functions[name], "T"), ""]
    for names, result in ((surrogates, "Surrogated<T>"), (estimators, "Estimated<T>")):
        for name in names:
            lines += [*function(functions[name], result), ""]
    lines += [
        f"enum class Surrogate : int64_t {{ {', '.join(surrogates)} }};",
        f"enum class Estimator : int64_t {{ none, {', '.join(estimators)} }};",
        f"constexpr const char* kSurrogates[] = {{{quoted(surrogates)}}};",
        f"constexpr const char* kEstimators[] = {{{quoted(['none', *estimators])}}};",
        f"constexpr int64_t kConstants[] = {{{', '.join(map(str, counts))}}};",
        f"constexpr int64_t kMostConstants = {max(counts)};",
        "",
        "// `advantage` is on-policy d loss / d logp; `c` are the surrogate's constants.",
        "template <class T>",
        "Surrogated<T> surrogate(Surrogate which, T log_ratio, T advantage, T logp, const T* c) {",
        "  switch (which) {",
    ]
    for name, count in zip(surrogates, counts, strict=True):
        constants = "".join(f", c[{i}]" for i in range(count))
        lines.append(
            f"    case Surrogate::{name}: return {name}(log_ratio, advantage, logp{constants});"
        )
    lines += ["  }", "  return {NAN, NAN, NAN};", "}", ""]
    lines += [
        "template <class T>",
        "Estimated<T> estimate_kl(Estimator which, T logp, T ref) {",
        "  switch (which) {",
    ]
    lines += [f"    case Estimator::{name}: return {name}(logp, ref);" for name in estimators]
    lines += ["    case Estimator::none: break;", "  }", "  return {NAN, NAN, NAN};", "}", ""]
    return "\n".join([*lines, "}  // namespace grpo_kernels", ""])


def quoted(names: list[str]) -> str:
    """The names as C++ strings."""
    return ", ".join(f'"{name}"' for name in names)


def table(source: str, name: str) -> list[str]:
    """The functions that a table of formulas.py names, in its order."""
    assigned = [x for x in ast.parse(source).body if isinstance(x, (ast.Assign, ast.AnnAssign))]
    value = next(x.value for x in assigned if name in ast.unparse(x).split("=")[0])
    names = next(x for x in ast.walk(value) if isinstance(x, ast.Tuple))
    return [ast.unparse(x) for x in names.elts]


def function(node: ast.FunctionDef, result: str) -> Iterator[str]:
    """The lines of one function, with the first of its docstring."""
    body = node.body[1:]
    yield f"// {ast.get_docstring(node).splitlines()[0]}".replace("`", "")
    used = {x.id for statement in body for x in ast.walk(statement) if isinstance(x, ast.Name)}
    arguments = ", ".join(f"T {x.arg}" if x.arg in used else "T" for x in node.args.args)
    yield "template <class T>"
    yield f"{result} {node.name}({arguments}) {{"
    for statement in body:
        value = Numbers().visit(statement.value)
        if isinstance(statement, ast.Assign):
            yield f"  const auto {ast.unparse(statement.targets[0])} = {ast.unparse(value)};"
        elif isinstance(value, ast.Tuple):
            yield f"  return {{{', '.join(map(ast.unparse, value.elts))}}};"
        else:
            yield f"  return {ast.unparse(value)};"
    yield "}"


if __name__ == "__main__":
    HEADER.write_text(header(FORMULAS.read_text()))
