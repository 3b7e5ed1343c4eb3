// The row kernels compiled for one instruction set. Each rows_*.cpp defines ISA, VECTOR_BYTES and, unless the compiler
// assumes that instruction set anyway, TARGET. Files included before BEGIN_TARGET may run on any processor.
#include <cmath>
#include <cstring>

#include "row.h"

#define PRAGMA(x) _Pragma(#x)
#if defined(TARGET) && defined(__clang__)
#define BEGIN_TARGET(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#elif defined(TARGET)
#define BEGIN_TARGET(names) PRAGMA(GCC target(names))  // up to the end of the file, where templates are instantiated
#define END_TARGET
#else
#define BEGIN_TARGET(names)
#define END_TARGET
#endif

BEGIN_TARGET(TARGET)
namespace grpo_kernels::ISA {
#include "vector.inl"
#include "halves.inl"
#include "rows.inl"
#include "divergence.inl"

extern const Kernels<float> in_float;
extern const Kernels<double> in_double;
const Kernels<float> in_float = {reduce_any<float>, gradient_any<float>, diverge_any<float>,
                                 gradient_with_reference_any<float>};
const Kernels<double> in_double = {reduce_any<double>, gradient_any<double>, diverge_any<double>,
                                   gradient_with_reference_any<double>};
}  // namespace grpo_kernels::ISA
END_TARGET
