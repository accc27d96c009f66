// Work lists: which keys each tile of queries needs, as a kernel runs them.
//
// A row's queries are cut into tiles of q_block.  The keys that a tile sees are
// one range, with the causal mask and the window alike; it is widened to whole
// blocks of kv_block at its front, and ends with the last key seen.  So each
// block of each item holds a pair that is visible, and together they hold all.
#ifndef PAGEMILL_CSRC_CORE_PLAN_WORK_LIST_H_
#define PAGEMILL_CSRC_CORE_PLAN_WORK_LIST_H_

#include <cstdint>
#include <span>

#include "csrc/core/batch_view.h"
#include "csrc/core/status.h"

namespace pagemill {

struct WorkOptions {
  int64_t q_block = 0;
  int64_t kv_block = 0;  // a multiple of the batch's page_size
  bool causal = true;
  int64_t sliding_window = 0;   // keys that a query keeps; 0 for all
  int64_t max_kv_per_item = 0;  // a multiple of kv_block; 0: no limit
};

// An item is six int32s: row, q_begin, q_end (rows of the token buffer),
// kv_begin, kv_end (positions in the sequence), flags.
inline constexpr int64_t kWorkItemSize = 6;
enum WorkFlags : int32_t {
  kFirstOfTile = 1,  // begin the tile's output
  kLastOfTile = 2,   // finish it
};

// kInvalidArgument: blocks that are not positive or no multiples.
Status CheckWorkOptions(const BatchView& batch, const WorkOptions& options);

// Items of a batch that passed Validate at Level::kStructure, with options that
// passed.  O(tiles).
int64_t CountWork(const BatchView& batch, const WorkOptions& options);

// Writes them in the rows' order, each tile's from its first key to its last,
// then items of row -1 and zeros; `items` has room for CountWork's at least.
// O(items).
void WriteWork(const BatchView& batch, const WorkOptions& options,
               std::span<int32_t> items);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_WORK_LIST_H_
