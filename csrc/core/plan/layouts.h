// The same batch in the layouts that other kernels read.
//
// Each function reads live rows and live page slots only, so the batch must
// have passed Validate at Level::kStructure.  What is dead in the output is
// defined: pages and lengths 0, running sums the total, slots -1.  O(outputs).
#ifndef PAGEMILL_CSRC_CORE_PLAN_LAYOUTS_H_
#define PAGEMILL_CSRC_CORE_PLAN_LAYOUTS_H_

#include <cstdint>
#include <span>

#include "csrc/core/batch_view.h"
#include "csrc/core/status.h"

namespace pagemill {

// Page slots of all live rows: the capacity that lists of pages need.
int64_t CountPages(const BatchView& batch);

// table[seq * P + slot], i32[S * P].
void WriteFlat(const BatchView& batch, std::span<int32_t> table);

// Rows one after the other: row r's pages start at cu_kv_lens[r] / page_size of
// `pages`, where cu_kv_lens, i32[S + 1], sums lengths rounded up to pages.
// kInvalidArgument: more pages than `pages` holds, or a sum past int32.
Status WriteRagged(const BatchView& batch, std::span<int32_t> cu_kv_lens,
                   std::span<int32_t> pages);

// Row r's pages are pages[kv_indptr[r]] to pages[kv_indptr[r + 1]], and the
// last of them holds last_page_len[r] tokens, of 1 to page_size; 0 for a row
// without pages.  kv_indptr is i32[S + 1], last_page_len i32[S].
// kInvalidArgument: more pages than `pages` holds.
Status WriteIndptr(const BatchView& batch, std::span<int32_t> kv_indptr,
                   std::span<int32_t> last_page_len, std::span<int32_t> pages);

// page * page_size + offset of each token, i32[T].
void WriteSlotMapping(const BatchView& batch, std::span<int32_t> slots);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_LAYOUTS_H_
