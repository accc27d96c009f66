// Which pages a batch writes this step, and who else names them.
#ifndef PAGEMILL_CSRC_CORE_OWNERSHIP_H_
#define PAGEMILL_CSRC_CORE_OWNERSHIP_H_

#include <cstdint>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"

namespace pagemill {

// Page slots of a row: [0, live) hold KV, of them [written, live) receive this
// step's tokens.
struct SlotRange {
  int64_t written = 0;
  int64_t live = 0;
};

SlotRange Slots(const BatchView& batch, int64_t seq);

// True when each page written this step is named exactly once in all live
// slots.  The batch's structure must be valid.  O(live slots).
bool OwnershipHolds(const BatchView& batch);

// Appends a violation for each slot that breaks that rule.  Looks only at rows
// with usable[seq], and in them only at page ids in range.
void LocateOwnership(const BatchView& batch, const std::vector<bool>& usable,
                     std::vector<Violation>& violations);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_OWNERSHIP_H_
