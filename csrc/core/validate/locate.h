// The second pass: names every offender of a batch that was not accepted.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_LOCATE_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_LOCATE_H_

#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/scan.h"

namespace pagemill::internal {

// For a batch whose sizes do not hold.
std::vector<Violation> LocateSizes(const BatchView& batch);

// For one whose sizes do; `scan` is of that level and is used up.
std::vector<Violation> LocateRows(const BatchView& batch, Level level,
                                  Scan& scan);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_LOCATE_H_
