// Statistics of a row from its sums, and the numbers that its gradient needs from the statistics; in double.
#pragma once

#include <cmath>

#include "row.h"

namespace grpo_kernels {

// All are NaN if a logit is NaN or the largest is -inf. If it is +inf, only the entropy is NaN: the others have p = 0.
struct RowStats {
  double max, log_sum, entropy;
};

inline RowStats row_stats(const Sums& sums) {
  const double nan_or_0 = sums.max - sums.max;
  const double rest = sums.max == INFINITY ? sums.rest : sums.rest + nan_or_0;
  const double log_sum = std::log1p(rest);
  return {std::isnan(rest) ? rest : sums.max, log_sum, log_sum - (sums.weighted + nan_or_0) / (1.0 + rest)};
}

// log p of the target; its own term is left out of the sum: -log(1 + sum of the others / e^(z - m))
inline double target_logp(const Sums& sums) {
  const bool is_max = sums.z_target == sums.max;  // a target that ties for the maximum counts as the one left out
  const double others = is_max ? sums.rest : 1.0 + (sums.rest - sums.exp_target);
  const double x = std::log(others) + (sums.max - sums.z_target);
  return -((x > 0.0 ? x : 0.0) + std::log1p(std::exp(-std::fabs(x))));
}

// The arguments of `Kernels::gradient`, except the target's place and the output.
template <class T>
GradientInputs<T> gradient_inputs(T logp, T max, T log_sum, T entropy, T d_logp, T d_entropy, bool has_d_entropy) {
  const double p = std::exp(static_cast<double>(logp)), others = -std::expm1(static_cast<double>(logp));
  double dz_target = d_logp * others, offset = 0.0;
  if (has_d_entropy) {
    const double finite = logp < kLowest ? kLowest : logp;
    dz_target -= d_entropy * p * (finite + entropy);
    offset = static_cast<double>(entropy) - log_sum;
  }
  GradientInputs<T> in{};
  in.max = max;
  in.inv_sum = static_cast<T>(std::exp(-static_cast<double>(log_sum)));
  in.offset = static_cast<T>(offset);
  in.d_logp = d_logp, in.d_entropy = d_entropy, in.has_d_entropy = has_d_entropy;
  in.dz_target = static_cast<T>(dz_target);
  return in;
}

// The arguments of `Kernels::diverge`, from the statistics of both heads. The offset is rounded once, so that it is
// exactly 0 where both heads have the same statistics.
template <class T>
DivergenceInputs<T> divergence_inputs(T max, T log_sum, T reference_max, T reference_log_sum, double jsd_beta) {
  const double m = max, l = log_sum, reference_m = reference_max, reference_l = reference_log_sum;
  DivergenceInputs<T> in{};
  in.max = max, in.reference_max = reference_max;
  in.inv_sum = static_cast<T>(std::exp(-l)), in.reference_inv_sum = static_cast<T>(std::exp(-reference_l));
  in.offset = static_cast<T>((m - reference_m) + (l - reference_l));
  in.q_share = static_cast<T>(jsd_beta), in.p_share = static_cast<T>(1.0 - jsd_beta);
  return in;
}

}  // namespace grpo_kernels
