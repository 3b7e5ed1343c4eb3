// The row kernels with vectors of 512 bits (x86-64-v4).
#if defined(__x86_64__)
#define ISA avx512
#define VECTOR_BYTES 64
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl"
#include "kernels.inl"
#endif
