// The choice of an instruction set's kernels, at run time.
#include <atomic>
#include <cstring>

#include "row.h"

namespace grpo_kernels {

namespace portable { extern const Kernels<float> in_float; extern const Kernels<double> in_double; }
namespace avx2 { extern const Kernels<float> in_float; extern const Kernels<double> in_double; }
namespace avx512 { extern const Kernels<float> in_float; extern const Kernels<double> in_double; }

namespace {

enum Isa : int { kPortable, kAvx2, kAvx512 };
constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

std::atomic<int> in_use{best()};

}  // namespace

const char* isa_in_use() { return kNames[in_use]; }

bool use_isa(const char* name) {
  int wanted = std::strcmp(name, "auto") == 0 ? best() : -1;
  for (int isa = kPortable; isa <= best(); ++isa) {
    if (std::strcmp(name, kNames[isa]) == 0) wanted = isa;
  }
  if (wanted < 0) return false;
  in_use = wanted;
  return true;
}

template <>
const Kernels<float>& kernels() {
#if defined(__x86_64__)
  if (in_use == kAvx512) return avx512::in_float;
  if (in_use == kAvx2) return avx2::in_float;
#endif
  return portable::in_float;
}

template <>
const Kernels<double>& kernels() {
#if defined(__x86_64__)
  if (in_use == kAvx512) return avx512::in_double;
  if (in_use == kAvx2) return avx2::in_double;
#endif
  return portable::in_double;
}

}  // namespace grpo_kernels
