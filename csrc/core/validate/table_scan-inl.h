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
  int64_t hits;  // slots that name marked pages; or -1 when one is outside
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
  uint8_t any = 0;
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
    // Without branches: bad rows come as nobody can guess.
    uint8_t flags = static_cast<uint8_t>(found.outside * kPageOutside);
    if constexpr (kLookup != Lookup::kNone) {
      const bool differs = found.hits != slots.end - slots.written;
      flags |= static_cast<uint8_t>(differs * kBadOwnership);
    }
    scan.flags[row] |= flags;
    any |= flags;
  }
  return any != 0;
}

// A bit for each of the first `count` <= 64 pages that is notable.
// Row::Notable<kLookup>(pages, count, scan) gives those of up to Row::kLanes.
template <typename Row, Lookup kLookup>
uint64_t NotableWord(const TableScan& scan, const int32_t* pages,
                     int64_t count) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < count; i += Row::kLanes) {
    const int64_t some = count - i < Row::kLanes ? count - i : Row::kLanes;
    bits |= uint64_t{Row::template Notable<kLookup>(pages + i, some, scan)}
            << i;
  }
  return bits;
}

// Whether a flagged row may read marked pages.  Where no written slot's page is
// outside, the count of hits has told.
template <typename Row>
bool MayReadMarked(const TableScan& scan, int32_t row, const int32_t* pages) {
  if (scan.marks == nullptr) return false;
  const auto [begin, written, end] = scan.rows[row];
  return (scan.flags[row] & kBadOwnership) != 0 ||
         Row::template Scan<Lookup::kNone>(pages + written, end - written, scan)
             .outside;
}

// The loops' ends are mostly the same for each row, and little else branches:
// one row's lookups need not wait for another's.
template <typename Row>
void FindSlots(const TableScan& scan, const int32_t* rows, int64_t num_rows,
               int32_t* slots, int32_t* ends) {
  int32_t found = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t row = rows[i];
    const auto [begin, written, end] = scan.rows[row];
    const int32_t* pages = scan.page_indices + row * scan.pages_per_seq;
    const bool lookup = MayReadMarked<Row>(scan, row, pages);
    for (int64_t word = begin; word < end; word += 64) {
      const auto until = [word](int64_t last) {
        return last - word < 64 ? last - word : 64;
      };
      uint64_t bits =
          NotableWord<Row, Lookup::kNone>(scan, pages + word, until(end));
      if (lookup) {
        bits |= NotableWord<Row, Lookup::kMarks>(scan, pages + word,
                                                 until(written));
      }
      for (; bits != 0; bits &= bits - 1) {
        slots[found++] = static_cast<int32_t>(word) + __builtin_ctzll(bits);
      }
    }
    ends[i] = found;
  }
}

}  // namespace
}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_INL_H_
