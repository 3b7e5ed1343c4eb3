"""Faults planted in the kernels and in what surrounds them, one at a time; the suite must notice each.

`python -m tests.kernel_faults [name ...]` plants each in a copy of the sources (`planted`) and prints a table. It fails
if a fault survives. Then, or where `compiled` is among the names, `emulator.planted` plants faults in compiled kernels:
in their barriers, masks and offsets. (Faults in the arithmetic that every backend shares are in
`support/wrong_candidates.py`; they are planted in a candidate, not in the sources.)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys

from tests.support.planted import Fault, survives

KERNELS = "grpo_kernels/backends/triton_rows/"
ENGINE = "grpo_kernels/engine/"

SURROGATES = ("tests/backends/triton/test_triton_surrogates.py", "tests/backends/triton/test_triton_rows.py")
DOT = ("tests/backends/triton/test_triton_dot.py",)
SINGLE_PASS = ("tests/backends/triton/test_triton_single_pass.py",)
MIXED = ("tests/engine/test_mixed_products.py",)
WHOLE = ("tests/call/test_differential.py", "-k", "fixed_case and torch and (A or B or C)")
COMPILED = "compiled"  # stands for the faults in compiled kernels
DIVERGENCES = ("tests/backends/triton/test_triton_divergence.py",)
TORCH_DIVERGENCES = ("tests/backends/test_torch_divergence.py",)
WHOLE_DIVERGENCES = ("tests/call/test_divergence.py", "-k", "torch")
CATALOGUE = ("tests/test_catalogue.py", "-k", "triton")

STATS, GRAD, FUSED, REDUCE, STEPS = (f"{KERNELS}{name}.py" for name in ("stats", "grad", "fused", "reduce", "steps"))
MATH, TRANSFORM, PRIMITIVES = (f"{KERNELS}{name}.py" for name in ("mathfn", "transform", "surrogates"))
FORMULAS = "grpo_kernels/token_loss/formulas.py"
DOT_KERNEL, SINGLE = KERNELS + "dot.py", KERNELS + "single_pass.py"
DIVERGENCE, OPERANDS = "grpo_kernels/backends/divergence.py", ENGINE + "operands.py"
PAIRS, PAIR_GRADIENT, PAIR_LOSS = (f"{KERNELS}{name}.py" for name in ("divergence", "teacher_grad", "teacher_fused"))
FAULTS = [
    # the row reduction
    Fault("the tail left out", STEPS, "if whole < V:", "if whole + 1 < V:"),
    Fault("a whole step left out", STEPS, "tl.range(0, whole, BLOCK_V", "tl.range(BLOCK_V, whole, BLOCK_V"),
    Fault(
        "pad lanes revived by the soft-cap",
        STEPS,
        'z = tl.where(columns < end, z, float("-inf"))',
        "z = tl.where(columns < end, z, scaled(-1e30, inner, outer, HAS_SOFTCAP))",
    ),
    Fault("no rescale of the sum", REDUCE, "tl.fma(keep, rest, (e0", "tl.fma(1.0, rest, (e0"),
    Fault(
        "no rescale of the entropy's sum", REDUCE, "tl.fma(keep, tl.fma(d, rest, t)", "tl.fma(1.0, tl.fma(d, rest, t)"
    ),
    Fault("a shift that forgets what was summed", REDUCE, "tl.fma(d, rest, t)", "t"),
    Fault("the first of four always a term", REDUCE, "_low_high(m, x0)", "x0, tl.maximum(m, x0)"),
    Fault("the last of four always a term", REDUCE, "_low_high(top, x3)", "x3, tl.maximum(top, x3)"),
    Fault("NaN passed over", REDUCE, "tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL)", "tl.where(x > m, x, m)"),
    Fault(
        "every lane's maximum left out",
        REDUCE,
        "sum_lanes(e * (rest + tl.where(is_first, 0.0, 1.0)))",
        "sum_lanes(e * rest)",
    ),
    Fault("lanes merged without their distance", REDUCE, "sum_lanes(e * (t + a * (rest + 1.0)))", "sum_lanes(e * t)"),
    Fault("-inf minus -inf", REDUCE, "    a = tl.where(a > LOWEST, a, LOWEST)\n", ""),
    Fault("a row of -inf is a number", REDUCE, "odd = m - m", "odd = 0.0 * rest"),
    Fault("the target counted twice", REDUCE, "1.0 + (rest - exp(z - m))", "1.0 + rest"),
    Fault("log(1 + x) rounded first", MATH, "tl.log(u) + lost / u", "tl.log(u)"),
    Fault("tanh without its series", MATH, "tl.abs(x) < 0.625", "tl.abs(x) < 0.0"),
    Fault("tanh without its sign", MATH, " | (x.to(tl.int32, bitcast=True) & SIGN_BIT)", ""),
    Fault("rows taken to be V apart", STATS, "rows.to(tl.int64)[:, None] * stride_n", "rows.to(tl.int64)[:, None] * V"),
    Fault("lowest id of the largest", STEPS, "tl.where(z1 > m, id1, top_id)", "tl.where(z1 >= m, id1, top_id)"),
    # the transform
    Fault("temperature the wrong way up", TRANSFORM, "inner = inner * inv_t", "inner = inner / inv_t"),
    Fault("temperature inside the soft-cap", TRANSFORM, "outer = outer * inv_t", "inner = inner * inv_t"),
    Fault("logits not rounded", TRANSFORM, "x = x.to(ROUNDED_TO).to(tl.float32)", "x = x + 0.0"),
    Fault(
        "soft-cap's derivative without the cap",
        TRANSFORM,
        "return 4.0 * inner * outer",
        "return 4.0 * inner",
    ),
    # the gradient
    Fault("ids not shifted to the slice", GRAD, "tl.load(ids_ptr + rows) - first_id", "tl.load(ids_ptr + rows)"),
    Fault("entropy missing in its gradient", GRAD, "b * (entropy - log_sum)", "b * -log_sum"),
    Fault("entropy gradient's sign", GRAD, "tilt = -b * common", "tilt = b * common"),
    Fault("1 - p by subtraction", GRAD, "d = a * -expm1(logp)", "d = a * (1.0 - exp(logp))"),
    Fault("target's column is the next", GRAD, "out_ptrs + target[:, None]", "out_ptrs + (target[:, None] + 1)"),
    Fault("a target beyond the part is written", GRAD, "(target >= first) & (target < last)", "(target >= first)"),
    Fault("a target of the last tile of a part is not", GRAD, "(target < last)", "(target < last - BLOCK_V)"),
    Fault(
        "the target's slope at 0",
        GRAD,
        "x_target = load_at(row_ptrs, bias_ptr, target, is_here, ROUNDED_TO)",
        "x_target *= 2.0",
    ),
    Fault("the gradient's tail left out", GRAD, "if whole < last:", "if whole + 1 < last:"),
    Fault(
        "gradient stored where the logits are",
        GRAD,
        "out_ptr + rows.to(tl.int64)[:, None] * stride_out_n",
        "out_ptr + rows.to(tl.int64)[:, None] * stride_n",
    ),
    # the fused loss
    Fault(
        "gate on the loss alone",
        FUSED,
        "d_log_ratio = times(d_log_ratio, gate)",
        "d_log_ratio = times(d_log_ratio, 1.0)",
    ),
    Fault("ratio's share of the KL gradient", FUSED, "times(ratio, d_corrected)", "times(ratio, d_kl)"),
    Fault("KL without its weight", FUSED, "loss += beta * weight * kl", "loss += beta * kl"),
    Fault(
        "an id that does not exist",
        FUSED,
        "is_id = (ids >= 0) & (ids < V)",
        "ids = tl.where(ids < 0, 0, ids)\n    is_id = (ids >= 0) & (ids < V)",
    ),
    Fault("on-policy NaN lost", FUSED, "loss += logp - logp", "loss += 0.0 * weight", CATALOGUE),
    Fault(
        "first tile of the gradient left out",
        FUSED,
        "tl.range(BLOCK_V, whole + BLOCK_V, BLOCK_V",
        "tl.range(BLOCK_V, whole, BLOCK_V",
    ),
    # the single pass
    Fault("the reference not looked at", SINGLE, "is_near = (m - ref <= FARTHEST)", "is_near = (m == m)", SINGLE_PASS),
    Fault("NaN taken for near", SINGLE, "(m - ref <= FARTHEST)", "((m - ref > FARTHEST) == 0)", SINGLE_PASS),
    Fault(
        "its target not written again",
        SINGLE,
        "mask = (is_id & counts)[:, None]",
        "mask = (ids < 0)[:, None]",
        SINGLE_PASS,
    ),
    Fault("its sum without the rest", SINGLE, "exp(m - ref) * (1.0 + rest)", "exp(m - ref)", SINGLE_PASS),
    Fault("its 1 - p by subtraction", SINGLE, "expm1(logp)[:, None] *", "(exp(logp) - 1.0)[:, None] *", SINGLE_PASS),
    Fault(
        "all rows of its block read again",
        SINGLE,
        "bias_ptr, start, None, again,",
        "bias_ptr, start, None, counts,",
        SINGLE_PASS,
    ),
    # the surrogates
    Fault(
        "a bound does not pass",
        FORMULAS,
        "(ratio >= low) & (ratio <= high)",
        "(ratio > low) & (ratio < high)",
        SURROGATES,
    ),
    Fault("delta ignored", FORMULAS, "clamp_max(ratio, delta)", "ratio", SURROGATES),
    Fault(
        "temperatures of SAPO swapped",
        FORMULAS,
        "full_like(ratio, tau_pos), full_like(ratio, tau_neg)",
        "full_like(ratio, tau_neg), full_like(ratio, tau_pos)",
        SURROGATES,
    ),
    Fault(
        "CISPO's ratio not capped",
        FORMULAS,
        "weight = -clamp_max(ratio, cap)",
        "weight = -ratio",
        SURROGATES,
    ),
    Fault(
        "0 * inf",
        FORMULAS,
        "return where((factor == 0.0) & (x == x), 0.0, x * factor)",
        "return x * factor",
        SURROGATES,
    ),
    Fault("k3's derivative", FORMULAS, "return expm1(d) - d, -expm1(d)", "return expm1(d) - d, -d", SURROGATES),
    Fault(
        "k and lambda of VESPO by another sign",
        FORMULAS,
        "k = where(advantage >= 0.0",
        "k = where(advantage < 0.0",
        SURROGATES,
    ),
    Fault("the greater for the lesser", PRIMITIVES, "tl.where(x < y, x, y)", "tl.where(x < y, y, x)", SURROGATES),
    # scoring without logits
    Fault(
        "a phantom column of the last tile",
        DOT_KERNEL,
        "offs_v[None, :] < V - first_id",
        "offs_v[None, :] < V - first_id + 1",
        DOT,
    ),
    Fault("no mask without a target", DOT_KERNEL, "has_target | (first_id + BLOCK_V > V)", "has_target", DOT),
    Fault(
        "no target without a mask", DOT_KERNEL, "has_target | (first_id + BLOCK_V > V)", "first_id + BLOCK_V > V", DOT
    ),
    Fault(
        "a part of the vocabulary ends too early",
        DOT_KERNEL,
        "first_tile + tiles_per_split,",
        "first_tile + tiles_per_split - 1,",
        DOT,
    ),
    Fault("every tile's maximum counted", DOT_KERNEL, "(tops - 1.0)", "tops", DOT),
    Fault("any part stores the target", DOT_KERNEL, "mask=mask_n & is_here", "mask=mask_n", DOT),
    Fault(
        "hidden states taken to be H apart",
        DOT_KERNEL,
        "first_row.to(tl.int64) * stride_hn",
        "first_row.to(tl.int64) * H",
        DOT,
    ),
    # around the kernels
    Fault("padding left in d logits", ENGINE + "sweep.py", "d_logits[len(group) : group.rows] = 0.0", "pass", MIXED),
    Fault(
        "fp16 gradients without their factor",
        ENGINE + "products.py",
        "scale = torch.where(torch.isfinite(size).all(), scale, 1.0)",
        "scale = torch.ones_like(scale)",
        MIXED,
    ),
    Fault("fp16 factor of the group before", ENGINE + "sweep.py", "self._rescale(scale / self._scale)", "pass", MIXED),
    Fault(
        "a slice's bias is the first's",
        ENGINE + "slices.py",
        "None if bias is None else bias[columns]",
        "None if bias is None else bias[: columns.stop - columns.start]",
        ("tests/engine/test_slices.py", "-k", "equals"),
    ),
    Fault(
        "a slice adds to no slice before", ENGINE + "slices.py", "first=self._columns.start == 0", "first=True", WHOLE
    ),
    Fault("a block of rows adds to no block before", ENGINE + "slices.py", "first=start == 0", "first=True", MIXED),
    # divergences from a teacher
    Fault(
        "phi by subtraction alone",
        DIVERGENCE,
        "where(near, x * x * phi_series(x), (e - 1.0) + x)",
        "(e - 1.0) + x",
        TORCH_DIVERGENCES,
    ),
    Fault(
        "phi and chi exchanged",
        DIVERGENCE,
        "value = lead * where(ahead, phi, chi)",
        "value = lead * where(ahead, chi, phi)",
        TORCH_DIVERGENCES,
    ),
    Fault(
        "a mixture with the other's share",
        DIVERGENCE,
        "full_like(d, beta), full_like(d, 1.0 - beta)",
        "full_like(d, 1.0 - beta), full_like(d, beta)",
        TORCH_DIVERGENCES,
    ),
    Fault(
        "the tail of two rows left out",
        PAIRS,
        "    if whole < V:\n        value, slope",
        "    if whole + V < V:\n        value, slope",
        DIVERGENCES,
    ),
    Fault("an offset without the maxima", PAIRS, "offset = (m - teacher_m) + (", "offset = 0.0 * m + (", DIVERGENCES),
    Fault("sum k not taken off", PAIR_GRADIENT, "entropy, a + c * slope, b,", "entropy, a, b,", DIVERGENCES),
    Fault("no divergence at the target", PAIR_GRADIENT, "    d += c * (\n", "    d += 0.0 * c * (\n", DIVERGENCES),
    Fault(
        "the teacher's columns of the student's tile",
        PAIR_GRADIENT,
        "student, teacher, x1, y1, known",
        "student, teacher, x1, y0, known",
        DIVERGENCES,
    ),
    Fault(
        "a fused divergence without its weight", PAIR_LOSS, "c = beta * weight", "c = beta + 0.0 * weight", DIVERGENCES
    ),
    Fault(
        "a teacher at temperature 1",
        OPERANDS,
        "transform = self._config.transform(self._bias, inv_temperature)",
        "transform = self._config.transform(self._bias, 1.0)",
        WHOLE_DIVERGENCES,
    ),
    Fault(
        "a teacher's rows of the first chunk",
        ENGINE + "sweep.py",
        "teacher.project(of_teacher[chunk], ",
        "teacher.project(of_teacher[: chunk.stop - chunk.start], ",
        MIXED,
    ),
    Fault(
        "what is expected counted twice",
        ENGINE + "autograd.py",
        "factor, rest = split_off(came, expected)",
        "factor, rest = split_off(came, came)",
        WHOLE_DIVERGENCES,
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", help=f"faults whose name contains one of these, or {COMPILED!r}; all without"
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [f for f in FAULTS if not options.names or any(name in f.name for name in options.names)]
    left = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for fault, (alive, line, seconds) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVES' if alive else 'caught':8s}  {fault.name:48s} {seconds:5.0f} s  {line}", flush=True)
            left += [fault.name] if alive else []
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults caught", flush=True)
    if options.names and COMPILED not in options.names:
        return 1 if left or not chosen else 0
    unnoticed = subprocess.run([sys.executable, "-m", "tests.emulator.planted"]).returncode
    return 1 if left or unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
