"""The functions of `token_loss.formulas`, compiled: their text, with the functions below in the place of torch's.

Triton finds a function's text through its code object, and the functions that it calls in its globals.
"""

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.mathfn import exp, expm1, sigmoid
from grpo_kernels.token_loss import formulas


@triton.jit
def where(condition, x, y):
    """x where the condition holds, else y."""
    return tl.where(condition, x, y)


@triton.jit
def minimum(x, y):
    """The lesser; y where either is NaN."""
    return tl.where(x < y, x, y)


@triton.jit
def clamp_max(x, most):
    """x, at most `most`; NaN stays."""
    return tl.where(x > most, most, x)


@triton.jit
def clamp(x, least, most):
    """x, at least `least` and at most `most`; NaN stays."""
    return clamp_max(tl.where(x < least, least, x), most)


@triton.jit
def type_as(condition, x):
    """1 where the condition holds, else 0."""
    return tl.where(condition, 1.0, 0.0)


@triton.jit
def full_like(x, value):
    """`value` in the shape of x."""
    return tl.full(x.shape, value, tl.float32)


_GLOBALS: dict[str, Any] = {
    "__name__": formulas.__name__,
    "tl": tl,  # the interpreter looks for it
    **{
        f.__name__: f
        for f in (clamp, clamp_max, exp, expm1, full_like, minimum, sigmoid, type_as, where)
    },
}


def compiled(formula: Any, names: dict[str, Any] = _GLOBALS) -> Any:
    """Compile a function of `formulas` for kernels; helpers first, since the others call them by name.

    Args:
        names: the function's globals, to which it is added.
    """
    made = triton.jit(FunctionType(formula.__code__, names, formula.__name__))
    return names.setdefault(formula.__name__, made)


for _helper in formulas.HELPERS:
    compiled(_helper)
times = _GLOBALS["times"]
SURROGATES = {name: compiled(f) for name, f in formulas.SURROGATES.items()}
ESTIMATORS: dict[str | None, Any] = {
    None: None,
    **{name: compiled(f) for name, f in formulas.ESTIMATORS.items()},
}
