#define PAGEMILL_ISA avx512
#define PAGEMILL_VECTOR_BYTES 64
#include "csrc/core/attention/kernel-inl.h"
