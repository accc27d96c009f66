// The kernels for what every machine of the architecture has.
#include "csrc/core/attention/kernel-inl.h"
#include "csrc/core/attention/kernel.h"

namespace pagemill::attention {

const Kernels kPortableKernels = {RunItem<float>, RunItem<BFloat16>,
                                  RunItem<F8E4M3>, RunItem<F8E5M2>,
                                  RunItem<int8_t>};

}  // namespace pagemill::attention
