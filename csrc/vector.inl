// The vectors of one instruction set, and elementary functions of them. Included once for each (kernels.inl), with
// VECTOR_BYTES defined. No fused multiply-add, and no sum whose order is left to the compiler: all instruction sets, and
// all compilers, give the same bits. No lambdas: GCC gives them none of the instructions that a pragma names.

#define INLINE static inline __attribute__((always_inline))

template <class T, int BYTES>
struct VectorOf {
  typedef T type __attribute__((vector_size(BYTES)));
};
template <class T>
using Vector = typename VectorOf<T, VECTOR_BYTES>::type;
using Float = Vector<float>;
using Double = Vector<double>;
using Int = Vector<int32_t>;
using UInt = Vector<uint32_t>;
using Half = typename VectorOf<uint16_t, VECTOR_BYTES / 2>::type;  // 16-bit patterns, as many as a Float has numbers

template <class T>
constexpr int kWidth = VECTOR_BYTES / sizeof(T);

template <class To, class From>
INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits as another type");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

template <class V, class T>
INLINE V splat(T x) {
  return V{} + x;
}

// The larger one; `y` where either is NaN.
template <class V>
INLINE V larger(V x, V y) {
  return x > y ? x : y;
}
// `low` where x is less; NaN stays.
template <class V>
INLINE V at_least(V x, V low) {
  return x < low ? low : x;
}

// e^x = 2^n (1 + (r + q)), r = x - n ln 2 and q = e^r - 1 - r, which keeps its precision where it is small; for x between
// -105 and 89. For |x| below ln 2 / 2, n is 0 and r is x.
struct Split {
  Int n;
  Float r, q;
};

INLINE Split split_exp(Float x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, and leaves that in the low bits
  const Float shifted = x * 1.44269504f + shift;
  const Float n = shifted - shift;
  const Float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  Float p = r * 1.9875691500e-4f + 1.3981999507e-3f;             // Cephes' expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {bits<Int>(shifted) - bits<int32_t>(shift), r, p * (r * r)};
}

// 2^n for n from -126 to 127
INLINE Float power_of_2(Int n) { return bits<Float>((n + 127) << 23); }

// e^x for all x, to within 1 unit in the last place (tests/backends/cpp/test_cpp_exp.py tries every float); 2^n in two
// factors, so that neither overflows, or loses bits, before the result does.
INLINE Float exp(Float x) {
  const auto low = splat<Float>(-105.0f), high = splat<Float>(89.0f);  // e^ of them is 0 and inf
  x = x < low ? low : x;
  x = x > high ? high : x;  // NaN passes both
  const Split e = split_exp(x);
  const Int half = e.n >> 1;
  return (((e.q + e.r) + 1.0f) * power_of_2(half)) * power_of_2(e.n - half);
}

// e^x for x <= 0, in fewer steps: 0 where x is below -87.
INLINE Float exp_below_0(Float x) {
  const Split e = split_exp(x);
  const Float found = ((e.q + e.r) + 1.0f) * power_of_2(e.n);
  return x < -87.0f ? Float{} : found;
}

// log(1 + w) for w in (-1, 0], and that less w, which keeps its precision where it is small. At w = -1 very negative
// numbers, not -inf. 1 + w = 2^n (1 + f), 1 + f between sqrt(1/2) and sqrt(2): where n is 0, f is w, unrounded.
struct Log {
  Float log, less;
};

INLINE Log log1p(Float w) {
  const Float u = at_least(w + 1.0f, splat<Float>(1.17549435e-38f));
  const Int whole = (bits<Int>(u) - 0x3f3504f3) >> 23;
  const Float n = __builtin_convertvector(whole, Float);
  const Float f = whole == 0 ? w : bits<Float>(bits<Int>(u) - (whole << 23)) - 1.0f;
  Float p = f * 7.0376836292e-2f + -1.1514610310e-1f;  // Cephes' logf
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Float tail = ((p * f) * (f * f) - (f * f) * 0.5f) + n * -2.12194440e-4f;
  const Float less = ((f - w) + tail) + n * 0.693359375f;
  return {w + less, less};
}

INLINE Float magnitude(Float x) { return bits<Float>(bits<Int>(x) & 0x7fffffff); }
INLINE Double magnitude(Double x) { return x < 0.0 ? -x : x; }

// Near 0 a series (Cephes' tanhf), elsewhere (1 - q) / (1 + q) with q = e^(-2 |x|).
INLINE Float tanh(Float x) {
  const Float s = x * x;
  Float series = s * -5.70498872745e-3f + 2.06390887954e-2f;
  series = series * s + -5.37397155531e-2f;
  series = series * s + 1.33314422036e-1f;
  series = series * s + -3.33332819422e-1f;
  const Float q = exp(magnitude(x) * -2.0f), far = (1.0f - q) / (1.0f + q);
  return magnitude(x) < 0.625f ? (series * s) * x + x : (x < 0.0f ? -far : far);
}

// d tanh(x) / dx = 1 - tanh(x)^2, which cancels where tanh(x) is near 1, while 4 q / (1 + q)^2 does not.
INLINE Float tanh_slope(Float x) {
  const Float q = exp(magnitude(x) * -2.0f);
  return (q * 4.0f) / ((q + 1.0f) * (q + 1.0f));
}

// In double, one number after the other: only double rows need these.
INLINE Double exp(Double x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}
INLINE Double tanh(Double x) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}
INLINE Double exp_below_0(Double x) { return exp(x); }
INLINE Double log1p(Double w) {
  for (int i = 0; i < kWidth<double>; ++i) w[i] = std::log1p(w[i] < -1.0 + 0x1p-53 ? -1.0 + 0x1p-53 : w[i]);
  return w;
}
INLINE Double tanh_slope(Double x) {
  Double q = x < 0.0 ? x * 2.0 : x * -2.0;
  q = exp(q);
  return (q * 4.0) / ((q + 1.0) * (q + 1.0));
}
