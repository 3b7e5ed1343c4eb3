// The policy surrogates and KL estimators: made from backends/formulas.py by csrc/generate.py.
#pragma once

#include <cstdint>

#include "primitives.h"

namespace grpo_kernels {

// x * factor, where a factor of exactly 0 gives 0, also where x is inf; NaN stays.
template <class T>
T times_or_zero(T x, T factor) {
  return where((factor == T(0.0)) & (x == x), T(0.0), x * factor);
}

// log phi = lambda + k log w - lambda w, k and lambda by the sign of A.
template <class T>
T phi(T log_weight, T advantage, T k_pos, T lambda_pos, T k_neg, T lambda_neg) {
  const auto k = where(advantage >= T(0.0), full_like(log_weight, k_pos), full_like(log_weight, k_neg));
  const auto rate = where(advantage >= T(0.0), full_like(log_weight, lambda_pos), full_like(log_weight, lambda_neg));
  return exp(rate + k * log_weight - rate * exp(log_weight));
}

// -min(min(r, delta) A, clip(r, low, high) A) (PPO, https://arxiv.org/abs/1707.06347).
template <class T>
SurrogateTerms<T> clipped(T log_ratio, T advantage, T, T low, T high, T delta) {
  const auto ratio = exp(log_ratio);
  const auto free = times_or_zero(clamp_max(ratio, delta), advantage);
  const auto bounded = clamp(ratio, low, high) * advantage;
  const auto loss = -minimum(free, bounded);
  const auto share = where(free == bounded, T(0.5), type_as(free < bounded, ratio));
  const auto inside = (ratio >= low) & (ratio <= high);
  const auto passes = where(ratio <= delta, share, T(0.0)) + where(inside, T(1.0) - share, T(0.0));
  return {loss, -times_or_zero(ratio, passes * advantage), full_like(loss, T(0.0))};
}

// -min(r, cap) A logp, the ratio a constant (MiniMax-M1, https://arxiv.org/abs/2506.13585).
template <class T>
SurrogateTerms<T> cispo(T log_ratio, T advantage, T logp, T cap) {
  const auto ratio = exp(log_ratio);
  const auto weight = -clamp_max(ratio, cap) * advantage;
  return {times_or_zero(logp, weight), full_like(weight, T(0.0)), weight};
}

// -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, https://arxiv.org/abs/2511.20347).
template <class T>
SurrogateTerms<T> sapo(T log_ratio, T advantage, T, T tau_pos, T tau_neg) {
  const auto ratio = exp(log_ratio);
  const auto tau = where(advantage > T(0.0), full_like(ratio, tau_pos), full_like(ratio, tau_neg));
  const auto soft = sigmoid(tau * (ratio - T(1.0)));
  const auto d_soft = T(4.0) * soft * sigmoid(tau * (T(1.0) - ratio));
  const auto loss = -times_or_zero(T(4.0) * soft / tau, advantage);
  return {loss, -times_or_zero(ratio, d_soft * advantage), full_like(loss, T(0.0))};
}

// -phi(w) A logp, phi a constant, w the sequence's (https://arxiv.org/abs/2602.10693).
template <class T>
SurrogateTerms<T> vespo(T log_weight, T advantage, T logp, T k_pos, T lambda_pos, T k_neg, T lambda_neg) {
  const auto weight = -phi(log_weight, advantage, k_pos, lambda_pos, k_neg, lambda_neg) * advantage;
  return {times_or_zero(logp, weight), full_like(weight, T(0.0)), weight};
}

// -r A; of a mean log-ratio that was clipped beforehand GMPO (https://arxiv.org/abs/2507.20673).
template <class T>
SurrogateTerms<T> unclipped(T log_ratio, T advantage, T) {
  const auto loss = -times_or_zero(exp(log_ratio), advantage);
  return {loss, loss, full_like(loss, T(0.0))};
}

// With d = ref - logp, KL(policy || reference) per token, -d (http://joschu.net/blog/kl-approx.html).
template <class T>
KlTerms<T> k1(T logp, T ref) {
  const auto d = ref - logp;
  return {-d, full_like(d, T(1.0)), T(1.0) - d};
}

// d^2 / 2
template <class T>
KlTerms<T> k2(T logp, T ref) {
  const auto d = ref - logp;
  return {d * d / T(2.0), -d, d * (d / T(2.0) - T(1.0))};
}

// e^d - 1 - d
template <class T>
KlTerms<T> k3(T logp, T ref) {
  const auto d = ref - logp;
  return {expm1(d) - d, -expm1(d), -d};
}

enum class Surrogate : int64_t { none, clipped, cispo, sapo, vespo, unclipped };
enum class Estimator : int64_t { none, k1, k2, k3 };
constexpr const char* kSurrogates[] = {"none", "clipped", "cispo", "sapo", "vespo", "unclipped"};
constexpr const char* kEstimators[] = {"none", "k1", "k2", "k3"};
constexpr int64_t kConstantCounts[] = {0, 3, 1, 2, 4, 0};
constexpr int64_t kMostConstants = 4;

// `c` are the surrogate's constants.
template <class T>
SurrogateTerms<T> surrogate(Surrogate which, T log_ratio, T advantage, T logp, const T* c) {
  switch (which) {
    case Surrogate::clipped: return clipped(log_ratio, advantage, logp, c[0], c[1], c[2]);
    case Surrogate::cispo: return cispo(log_ratio, advantage, logp, c[0]);
    case Surrogate::sapo: return sapo(log_ratio, advantage, logp, c[0], c[1]);
    case Surrogate::vespo: return vespo(log_ratio, advantage, logp, c[0], c[1], c[2], c[3]);
    case Surrogate::unclipped: return unclipped(log_ratio, advantage, logp);
    case Surrogate::none: break;
  }
  return {NAN, NAN, NAN};
}

template <class T>
KlTerms<T> estimate_kl(Estimator which, T logp, T ref) {
  switch (which) {
    case Estimator::k1: return k1(logp, ref);
    case Estimator::k2: return k2(logp, ref);
    case Estimator::k3: return k3(logp, ref);
    case Estimator::none: break;
  }
  return {NAN, NAN, NAN};
}

}  // namespace grpo_kernels
