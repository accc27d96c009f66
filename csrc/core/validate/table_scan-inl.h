// The loop over rows that the table_scan_*.cc files share.
//
// Only for them: everything has internal linkage.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_INL_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_INL_H_

#include <cstdint>

#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

struct RowFindings {
  bool outside;  // a page id is out of range
  int64_t hits;  // slots that name marked pages
};

// The row this many ahead is fetched.
inline constexpr int64_t kRowsAhead = 2;
inline constexpr int64_t kPagesPerLine = 16;

// Past the caches, or the table, which is read once, would evict the marks.
inline void FetchOnce(const int32_t* from, int64_t entries) {
  for (int64_t i = 0; i < entries; i += kPagesPerLine) {
    __builtin_prefetch(from + i, 0, 0);
  }
}

// How page ids are looked up among the marks.
enum class Lookup { kNone, kMarks, kFilter };

// Row::Scan<kLookup>(pages, count, scan) gives RowFindings.
template <typename Row, Lookup kLookup>
bool ScanRows(const TableScan& scan) {
  bool any = false;
  for (int64_t row = 0; row < scan.num_rows; ++row) {
    const int32_t* pages = scan.page_indices + row * scan.pages_per_seq;
    if (row + kRowsAhead < scan.num_rows) {
      const RowSlots ahead = scan.rows[row + kRowsAhead];
      FetchOnce(pages + kRowsAhead * scan.pages_per_seq + ahead.begin,
                ahead.end - ahead.begin);
    }
    const RowSlots slots = scan.rows[row];
    const RowFindings found = Row::template Scan<kLookup>(
        pages + slots.begin, slots.end - slots.begin, scan);
    const bool bad = found.outside | (kLookup != Lookup::kNone &&
                                      found.hits != slots.end - slots.written);
    scan.flags[row] |= bad;
    any |= bad;
  }
  return any;
}

}  // namespace
}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_INL_H_
