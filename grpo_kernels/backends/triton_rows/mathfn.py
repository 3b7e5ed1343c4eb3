"""Elementary functions in fp32, and the functions of `backends.formulas`, compiled for kernels.

The functions are accurate to a few units in the last place of the result, even near 0. They are
written here because Triton's interpreter lacks libdevice. They build on these builtins (checked in
the PTX that Triton emits):

- ``tl.exp2`` is ``ex2.approx.ftz.f32``, one instruction, accurate to 2^-22. ``tl.exp(x)`` applies
  that to the rounded product x * log2(e), with three more instructions for results below 2^-126.
  The rounding costs a relative error of |x| * 7e-8, as much as any difference x = z - m has by
  itself: good enough for the terms of a sum over the vocabulary (`exp_term`). A ratio exp(R) needs
  more precision, and there is only one per row: `exp`.
- ``tl.log`` is libdevice's polynomial, not ``lg2.approx``: accurate to one or two units in the last
  place, even near 1. The corrections below (`log1p`, `expm1`) need no more precision.
- ``/`` is ``div.full.f32`` (2 units in the last place). There is no fp64 anywhere.
- ``tl.maximum`` and ``tl.max`` return the other operand if one is NaN; in the interpreter they
  return NaN. Code that must not depend on that uses ``tl.where``, or ``propagate_nan``.

Triton compiles the text of the formulas with the functions below instead of torch's: it finds a
function's text through the code object, and the functions called in the function's globals.
"""

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from grpo_kernels.backends import formulas

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)
SIGN_BIT = tl.constexpr(-(2**31))
LN2_HIGH = tl.constexpr(0.693359375)  # 10 bits: its product with a whole exponent is exact
LN2_LOW = tl.constexpr(-2.1219444005469058e-4)  # ln 2 - LN2_HIGH


@triton.jit
def exp_term(x):
    """e^x for terms of a sum, x <= 0: few instructions, with a relative error of |x| * 7e-8."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exp(x):
    """e^x with the same relative error for all x: the power of 2 is a separate factor."""
    # e^x is inf above the first bound and 0 below the second; NaN stays
    x = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))
    n = tl.floor(x * LOG2_E + 0.5)
    # 2 * 2^(n - 1), since 2^n overflows before e^x does
    return 2.0 * tl.exp((x - n * LN2_HIGH) - n * LN2_LOW) * tl.exp2(n - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1, with a correction for what 1 + x lost to rounding.

    Below -1/2 nothing is lost: 1 + x is exact there.
    """
    u = 1.0 + x
    lost = x - (u - 1.0)
    # nothing is lost either if x is inf
    return tl.where(u - 1.0 == x, tl.log(u), tl.log(u) + lost / u)


@triton.jit
def expm1(x):
    """e^x - 1. Near 0 as (u - 1) * x / log u: an error of u = e^x cancels in (u - 1) / log u."""
    u = exp(x)
    near = tl.where(u == 1.0, x, (u - 1.0) * x / tl.log(u))
    return tl.where(tl.abs(x) < 1.0, near, u - 1.0)


@triton.jit
def softplus(x):
    """log(1 + e^x)."""
    return tl.where(x > 0, x, 0.0) + log1p(exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def tanh(x):
    """tanh(x): a series near 0, elsewhere (1 - q) / (1 + q) with q = e^(-2 |x|).

    The series has the coefficients of Cephes' tanhf.
    """
    s = x * x
    series = tl.fma(s, -5.70498872745e-3, 2.06390887954e-2)
    series = tl.fma(s, series, -5.37397155531e-2)
    series = tl.fma(s, series, 1.33314422036e-1)
    series = tl.fma(s, series, -3.33332819422e-1)
    q, r = _decay(x)
    far = ((1.0 - q) * r).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & SIGN_BIT)
    return tl.where(tl.abs(x) < 0.625, tl.fma(s * series, x, x), far.to(tl.float32, bitcast=True))


@triton.jit
def quarter_tanh_slope(x):
    """(d tanh(x) / dx) / 4 as q / (1 + q)^2: 1 - tanh(x)^2 cancels where tanh(x) is near 1."""
    q, r = _decay(x)
    return q * (r * r)


@triton.jit
def _decay(x):
    """(q, 1 / (1 + q)) with q = e^(-2 |x|), which compilers compute once for tanh and its slope.

    1 / y is written as 1 / sqrt(y^2): two instructions on any GPU. Its error is 2^-22.9 plus half
    of the square's rounding error. A division takes ten instructions, and Triton's interpreter
    knows no approximate division.
    """
    q = tl.exp2(tl.abs(x) * MINUS_2_LOG2_E)
    y = 1.0 + q
    return q, tl.rsqrt(y * y)


@triton.jit
def where(condition, x, y):
    """x where the condition holds, else y."""
    return tl.where(condition, x, y)


@triton.jit
def minimum(x, y):
    """The smaller one; y if either is NaN."""
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
    "tl": tl,  # the interpreter looks it up
    **{
        f.__name__: f
        for f in (clamp, clamp_max, exp, expm1, full_like, minimum, sigmoid, type_as, where)
    },
}


def compiled(formula: Any, names: dict[str, Any] = _GLOBALS) -> Any:
    """Compile a formula for kernels; compile its helpers first, since it finds them by name.

    Args:
        names: the globals of the function; the compiled function is added to them.
    """
    made = triton.jit(FunctionType(formula.__code__, names, formula.__name__))
    return names.setdefault(formula.__name__, made)


for _helper in formulas.HELPERS:
    compiled(_helper)
times_or_zero = _GLOBALS["times_or_zero"]
SURROGATES: dict[str | None, Any] = {
    None: None,
    **{name: compiled(f) for name, f in formulas.SURROGATES.items()},
}
ESTIMATORS: dict[str | None, Any] = {
    None: None,
    **{name: compiled(f) for name, f in formulas.ESTIMATORS.items()},
}
