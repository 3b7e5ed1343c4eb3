// The row kernels with vectors of 256 bits.
#if defined(__x86_64__)
#define ISA avx2
#define VECTOR_BYTES 32
#define TARGET "avx2"
#include "kernels.inl"
#endif
