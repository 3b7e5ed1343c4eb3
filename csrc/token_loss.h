// A loss of one token from its log-probability: the mirror of grpo_kernels/token_loss.py and surrogates.py, operation by
// operation in the same dtype, so that the ties, what an overflow leaves behind, and at a ratio of 1 the bits are theirs.
#pragma once

#include <cmath>
#include <cstdint>

namespace grpo_kernels {

enum class Surrogate : int64_t { clipped, cispo, sapo, constant, linear };
enum class Estimator : int64_t { none, k1, k2, k3 };

template <class T>
struct LossConstants {
  Surrogate surrogate;
  Estimator estimator;
  bool corrects_kl;
  T clip_low, clip_high, delta, tau_pos, tau_neg, beta, b;

  template <class To>
  LossConstants<To> to() const {
    return {surrogate,   estimator,   corrects_kl, To(clip_low), To(clip_high),
            To(delta),   To(tau_pos), To(tau_neg), To(beta),     To(b)};
  }
};

// Of one token; on-policy `advantage` is a itself, weight and gate included.
template <class T>
struct Token {
  T advantage, weight, gate, old, ref;
  bool on_policy, has_gate;
};

template <class T>
struct TokenTerms {
  T loss, a, log_ratio, kl;
};

// loss, d loss / d R, d loss / d logp
template <class T>
struct Surrogated {
  T loss, d_log_ratio, d_logp;
};

// x * factor, where a factor of exactly 0 gives 0 unless x is NaN: 0 * inf is not NaN here
template <class T>
T times(T x, T factor) {
  return factor == T(0) && !std::isnan(x) ? T(0) : x * factor;
}

// -min(min(r, delta) A, clip(r, clip_low, clip_high) A); half of the gradient each at a tie, bounds pass it
template <class T>
Surrogated<T> clipped(const LossConstants<T>& c, T log_ratio, T advantage) {
  const T ratio = std::exp(log_ratio);
  const T free = times(ratio > c.delta ? c.delta : ratio, advantage);
  T bounded = ratio < c.clip_low ? c.clip_low : ratio;
  bounded = (bounded > c.clip_high ? c.clip_high : bounded) * advantage;
  const T share = free == bounded ? T(0.5) : free < bounded ? T(1) : T(0);  // of the gradient, for `free`
  const bool inside = ratio >= c.clip_low && ratio <= c.clip_high;
  const T passes = share * (ratio <= c.delta ? T(1) : T(0)) + (T(1) - share) * (inside ? T(1) : T(0));
  return {-(free < bounded ? free : bounded), -times(ratio, passes * advantage), T(0)};
}

// -min(r, clip_high) A logp, the ratio a constant
template <class T>
Surrogated<T> cispo(const LossConstants<T>& c, T log_ratio, T advantage, T logp) {
  const T ratio = std::exp(log_ratio);
  const T weight = -(ratio > c.clip_high ? c.clip_high : ratio) * advantage;
  return {times(logp, weight), T(0), weight};
}

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A
template <class T>
Surrogated<T> sapo(const LossConstants<T>& c, T log_ratio, T advantage) {
  const T ratio = std::exp(log_ratio), tau = advantage > T(0) ? c.tau_pos : c.tau_neg;
  const T gate = sigmoid(tau * (ratio - T(1)));
  const T slope = T(4) * gate * sigmoid(tau * (T(1) - ratio));  // d (4 / tau) gate / d r
  return {-times(T(4) * gate / tau, advantage), -times(ratio, slope * advantage), T(0)};
}

template <class T>
Surrogated<T> surrogate(const LossConstants<T>& c, T log_ratio, T advantage, T logp) {
  switch (c.surrogate) {
    case Surrogate::clipped: return clipped(c, log_ratio, advantage);
    case Surrogate::cispo: return cispo(c, log_ratio, advantage, logp);
    case Surrogate::sapo: return sapo(c, log_ratio, advantage);
    case Surrogate::linear: return {times(logp, advantage), T(0), advantage};
    case Surrogate::constant: break;  // the loss is known, and left out
  }
  return {T(0), T(0), advantage};
}

template <class T>
struct Estimated {
  T kl, slope, corrected_slope;
};

// KL(policy || reference), its derivative in logp, and over r that of r * kl, where r moves with logp: kl + slope
template <class T>
Estimated<T> estimate_kl(Estimator estimator, T logp, T ref) {
  const T d = ref - logp;
  if (estimator == Estimator::k1) return {-d, T(1), T(1) - d};
  if (estimator == Estimator::k2) return {d * d / T(2), -d, d * (d / T(2) - T(1))};
  return {std::expm1(d) - d, -std::expm1(d), -d};
}

template <class T>
TokenTerms<T> token_terms(const LossConstants<T>& c, const Token<T>& token, T logp) {
  const T log_ratio = token.on_policy ? T(0) : logp - token.old;
  Surrogated<T> s = surrogate(c, log_ratio, token.advantage, logp);
  TokenTerms<T> terms{s.loss, s.d_logp, log_ratio, T(0)};
  if (token.on_policy) {  // weight and gate are in a already
    terms.loss += logp - logp;  // NaN where there is no finite log-probability: nothing else would tell
  } else {
    if (token.has_gate) {
      s = {times(s.loss, token.gate), times(s.d_log_ratio, token.gate), times(s.d_logp, token.gate)};
    }
    terms.loss = token.weight * s.loss;
    terms.a = token.weight * s.d_log_ratio + token.weight * s.d_logp;
  }
  if (c.estimator != Estimator::none) {
    const Estimated<T> found = estimate_kl(c.estimator, logp, token.ref);
    T slope = found.slope;
    terms.kl = found.kl;
    if (c.corrects_kl) {
      const T ratio = std::exp(log_ratio);
      terms.kl = times(ratio, found.kl), slope = times(ratio, found.corrected_slope);
    }
    const T factor = c.beta * token.weight;
    terms.loss += factor * terms.kl, terms.a += factor * slope;
  }
  if (std::isnan(logp)) terms.loss = terms.a = terms.log_ratio = logp;
  return terms;
}

}  // namespace grpo_kernels
