// Who else names the pages that a batch writes this step.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_

#include <cstddef>
#include <span>
#include <vector>

#include "csrc/core/validate.h"
#include "csrc/core/validate/scan.h"

namespace pagemill::internal {

// Appends a violation for each slot but the first that writes a page.  Those
// at `reads`, kSharedPageWritten all that there are, get the first writer of
// their page as limit.  The scan must be of level kFull; finds nothing in it
// afterwards.
void LocateOwnership(Scan& scan, std::vector<Violation>& violations,
                     std::span<const size_t> reads);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_
