// Which instruction set the kernels use.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_ISA_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_ISA_H_

#include <string_view>
#include <vector>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/status.h"

namespace pagemill::attention {

struct Isa {
  std::string_view name;
  const Kernels* kernels;
};

// Built in and run by this machine, the best first; never empty.
const std::vector<Isa>& Isas();

// kInvalidArgument, listing what there is, when it is not among Isas().
Result<Isa> FindIsa(std::string_view name);

// The one that the environment variable PAGEMILL_CPU_ISA names, else the best;
// picked at the first call.
Result<Isa> DefaultIsa();

}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_ISA_H_
