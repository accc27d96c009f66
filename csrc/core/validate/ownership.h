// Who else names the pages that a batch writes this step.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_

#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/scan.h"

namespace pagemill::internal {

// Appends a violation for each live slot but its first writer that names a
// written page.  Looks only at rows with sound lengths, and in them only at
// page ids in range.  The scan must be of level kFull; uses up its marks.
void LocateOwnership(const BatchView& batch, Scan& scan,
                     std::vector<Violation>& violations);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_OWNERSHIP_H_
