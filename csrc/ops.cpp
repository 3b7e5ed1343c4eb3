// The kernels as torch ops, on LibTorch's stable ABI: arguments checked, rows shared out among torch's threads. Results
// are written to tensors that the caller made; grpo_kernels/backends/cpp_rows calls them.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.h"
#include "row_stats.h"
#include "fused_loss.h"

// The arguments for rows of logits, and for the reference's: in the schemas, and in the functions behind them.
#define ROWS                                                                                                        \
  "Tensor logits, Tensor ids, Tensor? bias, Tensor? inv_temperatures, float inner, float outer, bool has_softcap, " \
  "ScalarType? rounded_to, "
#define ROWS_IN                                                                                            \
  const Tensor &logits, const Tensor &ids, const MaybeTensor &bias, const MaybeTensor &inv_temperatures,   \
      double inner, double outer, bool has_softcap, std::optional<ScalarType> rounded_to
#define ROWS_GIVEN \
  logits, ids, Transform { bias, inv_temperatures, inner, outer, has_softcap, rounded_to }
#define REFERENCE                                                                                               \
  "Tensor? reference_logits, Tensor? reference_bias, Tensor? reference_inv_temperatures, float reference_inner, "     \
  "float reference_outer, bool reference_has_softcap, ScalarType? reference_rounded_to, float jsd_beta, "
#define REFERENCE_IN                                                                                               \
  const MaybeTensor &reference_logits, const MaybeTensor &reference_bias,                                            \
      const MaybeTensor &reference_inv_temperatures, double reference_inner, double reference_outer,                   \
      bool reference_has_softcap, std::optional<ScalarType> reference_rounded_to, double jsd_beta
#define REFERENCE_GIVEN                                                                                            \
  ReferenceArguments {                                                                                             \
    reference_logits,                                                                                              \
        {reference_bias, reference_inv_temperatures, reference_inner, reference_outer, reference_has_softcap, reference_rounded_to}, \
        jsd_beta                                                                                          \
  }

namespace grpo_kernels {
namespace {

// kernels<T>() are those of the instruction set in use: dispatch.cpp chooses it, kernels.inl lists the functions of
// rows.inl and divergence.inl (`reduce` is reduce_any).

// Write the statistics of row i. An id outside of the vocabulary gets a log-probability of NaN.
template <class T>
Sums write_stats(const Chunk<T>& chunk, const StatColumns<T>& out, int64_t i, bool more_sums) {
  Sums sums;
  kernels<T>().reduce(chunk.logits.row(i), chunk.ids[i], more_sums, sums);
  const RowStats stats = row_stats(sums);
  out.logps[i] = static_cast<T>(chunk.has_target(i) ? target_logp(sums) : NAN);
  out.max_logit[i] = static_cast<T>(stats.max);
  out.log_sum[i] = static_cast<T>(stats.log_sum);
  if (out.entropies != nullptr) out.entropies[i] = static_cast<T>(stats.entropy);
  return sums;
}

// The inputs of the kernels for row i's divergence, without those of its gradient.
template <class T>
DivergenceInputs<T> inputs_of_divergence(const Chunk<T>& chunk, const T* max_logit, const T* log_sum,
                                         const DivergenceColumns<T>& divergence, int64_t i) {
  return divergence_inputs(max_logit[i], log_sum[i], divergence.reference_max_logit[i], divergence.reference_log_sum[i],
                           chunk.jsd_beta);
}

// Write the divergence of row i from the reference's, given the statistics of both.
template <class T>
void write_divergence(const Chunk<T>& chunk, const T* max_logit, const T* log_sum, const DivergenceColumns<T>& out,
                      int64_t i) {
  const DivergenceInputs<T> inputs = inputs_of_divergence(chunk, max_logit, log_sum, out, i);
  const DivergenceSums sums = kernels<T>().diverge(chunk.logits.row(i), chunk.reference->row(i), inputs);
  out.value[i] = static_cast<T>(sums.value);
  out.sum_k[i] = static_cast<T>(sums.sum_k);
}

// Gradient of the loss in the numbers of a row.
template <class T>
struct Coefficients {
  T d_logp, d_entropy, d_divergence;
};

template <class T>
void write_gradient(const Chunk<T>& chunk, const StatColumns<T>& stats, const DivergenceColumns<T>& divergence, int64_t i,
                    const Coefficients<T>& coefficients, bool has_d_entropy, const Matrix& out) {
  const T entropy = has_d_entropy ? stats.entropies[i] : T(0);
  GradientInputs<T> inputs = gradient_inputs(stats.logps[i], stats.max_logit[i], stats.log_sum[i], entropy,
                                             coefficients.d_logp, coefficients.d_entropy, has_d_entropy);
  inputs.target_id = chunk.ids[i];
  inputs.out = out.row(i), inputs.dtype = out.dtype;
  if (!chunk.reference.has_value()) return kernels<T>().gradient(chunk.logits.row(i), inputs);
  DivergenceInputs<T> reference_inputs = inputs_of_divergence(chunk, stats.max_logit, stats.log_sum, divergence, i);
  reference_inputs.d_divergence = coefficients.d_divergence, reference_inputs.sum_k = divergence.sum_k[i];
  kernels<T>().gradient_with_reference(chunk.logits.row(i), inputs, chunk.reference->row(i), reference_inputs);
}

template <class T>
void check_out(const Matrix& out) {
  STD_TORCH_CHECK((out.dtype == Dtype::f64) == (sizeof(T) == 8), "out: float64 goes with float64 alone");
}

// Write the reference's statistics of row i.
template <class T>
void write_reference_stats(const Chunk<T>& chunk, const DivergenceColumns<T>& out, int64_t i) {
  Sums sums;
  kernels<T>().reduce(chunk.reference->row(i), -1, false, sums);
  const RowStats stats = row_stats(sums);
  out.reference_max_logit[i] = static_cast<T>(stats.max);
  out.reference_log_sum[i] = static_cast<T>(stats.log_sum);
}

// Calls f(chunk) with the chunk of float or, if the logits are double, of double.
template <class F>
void with_chunk(const Tensor& logits, const Tensor& ids, const Transform& transform, const ReferenceArguments& reference,
                const F& f) {
  if (logits.scalar_type() == ScalarType::Double) return f(Chunk<double>(logits, ids, transform, reference));
  f(Chunk<float>(logits, ids, transform, reference));
}

// `extras` are the statistics of grpo_kernels.base.EXTRAS, in that order; those that are not wanted are absent.
void stats(ROWS_IN, const Tensor& logps, const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies,
           std::vector<MaybeTensor> extras) {
  STD_TORCH_CHECK(extras.size() == 3, "extras: expected 3, got ", extras.size());
  with_chunk(ROWS_GIVEN, {}, [&](const auto& chunk) {
    using T = typename std::decay_t<decltype(chunk)>::Scalar;
    const int64_t n = chunk.n;
    const StatColumns<T> out(n, logps, max_logit, log_sum, entropies);
    T* const squares = column<T>(extras[0], n, "log_sum_sq_probs");
    T* const means = column<T>(extras[1], n, "mean_logits");
    bool* const top1 = column<bool>(extras[2], n, "is_top1");
    chunk.each_row([&](int64_t i) {
      const Sums sums = write_stats(chunk, out, i, squares != nullptr || means != nullptr);
      // sum p^2 = (1 + squares) / (1 + rest)^2
      if (squares != nullptr) squares[i] = static_cast<T>(std::log1p(sums.squares) - 2.0 * row_stats(sums).log_sum);
      if (means != nullptr) means[i] = static_cast<T>(sums.total / static_cast<double>(chunk.vocab));
      if (top1 != nullptr) top1[i] = sums.argmax == chunk.ids[i] && !std::isnan(row_stats(sums).log_sum);
    });
  });
}

void diverge(ROWS_IN, REFERENCE_IN, const Tensor& max_logit, const Tensor& log_sum, const Tensor& reference_max_logit,
             const Tensor& reference_log_sum, const Tensor& value, const Tensor& sum_k) {
  with_chunk(ROWS_GIVEN, REFERENCE_GIVEN, [&](const auto& chunk) {
    using T = typename std::decay_t<decltype(chunk)>::Scalar;
    STD_TORCH_CHECK(chunk.reference.has_value(), "reference_logits: expected");
    const T *max_logits = column<T>(max_logit, chunk.n, "max_logit"), *log_sums = column<T>(log_sum, chunk.n, "log_sum");
    const DivergenceColumns<T> out(chunk.n, value, sum_k, reference_max_logit, reference_log_sum);
    chunk.each_row([&](int64_t i) { write_divergence(chunk, max_logits, log_sums, out, i); });
  });
}

void grad(ROWS_IN, REFERENCE_IN, const Tensor& logps, const Tensor& max_logit, const Tensor& log_sum,
          const MaybeTensor& entropies, const Tensor& d_logp, const MaybeTensor& d_entropy, const MaybeTensor& d_divergence,
          const MaybeTensor& sum_k, const MaybeTensor& reference_max_logit, const MaybeTensor& reference_log_sum,
          const Tensor& out) {
  with_chunk(ROWS_GIVEN, REFERENCE_GIVEN, [&](const auto& chunk) {
    using T = typename std::decay_t<decltype(chunk)>::Scalar;
    const int64_t n = chunk.n;
    const StatColumns<T> stats(n, logps, max_logit, log_sum, entropies);
    const DivergenceColumns<T> divergence(n, std::nullopt, sum_k, reference_max_logit, reference_log_sum);
    const T *a = column<T>(d_logp, n, "d_logp"), *b = column<T>(d_entropy, n, "d_entropy");
    const T* c = column<T>(d_divergence, n, "d_divergence");
    const Matrix gradients(out, n, chunk.vocab, "out");
    check_out<T>(gradients);
    STD_TORCH_CHECK(b == nullptr || stats.entropies != nullptr, "entropies: expected with d_entropy");
    STD_TORCH_CHECK((c != nullptr) == chunk.reference.has_value(), "d_divergence: expected with a reference alone");
    divergence.check(chunk.reference.has_value());
    chunk.each_row([&](int64_t i) {
      const Coefficients<T> coefficients{a[i], b ? b[i] : T(0), c ? c[i] : T(0)};
      write_gradient(chunk, stats, divergence, i, coefficients, b != nullptr, gradients);
    });
  });
}

// The place of a name in a table of formulas.h, which may be older than formulas.py.
template <size_t n>
int64_t place_of(const std::string& name, const char* const (&names)[n]) {
  for (size_t i = 0; i < n; ++i)
    if (name == names[i]) return static_cast<int64_t>(i);
  STD_TORCH_CHECK(false, "csrc/formulas.h: expected it to have '", name, "': run python csrc/generate.py");
  return 0;
}

// A row at a time: its statistics, its divergence, the loss and its derivatives (fused_loss.h), the gradient.
void fused(ROWS_IN, REFERENCE_IN, const MaybeTensor& advantages, const MaybeTensor& d_policy, const Tensor& weights,
           const MaybeTensor& old, const MaybeTensor& ref, const MaybeTensor& gate, std::string surrogate_name,
           std::vector<double> constants, bool is_linear, std::string estimator_name, bool corrects_kl, double beta, double d_entropy,
           const Tensor& logps, const Tensor& max_logit, const Tensor& log_sum, const Tensor& entropies,
           const Tensor& loss, const Tensor& d_logp, const Tensor& log_ratio, const MaybeTensor& kl,
           const MaybeTensor& sum_k, const MaybeTensor& reference_max_logit, const MaybeTensor& reference_log_sum,
           const MaybeTensor& out) {
  const int64_t surrogate = place_of(surrogate_name, kSurrogates), estimator = place_of(estimator_name, kEstimators);
  STD_TORCH_CHECK(static_cast<int64_t>(constants.size()) == kConstantCounts[surrogate], "constants: expected ",
                  kConstantCounts[surrogate], " for this surrogate");
  with_chunk(ROWS_GIVEN, REFERENCE_GIVEN, [&](const auto& chunk) {
    using T = typename std::decay_t<decltype(chunk)>::Scalar;
    const int64_t n = chunk.n;
    const T *advantage_of = column<T>(advantages, n, "advantages"), *d_policy_of = column<T>(d_policy, n, "d_policy");
    const T *weight_of = column<T>(weights, n, "weights"), *gate_of = column<T>(gate, n, "gate");
    const T *old_of = column<T>(old, n, "old"), *ref_of = column<T>(ref, n, "ref");
    const StatColumns<T> stats(n, logps, max_logit, log_sum, entropies);
    const DivergenceColumns<T> divergence(n, kl, sum_k, reference_max_logit, reference_log_sum);
    T *losses = column<T>(loss, n, "loss"), *d_logps = column<T>(d_logp, n, "d_logp");
    T *log_ratios = column<T>(log_ratio, n, "log_ratio"), *kls = divergence.value;
    const bool on_policy = !old.has_value(), has_reference = chunk.reference.has_value();
    LossConstants<T> loss_constants{static_cast<Surrogate>(surrogate), static_cast<Estimator>(estimator), on_policy,
                                    gate_of != nullptr, has_reference, is_linear, corrects_kl, static_cast<T>(beta),
                                    static_cast<T>(d_entropy), {}};
    std::transform(constants.begin(), constants.end(), loss_constants.constants,
                   [](double x) { return static_cast<T>(x); });
    const bool estimates = loss_constants.estimator != Estimator::none;
    STD_TORCH_CHECK(!(estimates && has_reference), "estimator: expected none with a reference");
    STD_TORCH_CHECK(ref.has_value() == estimates && kl.has_value() == (estimates || has_reference),
                    "ref, kl: expected with an estimator, without one neither, but kl with a reference");
    divergence.check(has_reference);
    STD_TORCH_CHECK(d_policy.has_value() == on_policy && advantages.has_value() != on_policy,
                    "old, advantages: expected together, and without them d_policy");
    STD_TORCH_CHECK((loss_constants.surrogate == Surrogate::none) == on_policy,
                    "surrogate: expected with old, none without");
    std::optional<Matrix> gradients;
    if (out.has_value()) {
      gradients.emplace(*out, n, chunk.vocab, "out");
      check_out<T>(*gradients);
    }
    chunk.each_row([&](int64_t i) {
      write_stats(chunk, stats, i, false);
      if (has_reference) {
        write_reference_stats(chunk, divergence, i);
        write_divergence(chunk, stats.max_logit, stats.log_sum, divergence, i);
      }
      const Token<T> token{on_policy ? T(0) : advantage_of[i], on_policy ? d_policy_of[i] : T(0), weight_of[i],
                           gate_of ? gate_of[i] : T(1), old_of ? old_of[i] : T(0), ref_of ? ref_of[i] : T(0),
                           has_reference ? kls[i] : T(0)};
      const LossStats<T> loss_stats = token_loss_stats(loss_constants, token, stats.logps[i]);
      losses[i] = loss_stats.loss, d_logps[i] = loss_stats.d_logp, log_ratios[i] = loss_stats.log_ratio;
      if (kls != nullptr) kls[i] = loss_stats.kl;
      const Coefficients<T> coefficients{loss_stats.d_logp, loss_constants.d_entropy, loss_stats.d_divergence};
      if (gradients.has_value()) {
        write_gradient(chunk, stats, divergence, i, coefficients, loss_constants.d_entropy != T(0), *gradients);
      }
    });
  });
}

// Return the instruction set in use, after choosing the one called `name` unless that is "".
std::string isa(std::string name) {
  STD_TORCH_CHECK(name.empty() || use_isa(name.c_str()), "isa: this processor has no '", name, "'");
  return isa_in_use();
}

}  // namespace
}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY(grpo_kernels_cpp, m) {
  m.def("stats(" ROWS
        "*, Tensor(a!) logps, Tensor(b!) max_logit, Tensor(c!) log_sum, Tensor(d!)? entropies, "
        "Tensor(e!)?[] extras) -> ()");
  m.def("diverge(" ROWS REFERENCE
        "Tensor max_logit, Tensor log_sum, Tensor reference_max_logit, Tensor reference_log_sum, "
        "*, Tensor(a!) value, Tensor(b!) sum_k) -> ()");
  m.def("grad(" ROWS REFERENCE
        "Tensor logps, Tensor max_logit, Tensor log_sum, Tensor? entropies, Tensor d_logp, Tensor? d_entropy, Tensor? d_divergence, "
        "Tensor? sum_k, Tensor? reference_max_logit, Tensor? reference_log_sum, *, Tensor(a!) out) -> ()");
  m.def("fused(" ROWS REFERENCE
        "Tensor? advantages, Tensor? d_policy, Tensor weights, Tensor? old, Tensor? ref, Tensor? gate, str surrogate, "
        "float[] constants, bool is_linear, str estimator, bool corrects_kl, float beta, float d_entropy, "
        "*, Tensor(a!) logps, Tensor(b!) max_logit, Tensor(c!) log_sum, Tensor(d!) entropies, Tensor(e!) loss, "
        "Tensor(f!) d_logp, Tensor(g!) log_ratio, Tensor(h!)? kl, Tensor(i!)? sum_k, Tensor(j!)? reference_max_logit, "
        "Tensor(k!)? reference_log_sum, Tensor(l!)? out) -> ()");
  m.def("isa(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CPU, m) {
  m.impl("stats", TORCH_BOX(&grpo_kernels::stats));
  m.impl("diverge", TORCH_BOX(&grpo_kernels::diverge));
  m.impl("grad", TORCH_BOX(&grpo_kernels::grad));
  m.impl("fused", TORCH_BOX(&grpo_kernels::fused));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&grpo_kernels::isa));
}
