// The records that the ops (ops.cpp) and the kernels of each instruction set (rows.inl) exchange. T is float, or double
// for double rows.
#pragma once

#include <cstdint>

namespace grpo_kernels {

enum class Dtype { f32, f64, bf16, f16 };

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

constexpr float kLowest = -1e4f;  // e^kLowest is 0, and 0 * kLowest is 0, which 0 * -inf is not

// A row of the raw logits x, and how it becomes scaled logits:
//   z = r * inner, or tanh(r * inner) * outer with a soft-cap, where r = round(x + bias)
template <class T>
struct Row {
  const void* x;  // (size,) of `dtype`
  Dtype dtype;
  int64_t size;
  const T* bias;  // (size,), or null
  bool rounds;
  Dtype rounded_to;
  bool has_softcap;
  T inner, outer;
};

// Sums over a row. One instance of the largest logit m is left out of the first three, so that 1 + rest is the whole
// sum, and log1p(rest) keeps its precision when one token is nearly certain. m ignores NaN logits, but they make the
// sums NaN.
struct Sums {
  double max;          // m
  double rest;         // sum of e^(z - m)
  double weighted;     // sum of e^(z - m) (z - m)
  double squares;      // sum of e^(2 (z - m)), only with `more_sums`
  double total;        // sum of z, only with `more_sums`
  int64_t argmax;      // the lowest place of m
  double z_target;     // z of the target, where there is one
  double exp_target;   // e^(z - m) of it, with the bits that it has in the sum
};

// d z_j = d_logp (1[j = id] - p_j) - d_entropy p_j (log p_j + entropy), with log p_j + entropy = (z_j - m) + offset
template <class T>
struct GradientInputs {
  T max, inv_sum, offset;  // m, 1 / (1 + rest), entropy - log(1 + rest)
  T d_logp, d_entropy;     // d loss / d logp, d loss / d entropy
  bool has_d_entropy;
  int64_t target_id;  // may lie outside of the row
  T dz_target;        // d z of the target
  void* out;          // (size,) of `dtype`: d z * dz/dx
  Dtype dtype;
};

// KL(q || p), KL(p || q) and the generalized Jensen-Shannon divergence, of the student's p from the reference's q.
enum class Kind { forward, reverse, mixed };

// The numbers that a divergence and its gradient need besides the rows of student and reference.
template <class T>
struct DivergenceInputs {
  T max, inv_sum, reference_max, reference_inv_sum;  // as in GradientInputs
  T offset;                                          // (z - y) - (log p - log q)
  T q_share, p_share;                                // jsd_beta and 1 - jsd_beta, the mixture's weights
  T d_divergence, sum_k;                             // for the gradient: d loss / d D, and the sum of k

  Kind kind() const { return q_share == T(0) ? Kind::forward : p_share == T(0) ? Kind::reverse : Kind::mixed; }
};

// Sums over both rows: D, and the sum of k that the gradient takes as `DivergenceInputs::sum_k`.
struct DivergenceSums {
  double value, sum_k;
};

template <class T>
struct Kernels {
  void (*reduce)(const Row<T>&, int64_t target, bool more_sums, Sums&);
  void (*gradient)(const Row<T>&, const GradientInputs<T>&);
  DivergenceSums (*diverge)(const Row<T>&, const Row<T>& reference, const DivergenceInputs<T>&);
  void (*gradient_with_reference)(const Row<T>&, const GradientInputs<T>&, const Row<T>& reference, const DivergenceInputs<T>&);
};

// The kernels of the instruction set in use: the best one that this processor has, unless another was chosen.
template <class T>
const Kernels<T>& kernels();

const char* isa_in_use();
bool use_isa(const char* name);  // "auto", "avx512", "avx2" or "portable"; false if this processor lacks it

}  // namespace grpo_kernels
