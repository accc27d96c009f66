// The two passes behind Validate, apart so that tests can hold one against the
// other: Accepts(batch, level) == Locate(batch, level).empty() for every batch.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_

#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"

namespace pagemill::internal {

// O(live page slots), without branches on the arrays' values in the loops.
bool Accepts(const BatchView& batch, Level level);

// Every offender, in order.
std::vector<Violation> Locate(const BatchView& batch, Level level);

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_PASSES_H_
