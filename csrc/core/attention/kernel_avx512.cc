// The kernels for AVX-512: compiled with -march=x86-64-v4.
#include "csrc/core/attention/kernel.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include "csrc/core/attention/kernel-inl.h"

namespace pagemill::attention {

const Kernels kAvx512Kernels = {RunItem<float>, RunItem<BFloat16>,
                                RunItem<F8E4M3>, RunItem<F8E5M2>,
                                RunItem<int8_t>};

}  // namespace pagemill::attention

#endif  // PAGEMILL_X86
