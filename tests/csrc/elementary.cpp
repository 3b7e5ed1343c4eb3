// The elementary functions and conversions of one instruction set (ROWS: its file in csrc/) against the standard
// library's, in double, and torch's. `elementary NAME STEP` tries every STEPth argument, by bit pattern, and prints the
// worst error with the argument that has it.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include ROWS

BEGIN_TARGET(TARGET)
namespace grpo_kernels::ISA {

constexpr int kBlock = 1024;  // arguments at a time
constexpr int64_t kFloats = int64_t{1} << 32;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Worst {
  double error = 0.0;
  uint32_t at = 0;  // the argument's bits

  void see(double other, uint32_t place) {
    if (other > error) error = other, at = place;
  }
};

// |got - want| in units in the last place of `want` as a float; infinity counts as 2^128, NaN for NaN as no error.
double ulps(float got, double want) {
  const double most = 0x1p128, x = want > most ? most : want;
  const double y = got > std::numeric_limits<float>::max() ? most : got;
  const int64_t exponent = std::max<int64_t>(-126, (bits<int64_t>(x) >> 52 & 0x7ff) - 1023);
  const double error = std::fabs(y - x) * bits<double>((1023 + 23 - std::min<int64_t>(127, exponent)) << 52);
  const bool lost = std::isnan(got) != std::isnan(want);
  return lost ? kInfinity : std::isnan(want) ? 0.0 : error;
}

// What is tried, and the truth in double. `Exp::is_right`: where exp(x) rounds to a number that is known beforehand, as
// for most floats, y is that. (Structures: GCC gives lambdas none of the instructions that a pragma names.)
struct Exp {
  static Float of(Float x) { return exp(x); }
  static double truth(double x) { return std::exp(x); }
  static Int is_right(Float x, Float y) {
    const Float size = magnitude(x), far = x < 0.0f ? Float{} : splat<Float>(INFINITY), one = splat<Float>(1.0f);
    const Float want = size < 1.0f ? one : far;
    return ((size < 0x1p-30f) & (y == want)) | ((size >= 128.0f) & (y == want)) | ((x != x) & (y != y));
  }
};
struct Tanh {
  static Float of(Float x) { return tanh(x); }
  static double truth(double x) { return std::tanh(x); }
  static Int is_right(Float, Float) { return Int{}; }
};
struct TanhSlope {
  static Float of(Float x) { return tanh_slope(x); }
  static double truth(double x) { return 1.0 / (std::cosh(x) * std::cosh(x)); }
  static Int is_right(Float, Float) { return Int{}; }
};
struct ExpBelow0 {
  static Float of(Float x) { return exp_below_0(below_0(x)); }
  static double truth(double x) { return below_0(x) < -87.0 ? 0.0 : std::exp(below_0(x)); }
  static Int is_right(Float x, Float y) { return (x > 0.0f) & (y == splat<Float>(1.0f)); }
  static Float below_0(Float x) { return x > 0.0f ? Float{} : x; }
  static double below_0(double x) { return x > 0.0 ? 0.0 : x; }
};
struct Log1p {  // of w in (-1, 0]; of other numbers' place 0 is tried
  static Float of(Float x) { return log1p(share(x)).log; }
  static double truth(double x) { return std::log1p(share(x)); }
  static Int is_right(Float x, Float y) { return (share(x) == 0.0f) & (y == 0.0f); }
  static Float share(Float x) { return (x > -1.0f) & (x <= 0.0f) ? x : Float{}; }
  static double share(double x) { return x > -1.0 && x <= 0.0 ? x : 0.0; }
};
struct MixtureTerm {
  static Float of(Float x) { return mixture(Log1p::share(x)).g; }
  static double truth(double x) {
    const double w = Log1p::share(x), log = std::log1p(w);
    return w > -1e-3 ? w * w * (0.5 - w * (1.0 / 6 - w * (1.0 / 12 - w / 20))) : (1.0 + w) * log - w;
  }
  static Int is_right(Float x, Float y) { return (Log1p::share(x) == 0.0f) & (y == 0.0f); }
};
struct Phi {
  static Float of(Float x) { return powers(x).phi; }
  static double truth(double x) {
    x = std::min(std::fabs(x), double{kFar});
    return x < 1e-3 ? x * x * (0.5 - x * (1.0 / 6 - x / 24)) : std::expm1(-x) + x;
  }
  static Int is_right(Float x, Float y) {
    const Float size = magnitude(x);
    return (size > 1e8f) & ((size > kFar) | (y == size)) & ((size <= kFar) | (y == splat<Float>(kFar)));
  }
};
struct Chi {
  static Float of(Float x) { return powers(x).chi; }
  static double truth(double x) {
    x = std::min(std::fabs(x), double{kFar});
    return x < 1e-3 ? x * x * (0.5 - x * (1.0 / 3 - x / 8)) : -std::expm1(-x) - std::exp(-x) * x;
  }
  static Int is_right(Float x, Float y) { return (magnitude(x) > 128.0f) & (y == splat<Float>(1.0f)); }
};
struct Bf16 {
  using Torch = c10::BFloat16;
  static Float from(Half h) { return from_bf16(h); }
  static Half to(Float x) { return to_bf16(x); }
};
struct F16 {
  using Torch = c10::Half;
  static Float from(Half h) { return from_f16(h); }
  static Half to(Float x) { return to_f16(x); }
};

void floats_at(int64_t first, int64_t step, float* x) {
  for (int i = 0; i < kBlock; ++i) x[i] = bits<float>(static_cast<uint32_t>(first + i * step));
}

// Every `step`th float, by bit pattern.
template <class F>
Worst try_floats(int64_t step) {
  Worst worst;
  for (int64_t first = 0; first < kFloats; first += kBlock * step) {
    float x[kBlock], y[kBlock];
    floats_at(first, step, x);
    Int right = Int{} - 1;
    for (int i = 0; i < kBlock; i += kWidth<float>) {
      const Float some = load<float>(x + i, Dtype::f32), found = F::of(some);
      right &= F::is_right(some, found);
      store<float>(y + i, Dtype::f32, found);
    }
    int32_t all_right = -1;
    for (int i = 0; i < kWidth<float>; ++i) all_right &= right[i];
    for (int i = 0; i < kBlock && !all_right; ++i) {
      const double want = F::truth(x[i]);
      if (std::fabs(y[i] - want) <= worst.error * std::fabs(want) * 0x1p-24) continue;  // by far not the worst
      worst.see(ulps(y[i], want), bits<uint32_t>(x[i]));
    }
  }
  return worst;
}

// Every half made a float; an error is infinite: another number than torch's.
template <class F>
Worst try_halves() {
  Worst worst;
  for (uint32_t first = 0; first < 65536; first += kWidth<float>) {
    Half h;
    for (int i = 0; i < kWidth<float>; ++i) h[i] = static_cast<uint16_t>(first + i);
    const Float got = F::from(h);
    for (int i = 0; i < kWidth<float>; ++i) {
      const float x = got[i], want = typename F::Torch(h[i], F::Torch::from_bits());
      const bool same = std::isnan(want) ? std::isnan(x) : bits<uint32_t>(want) == bits<uint32_t>(x);
      worst.see(same ? 0.0 : kInfinity, h[i]);
    }
  }
  return worst;
}

// Every `step`th float made a half; an error is infinite: other bits than torch's.
template <class F>
Worst try_rounding(int64_t step) {
  Worst worst;
  for (int64_t first = 0; first < kFloats; first += kBlock * step) {
    float x[kBlock];
    uint16_t got[kBlock], want[kBlock];
    floats_at(first, step, x);
    for (int i = 0; i < kBlock; i += kWidth<float>) {
      const Half part = F::to(load<float>(x + i, Dtype::f32));
      std::memcpy(got + i, &part, sizeof part);
    }
    for (int i = 0; i < kBlock; ++i) want[i] = typename F::Torch(x[i]).x;
    if (std::memcmp(got, want, sizeof got) == 0) continue;
    for (int i = 0; i < kBlock; ++i) worst.see(got[i] == want[i] ? 0.0 : kInfinity, bits<uint32_t>(x[i]));
  }
  return worst;
}

Worst run(const std::string& name, int64_t step) {
  if (name == "exp") return try_floats<Exp>(step);
  if (name == "tanh") return try_floats<Tanh>(step);
  if (name == "tanh_slope") return try_floats<TanhSlope>(step);
  if (name == "exp_below_0") return try_floats<ExpBelow0>(step);
  if (name == "log1p") return try_floats<Log1p>(step);
  if (name == "mixture") return try_floats<MixtureTerm>(step);
  if (name == "phi") return try_floats<Phi>(step);
  if (name == "chi") return try_floats<Chi>(step);
  if (name == "from_bf16") return try_halves<Bf16>();
  if (name == "from_f16") return try_halves<F16>();
  if (name == "to_bf16") return try_rounding<Bf16>(step);
  if (name == "to_f16") return try_rounding<F16>(step);
  return {kInfinity, 0};
}

int report(const char* name, const char* step) {
  const Worst worst = run(name, std::atoll(step));
  std::printf("%g at %.9g (%#x)\n", worst.error, double{bits<float>(worst.at)}, worst.at);
  return 0;
}

}  // namespace grpo_kernels::ISA
END_TARGET

int main(int count, char** arguments) {
  return count == 3 ? grpo_kernels::ISA::report(arguments[1], arguments[2]) : 2;
}
