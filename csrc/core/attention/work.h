// Cuts a batch into the items that threads share.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_WORK_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_WORK_H_

#include <cstdint>
#include <vector>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/ragged_paged_attention.h"

namespace pagemill::attention {

struct Work {
  Problem problem;
  std::vector<Item> items;
  int64_t max_rows = 0;  // of an item
  // A rough guess for one thread.
  double nanoseconds = 0;
};

// How an item is cut and what it computes depends on its sequence alone, so
// that a result does not change with neighbours or threads.
Work Divide(const RaggedPagedAttentionArgs& args);

}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_WORK_H_
