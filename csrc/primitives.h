// The functions that formulas.h calls: the counterparts of the torch functions of the same names.
#pragma once

#include <cmath>

namespace grpo_kernels {

using std::exp;
using std::expm1;

template <class T>
T where(bool condition, T x, T y) {
  return condition ? x : y;
}

template <class T>
T minimum(T x, T y) {
  return x < y ? x : y;
}

template <class T>
T clamp_max(T x, T most) {
  return x > most ? most : x;
}

template <class T>
T clamp(T x, T least, T most) {
  return clamp_max(x < least ? least : x, most);
}

template <class T>
T type_as(bool condition, T) {
  return condition ? T(1) : T(0);
}

template <class T>
T full_like(T, T value) {
  return value;
}

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// loss, d loss / d R, and d loss / d logp with R held fixed
template <class T>
struct SurrogateTerms {
  T loss, d_log_ratio, d_logp_at_fixed_ratio;
};

// KL(policy || reference), its derivative in logp, and kl + d_kl, the derivative of r * kl divided by r
template <class T>
struct KlTerms {
  T kl, d_kl, d_corrected;
};

}  // namespace grpo_kernels
