// Which instruction sets this build has kernels for and this machine runs.
//
// Code for a set lies in files of its own, compiled for it and reached through
// a table of functions.  Such a file must not emit an inline function that the
// linker could take for another file's, or a machine would meet instructions
// it lacks: plain data without methods there, and no std:: templates.
#ifndef PAGEMILL_CSRC_CORE_ISA_H_
#define PAGEMILL_CSRC_CORE_ISA_H_

#include <string_view>
#include <vector>

#include "csrc/core/status.h"

namespace pagemill {

enum class Isa {
  kPortable,  // what every machine of the architecture has
  kAvx2,      // with FMA, F16C, BMI and BMI2
  kAvx512,    // x86-64-v4: F, BW, CD, DQ and VL
};

std::string_view IsaName(Isa isa);

// Built in and run by this machine, the best first; never empty.
const std::vector<Isa>& Isas();

// kInvalidArgument, listing what there is, when it is not among Isas().
Result<Isa> FindIsa(std::string_view name);

// The one that the environment variable PAGEMILL_CPU_ISA names, else the best;
// picked at the first call.
Result<Isa> DefaultIsa();

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_ISA_H_
