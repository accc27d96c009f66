// The kernels for what every machine of the architecture has.
#include "csrc/core/attention/kernel-inl.h"
#include "csrc/core/attention/kernel.h"

namespace pagemill::attention {

const Kernels kPortableKernels = {RunItem<float>, RunItem<BFloat16>};

}  // namespace pagemill::attention
