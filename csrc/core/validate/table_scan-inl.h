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

// How page ids are looked up among the marks.
enum class Lookup { kNone, kMarks, kFilter };

// A row's live slots.
struct LivePages {
  const int32_t* pages;
  int64_t count;
};

inline LivePages PagesOf(const TableScan& scan, int64_t row) {
  const RowSlots slots = scan.rows[row];
  return {scan.page_indices + row * scan.pages_per_seq + slots.begin,
          int64_t{slots.end} - slots.begin};
}

inline void FetchAhead(const TableScan& scan, int64_t row) {
  if (row + kRowsAhead >= scan.num_rows) return;
  const auto [pages, count] = PagesOf(scan, row + kRowsAhead);
  for (int64_t i = 0; i < count; i += kPagesPerLine) {
    __builtin_prefetch(pages + i);
  }
}

// Flags a row for what was found; returns the flags.
template <Lookup kLookup>
inline uint8_t Report(const TableScan& scan, int64_t row, RowFindings found) {
  // Without branches: bad rows come as nobody can guess.
  uint8_t flags = static_cast<uint8_t>(found.outside * kPageOutside);
  if constexpr (kLookup != Lookup::kNone) {
    scan.hits[row] = static_cast<int32_t>(found.hits);
    const RowSlots slots = scan.rows[row];
    const bool differs = found.hits != slots.end - slots.written;
    flags |= static_cast<uint8_t>(differs * kBadOwnership);
  }
  scan.flags[row] |= flags;
  return flags;
}

// Row::Scan<kLookup>(pages, count, scan) gives RowFindings.
template <typename Row, Lookup kLookup>
bool ScanRows(const TableScan& scan) {
  uint8_t any = 0;
  for (int64_t row = 0; row < scan.num_rows; ++row) {
    FetchAhead(scan, row);
    const auto [pages, count] = PagesOf(scan, row);
    any |= Report<kLookup>(scan, row,
                           Row::template Scan<kLookup>(pages, count, scan));
  }
  return any != 0;
}

// Row has Scan for all lookups up to kMost.
template <typename Row, Lookup kMost>
bool ScanTable(const TableScan& scan) {
  if (scan.marks == nullptr) return ScanRows<Row, Lookup::kNone>(scan);
  if constexpr (kMost == Lookup::kFilter) {
    if (scan.filter != nullptr) return ScanRows<Row, Lookup::kFilter>(scan);
  }
  return ScanRows<Row, Lookup::kMarks>(scan);
}

// Bits of the first `count` <= 64 pages.
template <typename Row>
class Word {
 public:
  Word(const TableScan& scan, const int32_t* pages, int64_t count)
      : scan_(scan), pages_(pages), count_(count < 64 ? count : 64) {}

  // Row::Outside(pages, count, scan) gives those of up to Row::kLanes.
  uint64_t Outside() const {
    uint64_t bits = 0;
    for (int64_t i = 0; i < count_; i += Row::kLanes) {
      bits |= uint64_t{Row::Outside(pages_ + i, Some(i), scan_)} << i;
    }
    return bits;
  }

  // Takes what is found off `left`, and stops when nothing is.
  uint64_t Marked(int64_t& left) const {
    uint64_t bits = 0;
    for (int64_t i = 0; i < count_ && left > 0; i += Row::kLanes) {
      const uint32_t some = Row::Marked(pages_ + i, Some(i), scan_);
      bits |= uint64_t{some} << i;
      left -= __builtin_popcount(some);
    }
    return bits;
  }

 private:
  int64_t Some(int64_t i) const {
    return count_ - i < Row::kLanes ? count_ - i : Row::kLanes;
  }

  const TableScan& scan_;
  const int32_t* pages_;
  const int64_t count_;
};

// How many slots of a flagged row read marked pages, at most.  Where no written
// slot's page is outside, the scan has counted them.
template <typename Row>
int64_t MarkedReads(const TableScan& scan, int32_t row, const int32_t* pages) {
  if (scan.marks == nullptr) return 0;
  const auto [begin, written, end] = scan.rows[row];
  const bool counted =
      scan.hits[row] >= 0 &&
      !Row::template Scan<Lookup::kNone>(pages + written, end - written, scan)
           .outside;
  return counted ? scan.hits[row] - (end - written) : written - begin;
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
    int64_t reads = MarkedReads<Row>(scan, row, pages);
    for (int64_t word = begin; word < end; word += 64) {
      uint64_t bits = Word<Row>(scan, pages + word, end - word).Outside();
      bits |= Word<Row>(scan, pages + word, written - word).Marked(reads);
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
