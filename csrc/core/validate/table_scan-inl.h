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
  int64_t hits;  // slots that name marked pages; anything when one is outside
};

// The row this many ahead is fetched: rows are apart, and where the next one
// begins the hardware does not guess.  Into all caches: fetching past them
// (prefetchnta) took two to three times as long, as the table then comes from
// memory each time.
inline constexpr int64_t kRowsAhead = 4;
inline constexpr int64_t kPagesPerLine = 16;

inline void Fetch(const int32_t* from, int64_t entries) {
  for (int64_t i = 0; i < entries; i += kPagesPerLine) {
    __builtin_prefetch(from + i);
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
      Fetch(pages + kRowsAhead * scan.pages_per_seq + ahead.begin,
            ahead.end - ahead.begin);
    }
    const RowSlots slots = scan.rows[row];
    const RowFindings found = Row::template Scan<kLookup>(
        pages + slots.begin, slots.end - slots.begin, scan);
    uint8_t flags = found.outside ? kPageOutside : 0;
    if constexpr (kLookup != Lookup::kNone) {
      const bool exact = found.hits == slots.end - slots.written;
      flags |= exact && !found.outside ? 0 : kBadOwnership;
    }
    scan.flags[row] |= flags;
    any |= flags != 0;
  }
  return any;
}

// Row::Notable<kLookup>(pages, count, scan) gives a bit for each of the first
// `count` <= Row::kLanes that is out of range or marked.
template <typename Row>
int64_t FindSlots(const TableScan& scan, int64_t row, int64_t begin,
                  int64_t end, int32_t* slots) {
  const int32_t* pages = scan.page_indices + row * scan.pages_per_seq;
  int64_t found = 0;
  for (int64_t i = begin; i < end; i += Row::kLanes) {
    const int64_t count = end - i < Row::kLanes ? end - i : Row::kLanes;
    uint32_t bits =
        scan.marks == nullptr
            ? Row::template Notable<Lookup::kNone>(pages + i, count, scan)
            : Row::template Notable<Lookup::kMarks>(pages + i, count, scan);
    for (; bits != 0; bits &= bits - 1) {
      slots[found++] = static_cast<int32_t>(i) + __builtin_ctz(bits);
    }
  }
  return found;
}

}  // namespace
}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_INL_H_
