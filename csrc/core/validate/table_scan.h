// One pass over the page table, compiled once per instruction set; see
// csrc/core/isa.h for why there is only plain data here.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_H_

#include <cstdint>

#include "csrc/core/x86.h"

namespace pagemill::internal {

// Page slots of a row: [begin, end) are live, of them [written, end) receive
// this step's tokens.  A row whose lengths are bad has none.
struct RowSlots {
  int32_t begin;
  int32_t written;
  int32_t end;
};

// In front of many marks a filter says which pages are worth a look at them: it
// has a bit per page number modulo its size.
struct TableFilter {
  uint32_t bits;              // a power of two
  int64_t max_pages_without;  // pools of so many pages, or fewer, need none
  int64_t max_written;  // with more pages written it keeps too few others away
};

struct TableScan {
  const int32_t* page_indices;  // [num_rows, pages_per_seq]
  int64_t pages_per_seq;
  const RowSlots* rows;
  int64_t num_rows;
  uint32_t total_num_pages;
  const uint32_t* marks;   // a bit per page written this step; or null
  const uint32_t* filter;  // of the marks; or null
  uint32_t filter_bits;
  uint8_t* flags;  // [num_rows]
  // [num_rows]: live slots that name marked pages; negative where not counted.
  // Set with marks only.
  int32_t* hits;
};

// A row's flags.
inline constexpr uint8_t kBadLengths = 1;  // set before the scan
inline constexpr uint8_t kPageOutside = 2;
inline constexpr uint8_t kBadOwnership = 4;  // maybe, with kPageOutside
inline constexpr uint8_t kBadTokens = 8;     // set after the scan

struct TableScanner {
  const char* name;
  // Flags rows with a live page id out of range; with marks also rows of which
  // not exactly the written slots name marked pages.  True when it flags any.
  bool (*scan)(const TableScan& scan);
  // For rows that were flagged: writes those of their live slots, row after
  // row, whose page is out of range, or marked while the slot is not written;
  // and how many there are up to each row's end.
  void (*find)(const TableScan& scan, const int32_t* rows, int64_t num_rows,
               int32_t* slots, int32_t* ends);
  // The first that suits a batch is used.
  const TableFilter* filters;
  int64_t num_filters;
};

extern const TableScanner kPortableTableScanner;
#if PAGEMILL_X86
extern const TableScanner kAvx2TableScanner;
extern const TableScanner kAvx512TableScanner;
extern const TableScanner kAvx512PermuteTableScanner;
#endif

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_H_
