// The two passes behind Validate, apart so that tests can hold one against the
// other, for each of TableScanners():
// Accepts(batch, ...) == Locate(batch, ...).empty() for every batch.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_

#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {

// O(live page slots), without branches on page ids.
bool Accepts(const BatchView& batch, Level level, const TableScanner& scanner);

// Every offender, in order: the same and a second look at bad rows only.
std::vector<Violation> Locate(const BatchView& batch, Level level,
                              const TableScanner& scanner);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_
