// The kernels as torch ops, on LibTorch's stable ABI: arguments checked, rows shared out among torch's threads. Results
// are written to tensors that the caller made; grpo_kernels/backends/cpp_rows calls them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "row.h"
#include "row_stats.h"
#include "token_loss.h"

namespace grpo_kernels {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 1 << 15;  // logits that are worth a thread

Dtype dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::f16;
    default: STD_TORCH_CHECK(false, "expected float32, float64, bfloat16 or float16"); return Dtype::f32;
  }
}

// (n,), contiguous, of T
template <class T>
T* column(const Tensor& x, int64_t n, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == n && (n < 2 || x.stride(0) == 1), name, ": expected contiguous (", n, ",)");
  return x.mutable_data_ptr<T>();
}

template <class T>
T* column(const MaybeTensor& x, int64_t n, const char* name) {
  return x.has_value() ? column<T>(*x, n, name) : nullptr;
}

// (n, V), the rows contiguous
struct Matrix {
  char* data;
  Dtype dtype;
  int64_t row_bytes;

  Matrix(const Tensor& x, int64_t n, int64_t vocab, const char* name) : dtype(dtype_of(x.scalar_type())) {
    STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == n && x.size(1) == vocab, name, ": expected (", n, ", ", vocab, ")");
    STD_TORCH_CHECK(vocab < 2 || x.stride(1) == 1, name, ": expected contiguous rows");
    data = static_cast<char*>(x.mutable_data_ptr());
    row_bytes = x.stride(0) * size_of(dtype);
  }
  char* row(int64_t i) const { return data + i * row_bytes; }
};

// `LogitTransform` as numbers: see Row.
struct Transform {
  MaybeTensor bias, inv_temperatures;
  double inner, outer;
  bool has_softcap;
  std::optional<ScalarType> rounded_to;
};

// Rows of logits and their targets.
template <class T>
struct Chunk {
  Matrix x;
  const int64_t* ids;
  const T *bias, *inv_t;
  Row<T> first;

  Chunk(const Tensor& logits, const Tensor& targets, const Transform& transform)
      : x(logits, logits.size(0), logits.size(1), "logits"),
        ids(column<int64_t>(targets, logits.size(0), "ids")),
        bias(column<T>(transform.bias, logits.size(1), "bias")),
        inv_t(column<T>(transform.inv_temperatures, logits.size(0), "inv_temperatures")) {
    const bool rounds = transform.rounded_to.has_value();
    const Dtype rounded_to = rounds ? dtype_of(*transform.rounded_to) : x.dtype;
    STD_TORCH_CHECK((x.dtype == Dtype::f64) == (sizeof(T) == 8), "logits: float64 goes with float64 alone");
    STD_TORCH_CHECK(!rounds || size_of(rounded_to) == 2, "rounded_to: expected a dtype of 16 bits");
    first = {x.data, x.dtype, logits.size(1), bias, rounds, rounded_to, transform.has_softcap,
             static_cast<T>(transform.inner), static_cast<T>(transform.outer)};
  }

  Row<T> row(int64_t i) const {
    Row<T> row = first;
    row.x = x.row(i);
    if (inv_t != nullptr) (row.has_softcap ? row.outer : row.inner) *= inv_t[i];
    return row;
  }
  bool has_target(int64_t i) const { return ids[i] >= 0 && ids[i] < first.size; }

  // f(i) for all rows: each by one thread, so that its bits do not depend on how many there are
  template <class F>
  void each_row(int64_t n, const F& f) const {
    torch::stable::parallel_for(0, n, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, first.size)),
                                [&f](int64_t start, int64_t stop) {
                                  for (int64_t i = start; i < stop; ++i) f(i);
                                });
  }
};

// Statistics (n,); entropies where they are wanted.
template <class T>
struct StatColumns {
  T *logps, *max_logit, *log_sum, *entropies;

  StatColumns(int64_t n, const Tensor& logps, const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies)
      : logps(column<T>(logps, n, "logps")),
        max_logit(column<T>(max_logit, n, "max_logit")),
        log_sum(column<T>(log_sum, n, "log_sum")),
        entropies(column<T>(entropies, n, "entropies")) {}
};

// The statistics of row i, written. An id that does not exist has a log-probability of NaN.
template <class T>
Sums write_stats(const Chunk<T>& chunk, const StatColumns<T>& out, int64_t i, bool extras) {
  Sums sums;
  kernels<T>().reduce(chunk.row(i), chunk.ids[i], extras, sums);
  const RowStats stats = row_stats(sums);
  out.logps[i] = static_cast<T>(chunk.has_target(i) ? target_logp(sums) : NAN);
  out.max_logit[i] = static_cast<T>(stats.max);
  out.log_sum[i] = static_cast<T>(stats.log_sum);
  if (out.entropies != nullptr) out.entropies[i] = static_cast<T>(stats.entropy);
  return sums;
}

template <class T>
void write_gradient(const Chunk<T>& chunk, const StatColumns<T>& stats, int64_t i, T a, T b, bool has_b,
                    int64_t first_id, const Matrix& out) {
  const T entropy = has_b ? stats.entropies[i] : T(0);
  Gradient<T> at = row_gradient(stats.logps[i], stats.max_logit[i], stats.log_sum[i], entropy, a, b, has_b);
  at.target = static_cast<int64_t>(static_cast<uint64_t>(chunk.ids[i]) - first_id);  // any id: no overflow
  at.out = out.row(i), at.dtype = out.dtype;
  kernels<T>().gradient(chunk.row(i), at);
}

template <class T>
void check_out(const Matrix& out) {
  STD_TORCH_CHECK((out.dtype == Dtype::f64) == (sizeof(T) == 8), "out: float64 goes with float64 alone");
}

template <class T>
void stats_of(const Tensor& logits, const Tensor& ids, const Transform& transform, const Tensor& logps,
              const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies,
              const MaybeTensor& log_sum_sq_probs, const MaybeTensor& mean_logits, const MaybeTensor& is_top1) {
  const Chunk<T> chunk(logits, ids, transform);
  const int64_t n = logits.size(0), vocab = logits.size(1);
  const StatColumns<T> out(n, logps, max_logit, log_sum, entropies);
  T* const squares = column<T>(log_sum_sq_probs, n, "log_sum_sq_probs");
  T* const means = column<T>(mean_logits, n, "mean_logits");
  bool* const top1 = column<bool>(is_top1, n, "is_top1");
  chunk.each_row(n, [&](int64_t i) {
    const Sums sums = write_stats(chunk, out, i, squares != nullptr || means != nullptr);
    // sum p^2 = (1 + squares) / (1 + rest)^2
    if (squares != nullptr) squares[i] = static_cast<T>(std::log1p(sums.squares) - 2.0 * row_stats(sums).log_sum);
    if (means != nullptr) means[i] = static_cast<T>(sums.total / static_cast<double>(vocab));
    if (top1 != nullptr) top1[i] = sums.argmax == chunk.ids[i];
  });
}

template <class T>
void grad_of(const Tensor& logits, const Tensor& ids, const Transform& transform, const Tensor& logps,
             const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies, const Tensor& a,
             const MaybeTensor& b, int64_t first_id, const Tensor& out) {
  const Chunk<T> chunk(logits, ids, transform);
  const int64_t n = logits.size(0);
  const StatColumns<T> stats(n, logps, max_logit, log_sum, entropies);
  const T *a_rows = column<T>(a, n, "a"), *b_rows = column<T>(b, n, "b");
  const Matrix to(out, n, logits.size(1), "out");
  check_out<T>(to);
  const bool has_b = b.has_value();
  STD_TORCH_CHECK(!has_b || entropies.has_value(), "entropies: expected with b");
  chunk.each_row(n, [&](int64_t i) {
    write_gradient(chunk, stats, i, a_rows[i], has_b ? b_rows[i] : T(0), has_b, first_id, to);
  });
}

struct TokenTensors {
  MaybeTensor advantages, d_logps;
  Tensor weights;
  MaybeTensor old, ref, gate;
};

struct FusedResults {
  Tensor logps, max_logit, log_sum, entropies, loss, a, log_ratio;
  MaybeTensor kl, out;
};

template <class T>
void fused_of(const Tensor& logits, const Tensor& ids, const Transform& transform, const TokenTensors& tokens,
              const LossConstants<double>& given, const FusedResults& results) {
  const Chunk<T> chunk(logits, ids, transform);
  const int64_t n = logits.size(0);
  const T *advantages = column<T>(tokens.advantages, n, "advantages"), *d_logps = column<T>(tokens.d_logps, n, "d_logps");
  const T* weights = column<T>(tokens.weights, n, "weights");
  const T *old = column<T>(tokens.old, n, "old"), *ref = column<T>(tokens.ref, n, "ref");
  const T* gate = column<T>(tokens.gate, n, "gate");
  const StatColumns<T> stats(n, results.logps, results.max_logit, results.log_sum, results.entropies);
  T *loss = column<T>(results.loss, n, "loss"), *a = column<T>(results.a, n, "a");
  T *log_ratio = column<T>(results.log_ratio, n, "log_ratio"), *kl = column<T>(results.kl, n, "kl");
  const LossConstants<T> constants = given.template to<T>();
  const bool has_kl = constants.estimator != Estimator::none;
  STD_TORCH_CHECK(tokens.ref.has_value() == has_kl && results.kl.has_value() == has_kl,
                  "ref, kl: expected with an estimator, and without one neither");
  const bool on_policy = !tokens.old.has_value();
  STD_TORCH_CHECK(tokens.d_logps.has_value() == on_policy && tokens.advantages.has_value() != on_policy,
                  "old, advantages: expected together, and without them d_logps");
  const T* slopes = on_policy ? d_logps : advantages;
  std::optional<Matrix> to;
  if (results.out.has_value()) {
    to.emplace(*results.out, n, logits.size(1), "out");
    check_out<T>(*to);
  }
  chunk.each_row(n, [&](int64_t i) {
    write_stats(chunk, stats, i, false);
    const Token<T> token{slopes[i], weights[i], gate ? gate[i] : T(1), old ? old[i] : T(0), ref ? ref[i] : T(0),
                         on_policy, gate != nullptr};
    const TokenTerms<T> terms = token_terms(constants, token, stats.logps[i]);
    loss[i] = terms.loss, a[i] = terms.a, log_ratio[i] = terms.log_ratio;
    if (kl != nullptr) kl[i] = terms.kl;
    if (to.has_value()) write_gradient(chunk, stats, i, terms.a, constants.d_entropy, constants.d_entropy != T(0), 0, *to);
  });
}

void stats(const Tensor& logits, const Tensor& ids, const MaybeTensor& bias, const MaybeTensor& inv_temperatures,
           double inner, double outer, bool has_softcap, std::optional<ScalarType> rounded_to, const Tensor& logps,
           const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies,
           const MaybeTensor& log_sum_sq_probs, const MaybeTensor& mean_logits, const MaybeTensor& is_top1) {
  const Transform transform{bias, inv_temperatures, inner, outer, has_softcap, rounded_to};
  const auto run = logits.scalar_type() == ScalarType::Double ? stats_of<double> : stats_of<float>;
  run(logits, ids, transform, logps, max_logit, log_sum, entropies, log_sum_sq_probs, mean_logits, is_top1);
}

void grad(const Tensor& logits, const Tensor& ids, const MaybeTensor& bias, const MaybeTensor& inv_temperatures,
          double inner, double outer, bool has_softcap, std::optional<ScalarType> rounded_to, const Tensor& logps,
          const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies, const Tensor& a,
          const MaybeTensor& b, int64_t first_id, const Tensor& out) {
  const Transform transform{bias, inv_temperatures, inner, outer, has_softcap, rounded_to};
  const auto run = logits.scalar_type() == ScalarType::Double ? grad_of<double> : grad_of<float>;
  run(logits, ids, transform, logps, max_logit, log_sum, entropies, a, b, first_id, out);
}

void fused(const Tensor& logits, const Tensor& ids, const MaybeTensor& bias, const MaybeTensor& inv_temperatures,
           double inner, double outer, bool has_softcap, std::optional<ScalarType> rounded_to,
           const MaybeTensor& advantages, const MaybeTensor& d_logps, const Tensor& weights, const MaybeTensor& old,
           const MaybeTensor& ref, const MaybeTensor& gate, int64_t surrogate, std::vector<double> constants,
           int64_t estimator, bool corrects_kl, double beta, double d_entropy, const Tensor& logps,
           const Tensor& max_logit, const Tensor& log_sum, const Tensor& entropies, const Tensor& loss,
           const Tensor& a, const Tensor& log_ratio, const MaybeTensor& kl, const MaybeTensor& out) {
  STD_TORCH_CHECK(surrogate >= 0 && surrogate < kSurrogates, "surrogate: unknown");
  STD_TORCH_CHECK(estimator >= 0 && estimator < kEstimators, "estimator: unknown");
  STD_TORCH_CHECK(static_cast<int64_t>(constants.size()) == kConstants[surrogate], "constants: expected ",
                  kConstants[surrogate], " for this surrogate");
  const Transform transform{bias, inv_temperatures, inner, outer, has_softcap, rounded_to};
  LossConstants<double> given{static_cast<Surrogate>(surrogate), static_cast<Estimator>(estimator), corrects_kl, beta,
                              d_entropy, {}};
  std::copy(constants.begin(), constants.end(), given.constants);
  const auto run = logits.scalar_type() == ScalarType::Double ? fused_of<double> : fused_of<float>;
  run(logits, ids, transform, {advantages, d_logps, weights, old, ref, gate}, given,
      {logps, max_logit, log_sum, entropies, loss, a, log_ratio, kl, out});
}

// The instruction set in use; a name chooses one, "" does not.
std::string isa(std::string name) {
  STD_TORCH_CHECK(name.empty() || use_isa(name.c_str()), "isa: this processor has no '", name, "'");
  return isa_in_use();
}

}  // namespace
}  // namespace grpo_kernels

#define ROWS                                                                                                        \
  "Tensor logits, Tensor ids, Tensor? bias, Tensor? inv_temperatures, float inner, float outer, bool has_softcap, " \
  "ScalarType? rounded_to, "

STABLE_TORCH_LIBRARY(grpo_kernels_cpp, m) {
  m.def("stats(" ROWS
        "*, Tensor(a!) logps, Tensor(b!) max_logit, Tensor(c!) log_sum, Tensor(d!)? entropies, "
        "Tensor(e!)? log_sum_sq_probs, Tensor(f!)? mean_logits, Tensor(g!)? is_top1) -> ()");
  m.def("grad(" ROWS
        "Tensor logps, Tensor max_logit, Tensor log_sum, Tensor? entropies, Tensor a, Tensor? b, int first_id, "
        "*, Tensor(a!) out) -> ()");
  m.def("fused(" ROWS
        "Tensor? advantages, Tensor? d_logps, Tensor weights, Tensor? old, Tensor? ref, Tensor? gate, int surrogate, "
        "float[] constants, int estimator, bool corrects_kl, float beta, float d_entropy, *, Tensor(a!) logps, Tensor(b!) max_logit, Tensor(c!) log_sum, Tensor(d!) entropies, "
        "Tensor(e!) loss, Tensor(f!) a, Tensor(g!) log_ratio, Tensor(h!)? kl, Tensor(i!)? out) -> ()");
  m.def("isa(str name) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CPU, m) {
  m.impl("stats", TORCH_BOX(&grpo_kernels::stats));
  m.impl("grad", TORCH_BOX(&grpo_kernels::grad));
  m.impl("fused", TORCH_BOX(&grpo_kernels::fused));
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&grpo_kernels::isa));
}
