// A loss of one token from its log-probability: the mirror of grpo_kernels/token_loss.py and surrogates.py, in double.
// Branches, ties, and what an overflow leaves behind are those of the torch modules.
#pragma once

#include <cmath>
#include <cstdint>

namespace grpo_kernels {

enum class Surrogate : int64_t { clipped, cispo, sapo, constant, linear };
enum class Estimator : int64_t { none, k1, k2, k3 };

struct LossConstants {
  Surrogate surrogate;
  Estimator estimator;
  bool corrects_kl;
  double clip_low, clip_high, delta, tau_pos, tau_neg, beta, b;
};

// Of one token; on-policy `advantage` is a itself, weight and gate included.
struct Token {
  double advantage, weight, gate, old, ref;
  bool on_policy, has_gate;
};

struct TokenTerms {
  double loss, a, log_ratio, kl;
};

// loss, d loss / d R, d loss / d logp
struct Surrogated {
  double loss, d_log_ratio, d_logp;
};

// x * factor, where a factor of exactly 0 gives 0 unless x is NaN: 0 * inf is not NaN here
inline double times(double x, double factor) { return factor == 0.0 && !std::isnan(x) ? 0.0 : x * factor; }

// -min(min(r, delta) A, clip(r, clip_low, clip_high) A); half of the gradient each at a tie, bounds pass it
inline Surrogated clipped(const LossConstants& c, double log_ratio, double advantage) {
  const double ratio = std::exp(log_ratio);
  if (std::isnan(ratio)) return {ratio, ratio, 0.0};
  const double free = times(ratio > c.delta ? c.delta : ratio, advantage);
  double bounded = ratio < c.clip_low ? c.clip_low : ratio;
  bounded = (bounded > c.clip_high ? c.clip_high : bounded) * advantage;
  const double share = free == bounded ? 0.5 : free < bounded ? 1.0 : 0.0;  // of the gradient, for `free`
  const bool inside = ratio >= c.clip_low && ratio <= c.clip_high;
  const double passes = share * (ratio <= c.delta ? 1.0 : 0.0) + (1.0 - share) * (inside ? 1.0 : 0.0);
  return {-(free < bounded ? free : bounded), -times(ratio, passes * advantage), 0.0};
}

// -min(r, clip_high) A logp, the ratio a constant
inline Surrogated cispo(const LossConstants& c, double log_ratio, double advantage, double logp) {
  const double ratio = std::exp(log_ratio);
  const double weight = -(ratio > c.clip_high ? c.clip_high : ratio) * advantage;
  return {times(logp, weight), 0.0, weight};
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A
inline Surrogated sapo(const LossConstants& c, double log_ratio, double advantage) {
  const double ratio = std::exp(log_ratio), tau = advantage > 0.0 ? c.tau_pos : c.tau_neg;
  const double gate = sigmoid(tau * (ratio - 1.0));
  const double slope = 4.0 * gate * sigmoid(tau * (1.0 - ratio));  // d (4 / tau) gate / d r
  return {-times(4.0 * gate / tau, advantage), -times(ratio, slope * advantage), 0.0};
}

inline Surrogated surrogate(const LossConstants& c, double log_ratio, double advantage, double logp) {
  switch (c.surrogate) {
    case Surrogate::clipped: return clipped(c, log_ratio, advantage);
    case Surrogate::cispo: return cispo(c, log_ratio, advantage, logp);
    case Surrogate::sapo: return sapo(c, log_ratio, advantage);
    case Surrogate::linear: return {times(logp, advantage), 0.0, advantage};
    case Surrogate::constant: break;  // the loss is known, and left out, unless it is NaN
  }
  return {log_ratio, 0.0, advantage};
}

// KL(policy || reference) and its derivative in logp
inline void estimate_kl(Estimator estimator, double logp, double ref, double& kl, double& d_kl) {
  const double d = ref - logp;
  if (estimator == Estimator::k1) {
    kl = -d, d_kl = 1.0;
  } else if (estimator == Estimator::k2) {
    kl = d * d / 2.0, d_kl = -d;
  } else {
    kl = std::expm1(d) - d, d_kl = -std::expm1(d);
  }
}

inline TokenTerms token_terms(const LossConstants& c, const Token& token, double logp) {
  const double log_ratio = logp - (token.on_policy ? logp : token.old);
  Surrogated s = surrogate(c, log_ratio, token.advantage, logp);
  TokenTerms terms{s.loss, s.d_logp, log_ratio, 0.0};
  if (!token.on_policy) {
    if (token.has_gate) {
      s = {times(s.loss, token.gate), times(s.d_log_ratio, token.gate), times(s.d_logp, token.gate)};
    }
    terms.loss = token.weight * s.loss;
    terms.a = token.weight * s.d_log_ratio + token.weight * s.d_logp;
  }
  if (c.estimator != Estimator::none) {
    double d_kl;
    estimate_kl(c.estimator, logp, token.ref, terms.kl, d_kl);
    const double factor = c.beta * token.weight;
    if (c.corrects_kl) {
      const double ratio = std::exp(log_ratio);
      terms.kl = times(ratio, terms.kl), d_kl = times(ratio, d_kl);
      terms.a += factor * terms.kl;  // d ratio / d logp = ratio
    }
    terms.loss += factor * terms.kl, terms.a += factor * d_kl;
  }
  if (std::isnan(logp)) terms.loss = terms.a = logp;  // on-policy nothing else would tell
  return terms;
}

}  // namespace grpo_kernels
