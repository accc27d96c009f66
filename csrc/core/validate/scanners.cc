#include "csrc/core/validate/scanners.h"

#include <vector>

#include "csrc/core/isa.h"
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

namespace pagemill::internal {
namespace {

#if PAGEMILL_X86
// Measured on Zen 4, and not on what came after it.
bool GathersAreSlow() { return __builtin_cpu_is("amd"); }
#endif

std::vector<const TableScanner*> AllTableScanners() {
  std::vector<const TableScanner*> scanners;
  for (const Isa isa : Isas()) {
#if PAGEMILL_X86
    if (isa == Isa::kAvx512) {
      scanners.push_back(&kAvx512TableScanner);
      scanners.push_back(&kAvx512PermuteTableScanner);
    }
    if (isa == Isa::kAvx2) scanners.push_back(&kAvx2TableScanner);
#endif
    if (isa == Isa::kPortable) scanners.push_back(&kPortableTableScanner);
  }
  return scanners;
}

}  // namespace

const std::vector<const TableScanner*>& TableScanners() {
  static const std::vector<const TableScanner*> scanners = AllTableScanners();
  return scanners;
}

const TableScanner& TableScannerFor(Isa isa) {
#if PAGEMILL_X86
  if (isa == Isa::kAvx512) {
    return GathersAreSlow() ? kAvx512PermuteTableScanner : kAvx512TableScanner;
  }
  if (isa == Isa::kAvx2) return kAvx2TableScanner;
#endif
  (void)isa;
  return kPortableTableScanner;
}

}  // namespace pagemill::internal
