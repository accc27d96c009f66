// Which of the scans over the page table this machine takes.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_SCANNERS_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_SCANNERS_H_

#include <vector>

#include "csrc/core/isa.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {

// All that it runs: they give the same answers.  Never empty.
const std::vector<const TableScanner*>& TableScanners();

// The fastest one within an instruction set of Isas().
const TableScanner& TableScannerFor(Isa isa);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_SCANNERS_H_
