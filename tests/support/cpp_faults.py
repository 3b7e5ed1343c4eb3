"""Faults to plant in the C++ row kernels; `kernel_faults` runs them with the others."""

from __future__ import annotations

from dataclasses import replace

from tests.support.planted import Fault

ROWS = (
    "tests/backends/cpp/test_cpp_rows.py",
    "tests/backends/cpp/test_cpp_special.py",
    "tests/backends/cpp/test_random_rows.py",
)
DIVERGENCES = ("tests/backends/cpp/test_cpp_divergence.py",)
SURROGATES = ("tests/backends/cpp/test_cpp_surrogates.py",)
ELEMENTARY = ("tests/backends/cpp/test_cpp_exp.py", "-m", "not slow")
SANITIZED = ("tests/test_sanitize.py",)

KERNELS, DIVERGENCE, HALVES, VECTOR = (f"csrc/{name}.inl" for name in ("rows", "divergence", "halves", "vector"))
OPS, ARGUMENTS, STATS = (f"csrc/{name}" for name in ("ops.cpp", "arguments.h", "row_stats.h"))
TOKEN, FORMULAS, PRIMITIVES = (f"csrc/{name}.h" for name in ("token_loss", "formulas", "primitives"))
FAULTS = [
    # the sums over a row
    Fault("a row's tail is not filled", KERNELS, "i = count; i <", "i = count + 1; i <", ROWS),
    Fault("sums as many as a vector has lanes", KERNELS, "kLanes = 32;", "kLanes = VECTOR_BYTES / 4;", ROWS),
    Fault(
        "the maximum misses a tile's end",
        KERNELS,
        "tile + kTile;\n    Vector<T> tops",
        "tile + kTile - kWidth<T>;\n    Vector<T> tops",
        ROWS,
    ),
    Fault(
        "the sums miss a tile's end",
        KERNELS,
        "tile + kTile;\n    for (int64_t lane",
        "tile + kTile - kLanes;\n    for (int64_t lane",
        ROWS,
    ),
    Fault("the maximum is in the last tile", KERNELS, "if (tops[i] > max)", "if (tops[i] >= max)", ROWS),
    Fault("another number left out of the sum", KERNELS, "z[place] = -INFINITY", "z[place ^ 1] = -INFINITY", ROWS),
    Fault("none left out in the first lane", KERNELS, "place >= 0 && place < kW", "place > 0 && place < kW", ROWS),
    Fault("all of the equal largest left out", KERNELS, "rest += e;", "rest += shifted == 0.0f ? e - e : e;", ROWS),
    Fault(
        "0 * -inf in the entropy",
        KERNELS,
        "t += e * at_least(shifted, splat<Vector<T>>(T(kLowest)))",
        "t += e * shifted",
        ROWS,
    ),
    Fault("probabilities not squared", KERNELS, "squares += e * e", "squares += e", ROWS),
    Fault("pad lanes in the mean", KERNELS, "count_at<T>(start, row.size), 0.0f", "kWidth<T>, 0.0f", ROWS),
    # the transform
    Fault("bias of the row's start", KERNELS, "row.bias + start", "row.bias", ROWS),
    Fault(
        "rounded without a bias only", KERNELS, "if (row.rounds) x", "if (row.rounds && row.bias == nullptr) x", ROWS
    ),
    Fault("not rounded without a bias", KERNELS, "&& !row.rounds && !row", "&& !row", ROWS),
    Fault("soft-cap's derivative without the cap", KERNELS, "(row.inner * row.outer);", "row.inner;", ROWS),
    Fault(
        "temperature inside the soft-cap",
        ARGUMENTS,
        "(row.has_softcap ? row.outer : row.inner) *=",
        "row.inner *=",
        ROWS,
    ),
    Fault("the first row's temperature", ARGUMENTS, "*= inv_t[i]", "*= inv_t[0]", ROWS),
    # the gradient
    Fault(
        "0 * -inf in the gradient",
        KERNELS,
        "(at_least(shifted, splat<Vector<T>>(T(kLowest))) + at.offset)",
        "(shifted + at.offset)",
        ROWS,
    ),
    Fault("entropy gradient's sign", KERNELS, "if (at.has_b) d -=", "if (at.has_b) d +=", ROWS),
    Fault("a target one beyond the part", KERNELS, "at.target < row.size", "at.target <= row.size", ROWS),
    Fault("a target before the part", KERNELS, "at.target >= 0 &&", "at.target >= -1 &&", ROWS),
    Fault(
        "the target read after it was written",
        KERNELS,
        "size_of(at.dtype), at.dtype, d_target, 1)",
        "size_of(at.dtype), at.dtype,\n"
        "        slope<T, PLAIN>(row, projection<T, PLAIN>(row, at.target, 1)) * at.at_target, 1)",
        ROWS,
    ),
    Fault(
        "gradients stored as wide as logits",
        KERNELS,
        "out + start * size_of(at.dtype)",
        "out + start * size_of(row.dtype)",
        ROWS,
    ),
    Fault("rows taken to be V apart", ARGUMENTS, "row_bytes = x.stride(0) *", "row_bytes = vocab *", ROWS),
    Fault("ids not shifted to the part", OPS, "(chunk.ids[i]) - first_id", "(chunk.ids[i])", ROWS),
    Fault(
        "no entropy coefficient in the fused loss", OPS, "constants.d_entropy != T(0), 0, *to", "false, 0, *to", ROWS
    ),
    # statistics
    Fault("the target counted twice", STATS, "sums.rest - sums.target_term", "sums.rest", ROWS),
    Fault("a target that ties counts as another", STATS, "is_max ? sums.rest : 1.0", "false ? sums.rest : 1.0", ROWS),
    Fault("a row of -inf is a number", STATS, "odd = sums.max - sums.max", "odd = 0.0", ROWS),
    Fault("log(1 + x) rounded first", STATS, "std::log1p(rest)", "std::log(1.0 + rest)", ROWS),
    Fault("entropy without its normaliser", STATS, "/ (1.0 + rest)", "/ 1.0", ROWS),
    Fault("1 - p by subtraction", STATS, "others = -std::expm1(static_cast<double>(logp))", "others = 1.0 - p", ROWS),
    Fault(
        "entropy missing in its gradient",
        STATS,
        "offset = static_cast<double>(entropy) - log_sum",
        "offset = -log_sum",
        ROWS,
    ),
    Fault("entropy gradient's sign at the target", STATS, "at_target -= b", "at_target += b", ROWS),
    Fault("0 * -inf at the target", STATS, "logp < kLowest ? kLowest : logp", "logp", ROWS),
    Fault("all of the equal largest are top-1", OPS, "sums.argmax == chunk.ids[i]", "sums.target == sums.max", ROWS),
    Fault("an id that does not exist", OPS, "chunk.has_target(i) ? target_logp(sums) : NAN", "target_logp(sums)", ROWS),
    # divergences
    Fault(
        "the offset of one head alone", STATS, "(m - teacher_m) + (l - teacher_l)", "(m - teacher_m) + l", DIVERGENCES
    ),
    Fault(
        "a row without numbers has a divergence",
        DIVERGENCE,
        "odd = static_cast<double>(at.offset) - at.offset",
        "odd = 0.0",
        DIVERGENCES,
    ),
    Fault(
        "chi cancels where x is small",
        DIVERGENCE,
        "x < 0.5f ? -less * x - phi : -less - e * x",
        "-less - e * x",
        ELEMENTARY,
    ),
    Fault(
        "chi cancels where x is large",
        DIVERGENCE,
        "x < 0.5f ? -less * x - phi : -less - e * x",
        "-less * x - phi",
        ELEMENTARY,
    ),
    Fault(
        "phi by subtraction",
        DIVERGENCE,
        "phi = s * split.q + ((s * split.r + x) + s_less)",
        "phi = less + x",
        ELEMENTARY,
    ),
    Fault("a probability of 0 is not", DIVERGENCE, "e = far ? Float{} : s", "e = s", ELEMENTARY),
    Fault(
        "g by subtraction",
        DIVERGENCE,
        "w > -0.25f ? w * of.log + of.less",
        "w > 0.0f ? w * of.log + of.less",
        ELEMENTARY,
    ),
    Fault("what p needs and q lacks is finite", DIVERGENCE, "unmet = d == T(INFINITY)", "unmet = d != d", DIVERGENCES),
    Fault("what q needs and p lacks is finite", DIVERGENCE, "d == T(-INFINITY) ?", "d != d ?", DIVERGENCES),
    Fault(
        "shares of the mixture swapped",
        DIVERGENCE,
        "splat<Vector<T>>(beta) : splat<Vector<T>>(rest)",
        "splat<Vector<T>>(rest) : splat<Vector<T>>(beta)",
        DIVERGENCES,
    ),
    Fault("gradient of the terms alone", DIVERGENCE, "(of.k - of.p * at.slope)", "of.k", DIVERGENCES),
    Fault(
        "no divergence at the target",
        DIVERGENCE,
        "(pull<T>(from, here.of) + at.at_target)",
        "(here.z * T(0) + at.at_target)",
        DIVERGENCES,
    ),
    Fault(
        "the teacher's logits are the student's size",
        DIVERGENCE,
        "is_plain(row) && is_plain(teacher)) {\n      if (at",
        "is_plain(row)) {\n      if (at",
        DIVERGENCES,
    ),
    Fault(
        "the first row's teacher",
        OPS,
        "diverge(chunk.rows.row(i), chunk.teacher->row(i)",
        "diverge(chunk.rows.row(i), chunk.teacher->row(0)",
        DIVERGENCES,
    ),
    Fault(
        "divergence without its weight",
        TOKEN,
        "terms.d_divergence = c.beta * token.weight",
        "terms.d_divergence = c.beta",
        DIVERGENCES,
    ),
    # 16-bit numbers and elementary functions
    Fault("bf16 ties away from zero", HALVES, "0x7fff + ((u >> 16) & 1)", "0x8000", ELEMENTARY),
    Fault("bf16 rounds NaN", HALVES, "(is_nan & 0x7fc0) | (~is_nan & rounded)", "rounded", ELEMENTARY),
    Fault("f16 ties away from zero", HALVES, "0xfff + ((size >> 13) & 1)", "0x1000", ELEMENTARY),
    Fault("f16 overflows too late", HALVES, "143u << 23", "144u << 23", ELEMENTARY),
    Fault(
        "f16 subnormals begin too late",
        HALVES,
        "is_small = bits<UInt>(size < splat<UInt>(113u",
        "is_small = bits<UInt>(size < splat<UInt>(112u",
        ELEMENTARY,
    ),
    Fault("f16 infinity is a number", HALVES, " + (is_special & (112u << 23))", "", ELEMENTARY),
    Fault("subnormal results of exp lost", VECTOR, "splat<Float>(-105.0f)", "splat<Float>(-87.3f)", ELEMENTARY),
    Fault("exp overflows in its factor", VECTOR, "half = e.n >> 1;", "half = e.n;", ELEMENTARY),
    Fault("tanh without its series", VECTOR, "magnitude(x) < 0.625f", "magnitude(x) < 0.0f", ELEMENTARY),
    Fault(
        "products and sums fused", "grpo_kernels/backends/cpp_rows/compiler.py", "contract=off", "contract=fast", ROWS
    ),
    # memory
    Fault(
        "a row's tail read as a whole vector",
        HALVES,
        "memcpy(buffer, from, count * size_of(dtype))",
        "memcpy(buffer, from, kWidth<T> * size_of(dtype))",
        SANITIZED,
    ),
    Fault(
        "a row's tail stored as a whole vector",
        HALVES,
        "memcpy(to, buffer, count * size_of(dtype))",
        "memcpy(to, buffer, kWidth<T> * size_of(dtype))",
        ROWS,
    ),
    Fault("an id that overflows", OPS, "static_cast<uint64_t>(chunk.ids[i]) - f", "chunk.ids[i] - f", SANITIZED),
    # the loss of a token
    Fault("a bound does not pass", FORMULAS, "(ratio >= low) &", "(ratio > low) &", SURROGATES),
    Fault(
        "the clipped side's gradient",
        FORMULAS,
        "type_as(free < bounded, ratio)",
        "type_as(free > bounded, ratio)",
        SURROGATES,
    ),
    Fault("delta ignored", FORMULAS, "clamp_max(ratio, delta)", "ratio", SURROGATES),
    Fault(
        "CISPO's ratio not capped",
        FORMULAS,
        "clamp_max(ratio, cap) * adv",
        "ratio * adv",
        SURROGATES,
    ),
    Fault("temperatures of SAPO swapped", FORMULAS, "advantage > T(0.0)", "advantage <= T(0.0)", SURROGATES),
    Fault("0 * inf", FORMULAS, "(factor == T(0.0)) & (x == x)", "false", SURROGATES),
    Fault("NaN lost by a factor of 0", FORMULAS, "(factor == T(0.0)) & (x == x)", "factor == T(0.0)", SURROGATES),
    Fault("k2's derivative", FORMULAS, "T(2.0), -d,", "T(2.0), d,", SURROGATES),
    Fault("k3's derivative", FORMULAS, ", -expm1(d)", ", -d", SURROGATES),
    Fault("the greater for the lesser", PRIMITIVES, "x < y ? x : y", "x < y ? y : x", SURROGATES),
    Fault("a constant in the place of another", FORMULAS, "c[0], c[1], c[2])", "c[1], c[0], c[2])", SURROGATES),
    Fault("gate on the loss alone", TOKEN, "times(s.d_log_ratio, token.gate)", "s.d_log_ratio", SURROGATES),
    Fault("ratio's share of the KL gradient", TOKEN, "found.corrected_slope", "found.slope", SURROGATES),
    Fault(
        "KL gradient not corrected", TOKEN, "times(ratio, found.corrected_slope)", "found.corrected_slope", SURROGATES
    ),
    Fault("KL without its weight", TOKEN, "factor = c.beta * token.weight", "factor = c.beta", SURROGATES),
    Fault("on-policy NaN lost", TOKEN, "terms.loss += logp - logp;", "", SURROGATES),
    Fault(
        "on-policy NaN without its gradient", TOKEN, "if (std::isnan(logp)) terms.loss", "if (false) terms.loss", ROWS
    ),
]
CPP_FAULTS = [replace(fault, name=f"C++: {fault.name}") for fault in FAULTS]
