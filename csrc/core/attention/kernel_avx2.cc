#define PAGEMILL_ISA avx2
#define PAGEMILL_VECTOR_BYTES 32
#include "csrc/core/attention/kernel-inl.h"
