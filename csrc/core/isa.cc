#include "csrc/core/isa.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/status.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/x86.h"

namespace pagemill {
namespace {

#if PAGEMILL_X86
// What the sets' files are compiled for, feature by feature: a virtual machine
// may hide any of them.
bool RunsAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
bool RunsAvx512() {
  return RunsAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<Isa> DetectIsas() {
  std::vector<Isa> isas;
#if PAGEMILL_X86
  if (RunsAvx512()) isas.push_back(Isa::kAvx512);
  if (RunsAvx2()) isas.push_back(Isa::kAvx2);
#endif
  isas.push_back(Isa::kPortable);
  return isas;
}

}  // namespace

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

const std::vector<Isa>& Isas() {
  static const std::vector<Isa> isas = DetectIsas();
  return isas;
}

Result<Isa> FindIsa(std::string_view name) {
  std::string names;
  for (const Isa isa : Isas()) {
    if (IsaName(isa) == name) return isa;
    names += StrCat(names.empty() ? "" : ", ", IsaName(isa));
  }
  return InvalidArgument(StrCat("PAGEMILL_CPU_ISA=", name,
                                " is not an instruction set of this machine "
                                "and build, which have ",
                                names, ". Unset it to take the first."));
}

Result<Isa> DefaultIsa() {
  static const Result<Isa> isa = [] {
    const char* forced = std::getenv("PAGEMILL_CPU_ISA");
    return forced == nullptr || *forced == '\0' ? Result<Isa>(Isas().front())
                                                : FindIsa(forced);
  }();
  return isa;
}

}  // namespace pagemill
