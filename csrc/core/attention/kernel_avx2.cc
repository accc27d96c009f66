// The kernels for AVX2 with FMA: compiled with -mavx2 -mfma -mf16c -mbmi2.
#include "csrc/core/attention/kernel.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include "csrc/core/attention/kernel-inl.h"

namespace pagemill::attention {

const Kernels kAvx2Kernels = {RunItem<float>, RunItem<BFloat16>,
                              RunItem<F8E4M3>, RunItem<F8E5M2>,
                              RunItem<int8_t>};

}  // namespace pagemill::attention

#endif  // PAGEMILL_X86
