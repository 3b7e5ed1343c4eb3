// A divergence of the student's row from the reference's, and the gradient of a row that has a reference. Written after
// grpo_kernels/backends/divergence.py, which has the formulas and explains them. With p and q the two probabilities,
// d = log p - log q, x = |d| and `lead` the larger of p and q, an element takes two exponentials: that of lead, and e^-x.

// e^-x, e^-x - 1, phi = e^-x - 1 + x, chi = 1 - e^-x (1 + x); an x of inf becomes a large number.
template <class T>
struct Powers {
  Vector<T> x, e, less, phi, chi;
};

constexpr float kFar = 1e30f;  // 0 * kFar is 0

// In float no series is needed: where n is 0, phi is the polynomial of the exponential.
INLINE Powers<float> powers(Float d) {
  const Float size = magnitude(d), x = size > kFar ? splat<Float>(kFar) : size;
  const auto far = x > 87.0f;
  const Split split = split_exp(far ? splat<Float>(-87.0f) : -x);
  const Float s = power_of_2(split.n), rq = split.q + split.r, s_less = s - 1.0f;
  const Float e = far ? Float{} : s * (rq + 1.0f), less = s * rq + s_less;
  const Float phi = s * split.q + ((s * split.r + x) + s_less);
  return {x, e, less, phi, x < 0.5f ? -less * x - phi : -less - e * x};
}

// In double the series have 18 terms.
constexpr int kTerms = 18;
constexpr double phi_term(int k) { return k < 0 ? 1.0 : phi_term(k - 1) / (k + 2); }  // 1 / (k + 2)!
constexpr double mixture_term(int k) { return 1.0 / ((k + 1.0) * (k + 2.0)); }

template <double (*TERM)(int)>
INLINE Double series(Double x) {
  Double total{};
  for (int k = kTerms - 1; k >= 0; --k) total = total * x + TERM(k);
  return total;
}

INLINE Powers<double> powers(Double d) {
  const Double size = magnitude(d), x = size > double{kFar} ? splat<Double>(double{kFar}) : size, e = exp(-x);
  const auto near = x < 0.5;
  const Double phi = near ? x * x * series<phi_term>(-x) : (e - 1.0) + x, less = near ? phi - x : e - 1.0;
  return {x, e, less, phi, near ? -less * x - phi : -less - e * x};
}

// log(1 + w) and (1 + w) log(1 + w) - w, of w in (-1, 0]
template <class T>
struct Mixture {
  Vector<T> log, g;
};

INLINE Mixture<float> mixture(Float w) {
  const Log log_m = log1p(w);
  return {log_m.log, w > -0.25f ? w * log_m.log + log_m.less : (w + 1.0f) * log_m.log - w};
}

INLINE Mixture<double> mixture(Double w) {
  const Double log = log1p(w);
  return {log, w > -0.125 ? w * w * series<mixture_term>(-w) : (w + 1.0) * log - w};
}

// p, the term of the divergence, and k of some columns.
template <class T>
struct Terms {
  Vector<T> p, value, k;
};

// `value` and `k` of KL(q || p): infinite where a p of 0 meets a q > 0.
template <class T>
INLINE void forward(const Powers<T>& d_powers, Vector<T> d, Terms<T>& out, Vector<T> lead) {
  const auto ahead = d >= T(0);
  const Vector<T> value = lead * (ahead ? d_powers.chi : d_powers.phi);
  out.value = d == T(-INFINITY) ? splat<Vector<T>>(T(INFINITY)) : value;
  out.k = lead * (ahead ? -d_powers.less : d_powers.less);
}

// `value` and `k` of KL(p || q): infinite where a q of 0 meets a p > 0.
template <class T>
INLINE void reverse(const Powers<T>& d_powers, Vector<T> d, Terms<T>& out, Vector<T> lead) {
  const auto ahead = d >= T(0), unmet = d == T(INFINITY);
  const Vector<T> infinite = splat<Vector<T>>(T(INFINITY)), value = lead * (ahead ? d_powers.phi : d_powers.chi);
  out.value = unmet ? infinite : value;
  out.k = unmet ? infinite : out.p * (ahead ? d_powers.x : -d_powers.x);
}

// `value` and `k` of (1 - beta) KL(p || m) + beta KL(q || m): m = lead (1 + w), w = share (e^-x - 1).
template <class T>
INLINE void mixed(const Powers<T>& d_powers, Vector<T> d, Terms<T>& out, Vector<T> lead, T q_share, T p_share) {
  const auto ahead = d >= T(0);
  const Vector<T> share = ahead ? splat<Vector<T>>(q_share) : splat<Vector<T>>(p_share);
  const Mixture<T> m = mixture(share * d_powers.less);
  out.value = lead * (share * d_powers.chi - m.g);
  out.k = (out.p * p_share) * (ahead ? -m.log : -d_powers.x - m.log);
}

// d of the columns whose scaled logits are z and y.
template <class T>
INLINE Vector<T> distance(const DivergenceInputs<T>& in, Vector<T> z, Vector<T> y) {
  const Vector<T> d = z - y;
  return d != d ? Vector<T>{} : d - in.offset;  // -inf - -inf: p = q = 0; any other NaN is in the offset, too
}

template <class T>
INLINE Terms<T> terms(Kind kind, const DivergenceInputs<T>& in, Vector<T> z, Vector<T> y) {
  const Vector<T> d = distance<T>(in, z, y);
  const auto ahead = d >= T(0);
  const Vector<T> inv_sum = ahead ? splat<Vector<T>>(in.inv_sum) : splat<Vector<T>>(in.reference_inv_sum);
  const Vector<T> lead = exp_below_0(ahead ? z - in.max : y - in.reference_max) * inv_sum;
  const Powers<T> d_powers = powers(d);
  Terms<T> out;
  out.p = ahead ? lead : lead * d_powers.e;
  if (kind == Kind::forward) forward<T>(d_powers, d, out, lead);
  if (kind == Kind::reverse) reverse<T>(d_powers, d, out, lead);
  if (kind == Kind::mixed) mixed<T>(d_powers, d, out, lead, in.q_share, in.p_share);
  return out;
}

// `terms` without `value`, for the gradient: the reverse divergence then takes one exponential.
template <class T>
INLINE Terms<T> gradient_terms(Kind kind, const DivergenceInputs<T>& in, Vector<T> z, Vector<T> y) {
  if (kind != Kind::reverse) return terms<T>(kind, in, z, y);
  const Vector<T> d = distance<T>(in, z, y), p = exp_below_0(z - in.max) * in.inv_sum;
  const Vector<T> k = p * at_least(d, splat<Vector<T>>(T(-kFar)));
  Terms<T> out{};
  out.p = p, out.k = d == T(INFINITY) ? d : k;
  return out;
}

template <class T, bool PLAIN>
INLINE DivergenceSums diverge(Kind kind, const Row<T>& row, const Row<T>& reference, const DivergenceInputs<T>& in) {
  DivergenceSums sums{0.0, 0.0};
  for (int64_t tile = 0; tile < row.size; tile += kTile) {
    const int64_t stop = row.size - tile < kTile ? row.size : tile + kTile;
    for (int64_t lane = 0; lane < kLanes; lane += kWidth<T>) {
      Vector<T> value{}, k{};
      for (int64_t start = tile + lane; start < stop; start += kLanes) {
        const Terms<T> added = terms<T>(kind, in, scaled_at<T, PLAIN>(row, start), scaled_at<T, PLAIN>(reference, start));
        value += added.value, k += added.k;
      }
      add_to<T>(sums.value, value), add_to<T>(sums.sum_k, k);
    }
  }
  // NaN where a head has NaN, or no finite logit
  const double nan_or_0 = static_cast<double>(in.offset) - in.offset;
  return {sums.value + nan_or_0, sums.sum_k + nan_or_0};
}

// `count` columns of both heads from `start` on: x and z of the student, and the terms.
template <class T>
struct Columns {
  Vector<T> x, z;
  Terms<T> terms;
};

template <class T, bool PLAIN>
INLINE Columns<T> columns(Kind kind, const Row<T>& row, const Row<T>& reference, const DivergenceInputs<T>& in, int64_t start,
                          int count) {
  const Vector<T> x = biased<T, PLAIN>(row, start, count), z = scaled<T, PLAIN>(row, x);
  const Vector<T> y = scaled<T, PLAIN>(reference, biased<T, PLAIN>(reference, start, count));
  return {x, z, gradient_terms<T>(kind, in, z, y)};
}

// d_divergence (k - p sum k)
template <class T>
INLINE Vector<T> pull(const DivergenceInputs<T>& in, const Terms<T>& terms) {
  return (terms.k - terms.p * in.sum_k) * in.d_divergence;
}

template <class T, bool PLAIN>
INLINE void gradient_with_reference(Kind kind, const Row<T>& row, const GradientInputs<T>& in, const Row<T>& reference,
                                  const DivergenceInputs<T>& divergence) {
  const bool has_target = in.target_id >= 0 && in.target_id < row.size;
  Vector<T> d_target{};  // read before `out`, which may be the row itself, is written
  if (has_target) {
    const Columns<T> here = columns<T, PLAIN>(kind, row, reference, divergence, in.target_id, 1);
    d_target = (pull<T>(divergence, here.terms) + in.dz_target) * slope<T, PLAIN>(row, here.x);
  }
  char* const out = static_cast<char*>(in.out);
  for (int64_t start = 0; start < row.size; start += kWidth<T>) {
    const int count = count_at<T>(start, row.size);
    const Columns<T> here = columns<T, PLAIN>(kind, row, reference, divergence, start, count);
    Vector<T> d = splat<Vector<T>>(-in.d_logp);
    if (in.has_d_entropy) d -= (at_least(here.z - in.max, splat<Vector<T>>(T(kLowest))) + in.offset) * in.d_entropy;
    d = (d * here.terms.p + pull<T>(divergence, here.terms)) * slope<T, PLAIN>(row, here.x);
    store_some<T>(out + start * size_of(in.dtype), in.dtype, d, count);
  }
  if (has_target) store_some<T>(out + in.target_id * size_of(in.dtype), in.dtype, d_target, 1);
}

// One loop for each kind of plain rows in float, the usual case, and one for all others: more would compile slowly.
template <class T>
DivergenceSums diverge_any(const Row<T>& row, const Row<T>& reference, const DivergenceInputs<T>& in) {
  if constexpr (sizeof(T) == 4) {
    if (is_plain(row) && is_plain(reference)) {
      if (in.kind() == Kind::forward) return diverge<T, true>(Kind::forward, row, reference, in);
      if (in.kind() == Kind::reverse) return diverge<T, true>(Kind::reverse, row, reference, in);
      return diverge<T, true>(Kind::mixed, row, reference, in);
    }
  }
  return diverge<T, false>(in.kind(), row, reference, in);
}

template <class T>
void gradient_with_reference_any(const Row<T>& row, const GradientInputs<T>& in, const Row<T>& reference,
                               const DivergenceInputs<T>& divergence) {
  const Kind kind = divergence.kind();
  if constexpr (sizeof(T) == 4) {
    if (is_plain(row) && is_plain(reference)) {
      if (kind == Kind::forward) return gradient_with_reference<T, true>(Kind::forward, row, in, reference, divergence);
      if (kind == Kind::reverse) return gradient_with_reference<T, true>(Kind::reverse, row, in, reference, divergence);
      return gradient_with_reference<T, true>(Kind::mixed, row, in, reference, divergence);
    }
  }
  gradient_with_reference<T, false>(kind, row, in, reference, divergence);
}
