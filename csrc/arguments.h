// The ops' arguments, checked, as the kernels read them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>

#include "row.h"

namespace grpo_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 1 << 15;  // logits that are worth a thread

inline Dtype dtype_of(ScalarType type) {
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

// Rows of a head's logits; the names in messages start with `prefix`.
template <class T>
struct LogitRows {
  Matrix x;
  const T *bias, *inv_t;
  Row<T> row_template;

  LogitRows(const Tensor& logits, int64_t n, int64_t vocab, const Transform& transform, const std::string& prefix)
      : x(logits, n, vocab, (prefix + "logits").c_str()),
        bias(column<T>(transform.bias, vocab, (prefix + "bias").c_str())),
        inv_t(column<T>(transform.inv_temperatures, n, (prefix + "inv_temperatures").c_str())) {
    const bool rounds = transform.rounded_to.has_value();
    const Dtype rounded_to = rounds ? dtype_of(*transform.rounded_to) : x.dtype;
    STD_TORCH_CHECK((x.dtype == Dtype::f64) == (sizeof(T) == 8), prefix, "logits: float64 goes with float64 alone");
    STD_TORCH_CHECK(!rounds || size_of(rounded_to) == 2, prefix, "rounded_to: expected a dtype of 16 bits");
    row_template = {x.data, x.dtype, vocab, bias, rounds, rounded_to, transform.has_softcap,
                    static_cast<T>(transform.inner), static_cast<T>(transform.outer)};
  }

  Row<T> row(int64_t i) const {
    Row<T> row = row_template;
    row.x = x.row(i);
    if (inv_t != nullptr) (row.has_softcap ? row.outer : row.inner) *= inv_t[i];
    return row;
  }
};

// A reference as the ops take it; `logits` is absent without a reference.
struct ReferenceArguments {
  MaybeTensor logits;
  Transform transform;
  double jsd_beta;
};

// Rows of logits with their targets, and the reference's rows if there is a reference.
template <class T>
struct Chunk {
  using Scalar = T;
  int64_t n, vocab;
  LogitRows<T> logits;
  const int64_t* ids;
  std::optional<LogitRows<T>> reference;
  double jsd_beta;

  Chunk(const Tensor& logits, const Tensor& targets, const Transform& transform, const ReferenceArguments& reference_in)
      : n(logits.size(0)),
        vocab(logits.size(1)),
        logits(logits, n, vocab, transform, ""),
        ids(column<int64_t>(targets, n, "ids")),
        jsd_beta(reference_in.jsd_beta) {
    if (reference_in.logits) reference.emplace(*reference_in.logits, n, vocab, reference_in.transform, "reference_");
    STD_TORCH_CHECK(jsd_beta >= 0.0 && jsd_beta <= 1.0, "jsd_beta: expected a number in [0, 1], got ", jsd_beta);
  }

  bool has_target(int64_t i) const { return ids[i] >= 0 && ids[i] < vocab; }

  // f(i) for all rows, each row by one thread, so that its bits do not depend on the number of threads
  template <class F>
  void each_row(const F& f) const {
    torch::stable::parallel_for(0, n, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, vocab)),
                                [&f](int64_t start, int64_t stop) {
                                  for (int64_t i = start; i < stop; ++i) f(i);
                                });
  }
};

// Statistics (n,); entropies is null if not wanted.
template <class T>
struct StatColumns {
  T *logps, *max_logit, *log_sum, *entropies;

  StatColumns(int64_t n, const Tensor& logps, const Tensor& max_logit, const Tensor& log_sum, const MaybeTensor& entropies)
      : logps(column<T>(logps, n, "logps")),
        max_logit(column<T>(max_logit, n, "max_logit")),
        log_sum(column<T>(log_sum, n, "log_sum")),
        entropies(column<T>(entropies, n, "entropies")) {}
};

// The divergence and the reference's statistics (n,). Without a reference all are null, except that value may hold a KL.
template <class T>
struct DivergenceColumns {
  T *value, *sum_k, *reference_max_logit, *reference_log_sum;

  DivergenceColumns(int64_t n, const MaybeTensor& value, const MaybeTensor& sum_k, const MaybeTensor& max_logit,
                    const MaybeTensor& log_sum)
      : value(column<T>(value, n, "value")),
        sum_k(column<T>(sum_k, n, "sum_k")),
        reference_max_logit(column<T>(max_logit, n, "reference_max_logit")),
        reference_log_sum(column<T>(log_sum, n, "reference_log_sum")) {}

  void check(bool has_reference) const {
    for (const T* x : {sum_k, reference_max_logit, reference_log_sum}) {
      STD_TORCH_CHECK((x != nullptr) == has_reference,
                      "sum_k, reference_max_logit, reference_log_sum: expected with a reference, and without one none");
    }
  }
};

}  // namespace grpo_kernels
