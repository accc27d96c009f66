#define PAGEMILL_ISA portable
#define PAGEMILL_VECTOR_BYTES 16
#include "csrc/core/attention/kernel-inl.h"
