// The scan for what every machine of the architecture has.
#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

struct Row {
  static constexpr int64_t kLanes = 16;

  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    uint32_t outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t page = static_cast<uint32_t>(pages[i]);
      outside |= page >= scan.total_num_pages;  // negatives wrap high
    }
    if (outside != 0) return {true, -1};
    int64_t hits = 0;
    if (kLookup == Lookup::kNone) return {false, hits};
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t page = static_cast<uint32_t>(pages[i]);
      hits += (scan.marks[page / 32] >> (page % 32)) & 1;
    }
    return {false, hits};
  }

  static uint32_t Outside(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool outside = Scan<Lookup::kNone>(pages + i, 1, scan).outside;
      bits |= static_cast<uint32_t>(outside) << i;
    }
    return bits;
  }

  static uint32_t Marked(const int32_t* pages, int64_t count,
                         const TableScan& scan) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool marked = Scan<Lookup::kMarks>(pages + i, 1, scan).hits > 0;
      bits |= static_cast<uint32_t>(marked) << i;
    }
    return bits;
  }
};

}  // namespace

const TableScanner kPortableTableScanner = {
    .name = "portable",
    .scan = ScanTable<Row, Lookup::kMarks>,
    .find = FindSlots<Row>,
    .filters = nullptr,
    .num_filters = 0};

}  // namespace pagemill::internal
