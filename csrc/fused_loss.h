// A FusedLoss (grpo_kernels/backends/__init__.py) of one token, from its log-probability and its divergence from a
// reference: what PolicyLoss in grpo_kernels/objective/policy.py computes, in the same dtype. Without a KL term it is the
// same operation by operation, so that at a ratio of 1 both have the same bits; the KL term is (beta w) kl here, a part of
// w (l + beta kl) there. Surrogates and KL estimators are those of formulas.h. Triton's counterpart is
// grpo_kernels/backends/triton_rows/fused.py. tests/support/row_suite.py compares each kernel with float64, and
// tests/call/test_differential.py all three.
#pragma once

#include <cmath>

#include "formulas.h"

namespace grpo_kernels {

template <class T>
struct LossConstants {
  Surrogate surrogate;
  Estimator estimator;
  bool on_policy, has_gate, has_reference;
  bool is_linear;  // on-policy: the policy term is d_policy * logp, not left out
  bool corrects_kl;
  T beta, d_entropy;
  T constants[kMostConstants];  // the surrogate's own
};

// The inputs of one token. On-policy, `d_policy` is the derivative of the policy term, weight and gate included; else 0.
// With a reference the KL is the divergence of the whole row.
template <class T>
struct Token {
  T advantage, d_policy, weight, gate, old, ref, divergence;
};

template <class T>
struct LossStats {
  T loss, d_logp, log_ratio, kl;
  T d_divergence;  // d loss / d D, where there is a reference
};

template <class T>
LossStats<T> token_loss_stats(const LossConstants<T>& c, const Token<T>& token, T logp) {
  const T log_ratio = c.on_policy ? T(0) : logp - token.old;
  LossStats<T> stats{T(0), token.d_policy, log_ratio, T(0), T(0)};
  if (c.on_policy) {
    stats.loss = logp - logp;  // NaN without a finite log-probability: nothing else makes it NaN
    if (c.is_linear) stats.loss += times_or_zero(logp, token.d_policy);
  } else {
    SurrogateTerms<T> s = surrogate(c.surrogate, log_ratio, token.advantage, logp, c.constants);
    if (c.has_gate) {
      s = {times_or_zero(s.loss, token.gate), times_or_zero(s.d_log_ratio, token.gate),
           times_or_zero(s.d_logp_at_fixed_ratio, token.gate)};
    }
    stats.loss = token.weight * s.loss;
    stats.d_logp = token.weight * s.d_log_ratio + token.weight * s.d_logp_at_fixed_ratio;
  }
  if (c.estimator != Estimator::none) {
    const KlTerms<T> estimate = estimate_kl(c.estimator, logp, token.ref);
    T d_kl = estimate.d_kl;
    stats.kl = estimate.kl;
    if (c.corrects_kl) {
      const T ratio = std::exp(log_ratio);
      stats.kl = times_or_zero(ratio, estimate.kl), d_kl = times_or_zero(ratio, estimate.d_corrected);
    }
    const T factor = c.beta * token.weight;
    stats.loss += factor * stats.kl, stats.d_logp += factor * d_kl;
  }
  if (c.has_reference) {
    stats.kl = token.divergence, stats.d_divergence = c.beta * token.weight;
    stats.loss += stats.d_divergence * stats.kl;
  }
  if (std::isnan(logp)) stats.loss = stats.d_logp = stats.log_ratio = logp;
  return stats;
}

}  // namespace grpo_kernels
