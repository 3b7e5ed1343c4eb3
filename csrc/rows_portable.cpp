// The row kernels with vectors of 128 bits, which every processor of an architecture has: SSE2, NEON.
#define ISA portable
#define VECTOR_BYTES 16
#include "kernels.inl"
