"""Write csrc/formulas.h: the functions of grpo_kernels/backends/formulas.py, in C++.

``python csrc/generate.py`` after a change of those. They are elementwise, of floats: arithmetic,
comparisons and calls mean in C++ what they mean in Python, once numbers are of the type T.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

HEADER = Path(__file__).with_name("formulas.h")
PRIMITIVES = Path(__file__).with_name("primitives.h")
FORMULAS = Path(__file__).parents[1] / "grpo_kernels" / "backends" / "formulas.py"
OPENING = """\
// The policy surrogates and KL estimators: made from backends/formulas.py by csrc/generate.py.
#pragma once

#include <cstdint>

#include "primitives.h"

namespace grpo_kernels {
"""


OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.USub)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
ALLOWED = "floats, names, + - * / & |, one comparison, functions of csrc/primitives.h or HELPERS"


class Formula(ast.NodeTransformer):
    """A function's expressions in C++: 0.5 -> T(0.5).

    `callees` are the functions that it may call.
    """

    def __init__(self, function: ast.FunctionDef, callees: set[str]) -> None:
        self.function, self.callees = function.name, callees
        self.names = {x.arg for x in function.args.args}

    def refuse(self, node: ast.AST, allowed: str) -> NoReturn:
        """Raise: C++ lacks `node`, or reads it otherwise than Python."""
        got = ast.unparse(node).splitlines()[0]
        where = f"formulas.py, line {node.lineno}, {self.function}"
        raise ValueError(f"{where}: expected {allowed}, got `{got}`")

    def visit(self, node: ast.AST) -> ast.AST:
        """Translate an expression."""
        match node:
            case ast.Constant(value=float()):
                return ast.Call(ast.Name("T"), [node], [])
            case ast.Name(id=name) if name in self.names:
                return node
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in self.callees:
                return ast.Call(node.func, [self.visit(x) for x in node.args], [])
            case ast.Compare(left, [op], [right]) if isinstance(op, COMPARISONS):
                # unlike Python's, C++'s & and | bind less than comparisons
                if not any(is_bitwise(x) for x in (left, right)):
                    return self.generic_visit(node)
            case ast.BinOp(op=op) | ast.UnaryOp(op=op) if isinstance(op, OPERATORS):
                return self.generic_visit(node)
            case ast.operator() | ast.unaryop() | ast.cmpop():
                return node
        self.refuse(node, ALLOWED)


def is_bitwise(node: ast.AST) -> bool:
    """True for x & y and x | y."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr))


def header(source: str) -> str:
    """The text of formulas.h, from that of formulas.py."""
    functions = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)}
    surrogates, estimators = (table(source, name) for name in ("SURROGATES", "ESTIMATORS"))
    counts = [len(functions[name].args.args) - 3 for name in surrogates]
    lines = [OPENING]
    callees = set(re.findall(r"^(?:T |using std::)(\w+)", PRIMITIVES.read_text(), re.MULTILINE))
    for name in table(source, "HELPERS"):
        lines += [*function(functions[name], "T", callees), ""]
        callees.add(name)
    for names, result in ((surrogates, "SurrogateTerms<T>"), (estimators, "KlTerms<T>")):
        for name in names:
            lines += [*function(functions[name], result, callees), ""]
    lines += [
        f"enum class Surrogate : int64_t {{ none, {', '.join(surrogates)} }};",
        f"enum class Estimator : int64_t {{ none, {', '.join(estimators)} }};",
        f"constexpr const char* kSurrogates[] = {{{quoted(['none', *surrogates])}}};",
        f"constexpr const char* kEstimators[] = {{{quoted(['none', *estimators])}}};",
        f"constexpr int64_t kConstantCounts[] = {{{', '.join(map(str, [0, *counts]))}}};",
        f"constexpr int64_t kMostConstants = {max(counts)};",
        "",
        "// `c` are the surrogate's constants.",
        "template <class T>",
        "SurrogateTerms<T> surrogate(Surrogate which, T log_ratio, T advantage, T logp, "
        "const T* c) {",
        "  switch (which) {",
    ]
    for name, count in zip(surrogates, counts, strict=True):
        constants = "".join(f", c[{i}]" for i in range(count))
        lines.append(
            f"    case Surrogate::{name}: return {name}(log_ratio, advantage, logp{constants});"
        )
    lines += ["    case Surrogate::none: break;", "  }", "  return {NAN, NAN, NAN};", "}", ""]
    lines += [
        "template <class T>",
        "KlTerms<T> estimate_kl(Estimator which, T logp, T ref) {",
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


def function(node: ast.FunctionDef, result: str, callees: set[str]) -> Iterator[str]:
    """The lines of one function, with the first of its docstring."""
    formula, docstring, body = Formula(node, callees), ast.get_docstring(node), node.body[1:]
    if not docstring:
        formula.refuse(node, "a docstring, whose first line becomes the comment")
    if not body or not isinstance(body[-1], ast.Return):
        formula.refuse(node, "a return at the end")
    yield f"// {docstring.splitlines()[0]}".replace("`", "")
    used = {x.id for statement in body for x in ast.walk(statement) if isinstance(x, ast.Name)}
    arguments = ", ".join(f"T {x.arg}" if x.arg in used else "T" for x in node.args.args)
    yield "template <class T>"
    yield f"{result} {node.name}({arguments}) {{"
    for statement in body:
        match statement:
            case ast.Assign([ast.Name(id=name)], value) if name not in formula.names:
                yield f"  const auto {name} = {ast.unparse(formula.visit(value))};"
                formula.names.add(name)
            case ast.Return(ast.Tuple(values)) if len(values) == 3 and result != "T":
                yield f"  return {{{', '.join(ast.unparse(formula.visit(x)) for x in values)}}};"
            case ast.Return(ast.expr() as value) if result == "T":
                yield f"  return {ast.unparse(formula.visit(value))};"
            case _:
                returned = "one value" if result == "T" else "three values"
                allowed = "`name = value`, with a name once, or a return of"
                formula.refuse(statement, f"{allowed} {returned}")
    yield "}"


if __name__ == "__main__":
    HEADER.write_text(header(FORMULAS.read_text()))
